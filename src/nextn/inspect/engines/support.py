"""What each engine supports and how it builds a head: data only. A new release is a change here.

Read from SGLang 0.5.17 and 0.5.23 (``srt/configs/model_config.py`` for the architectures, ``srt/models/*_nextn.py``
and ``*_mtp.py`` with the loaders that they inherit for the rest), vLLM 0.33.0 (``config/speculative.py``,
``models/*_mtp.py``, ``models/*/mtp.py``, ``models/utils.py``, ``model_loader/default_loader.py``), transformers 5.24.0
(``generation/candidate_generator.py``). llama.cpp and TensorRT-LLM rest on their documentation and issue threads
(llama.cpp 20533 and 25589, unsloth-zoo 847). Nothing here was run. What was not found out is None, and a verdict that
hangs on it is ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Support:
    """How one engine runs the heads of some architectures or model types.

    Attributes:
        kinds: architectures or model types of config.json; ``gguf:ARCH`` for a GGUF.
        heads: how many head layers are run; None for all.
        drafts: the one number of draft tokens that works; None for any.
        since: first version with this support, "" for any that has native heads.
        missing: what missing head tensors cause: ``silent`` random weights; an ``error``; ``unquantised``: an error
            where the checkpoint is not quantised, else silence; ``layer``: the same, but always an error where a whole
            layer is missing.
        unknown: what keys under the head's names that the engine does not expect cause: they are skipped (``skip``), a
            KeyError (``key``), or vLLM's AutoWeightsLoader refuses them by name (``named``).
        spared: endings of keys that are skipped though `unknown` says otherwise.
        count: what the declared layer count must be for a head to run: ``ignored``, ``positive`` (0 or absent fails),
            ``nonzero`` (0 fails, absent is taken as 1), or ``one`` (all else fails an assertion).
        grouped: whether stacked experts are read.
        prefixes: what may stand before the head's published keys.
        stops_at: prefixes at which the loader stops with a KeyError; keys under others are passed over.
        full: quantisation methods for which the whole head is built in full precision.
        plain: words in checkpoint module names that are never built quantised.
        rename: (from, to): how the head's module names change before lists are matched; "" keeps them. ``{n}`` is the
            number of the target's layers.
        strict: whether `rename` was read from source, so that lists can be matched as the engine does.
        hybrid: recurrent layers in the target.
    """

    kinds: tuple[str, ...]
    heads: int | None = None
    drafts: int | None = None
    since: str = ""
    missing: Literal["silent", "error", "unquantised", "layer"] | None = None
    unknown: Literal["skip", "key", "named"] | None = None
    spared: tuple[str, ...] = ()
    count: Literal["ignored", "positive", "nonzero", "one"] | None = None
    grouped: bool | None = None
    prefixes: tuple[str, ...] | None = None
    stops_at: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    rename: tuple[str, str] = ("", "")
    strict: bool = False
    hybrid: bool = False


_DECODER = ("model.layers.{n}", "model.decoder")
_AS_PUBLISHED = ("",)
_LAYERS = "model.language_model."
_WRAPPED = ("", "language_model.")

SUPPORT: dict[str, tuple[Support, ...]] = {
    "sglang": (
        Support(
            (
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
            ),
            heads=1,
            missing="silent",
            unknown="skip",
            count="ignored",
            grouped=True,
            prefixes=_AS_PUBLISHED,
            full=("modelopt_fp4",),
            plain=("mtp.fc",),
            strict=True,
            hybrid=True,
        ),
        Support(
            ("Qwen3NextForCausalLM",),
            heads=1,
            missing="silent",
            unknown="key",
            spared=("_scale", ".bias"),
            count="ignored",
            grouped=False,
            prefixes=_AS_PUBLISHED,
            plain=("mtp.fc",),
            rename=("mtp.", "model."),
            strict=True,
            hybrid=True,
        ),
        Support(
            ("Qwen4ExpForConditionalGeneration",),
            heads=1,
            since="0.5.23",
            missing="silent",
            unknown="skip",
            count="ignored",
            grouped=True,
            prefixes=_AS_PUBLISHED,
            full=("modelopt_fp4",),
            hybrid=True,
        ),
        Support(
            ("ExaoneMoEForCausalLM",),
            heads=1,
            missing="silent",
            unknown="skip",
            count="ignored",
            prefixes=_AS_PUBLISHED,
            plain=("mtp.fc",),
            rename=("mtp.", "model."),
            strict=True,
        ),
        Support(
            ("ExaoneMoeForCausalLM",),
            heads=1,
            since="0.5.23",
            missing="silent",
            unknown="skip",
            count="ignored",
            prefixes=_AS_PUBLISHED,
            plain=("mtp.fc",),
            rename=("mtp.", "model."),
            strict=True,
        ),
        Support(
            ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
            heads=1,
            missing="silent",
            unknown="skip",
            count="one",
            prefixes=_AS_PUBLISHED,
            full=("modelopt_fp4",),
            plain=("eh_proj",),
            rename=_DECODER,
            strict=True,
        ),
        Support(("DeepseekV4ForCausalLM",), heads=1, missing="silent", count="one", prefixes=_AS_PUBLISHED),
        Support(
            ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"),
            heads=1,
            missing="silent",
            unknown="skip",
            count="one",
            prefixes=_AS_PUBLISHED,
            full=("modelopt_fp4",),
            plain=("eh_proj",),
            rename=_DECODER,
            strict=True,
        ),
        Support(
            ("GlmOcrForConditionalGeneration",),
            heads=1,
            missing="silent",
            unknown="skip",
            count="one",
            prefixes=("", _LAYERS),
            full=("modelopt_fp4",),
            plain=("eh_proj",),
            rename=_DECODER,
            strict=True,
        ),
        Support(
            ("Glm5NextForConditionalGeneration",),
            heads=1,
            since="0.5.23",
            missing="silent",
            unknown="skip",
            count="one",
            prefixes=("", _LAYERS),
            full=("modelopt_fp4",),
        ),
        Support(("MiMoForCausalLM",), heads=1, missing="silent", unknown="key", count="ignored", plain=("input_proj",)),
        Support(
            ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
            missing="silent",
            unknown="skip",
            count="ignored",
            plain=("eh_proj",),
        ),
        Support(
            ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
            heads=1,
            missing="silent",
            unknown="skip",
            count="ignored",
            prefixes=_WRAPPED,
            hybrid=True,
        ),
        Support(
            ("NemotronH_Omni_Reasoning_V3",),
            heads=1,
            since="0.5.23",
            missing="silent",
            unknown="skip",
            count="ignored",
            prefixes=_WRAPPED,
            hybrid=True,
        ),
        Support(
            ("Step3p5ForCausalLM",),
            missing="error",
            unknown="key",
            count="positive",
            prefixes=_AS_PUBLISHED,
            plain=("eh_proj",),
        ),
        Support(
            ("Step3p7ForConditionalGeneration",),
            since="0.5.23",
            missing="error",
            unknown="key",
            count="positive",
            prefixes=_AS_PUBLISHED,
            plain=("eh_proj",),
        ),
        Support(("Ernie4_5_MoeForCausalLM",), heads=1, missing="silent", unknown="key", count="ignored"),
        Support(("LongcatFlashForCausalLM",), heads=1, missing="silent", unknown="skip", count="ignored"),
        Support(
            ("BailingMoeV2ForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2_5ForCausalLM"),
            heads=1,
            missing="silent",
            unknown="skip",
            count="one",
            full=("modelopt_fp4",),
        ),
        Support(
            ("BailingMoeV3ForCausalLM",),
            heads=1,
            since="0.5.23",
            missing="silent",
            unknown="skip",
            count="one",
            full=("modelopt_fp4",),
        ),
        Support(("HYV3ForCausalLM",), heads=1, missing="silent", unknown="skip", count="ignored", plain=("eh_proj",)),
        Support(
            ("HYV4ForCausalLM",),
            heads=1,
            since="0.5.23",
            missing="silent",
            count="ignored",
            prefixes=_AS_PUBLISHED,
            plain=("eh_proj",),
        ),
        Support(("InklingForConditionalGeneration",), missing="silent", count="ignored"),
        Support(("Qwen3MoeForCausalLM",), heads=1, missing="silent", count="ignored"),
    ),
    "vllm": (
        Support(
            ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
            missing="unquantised",
            unknown="named",
            count="nonzero",
            grouped=True,
            prefixes=_AS_PUBLISHED,
            strict=True,
            hybrid=True,
        ),
        Support(
            ("qwen3_next",),
            missing="unquantised",
            unknown="named",
            count="nonzero",
            grouped=True,
            prefixes=_AS_PUBLISHED,
            strict=True,
            hybrid=True,
        ),
        Support(
            ("qwen4_exp", "qwen4_exp_text"),
            missing="unquantised",
            unknown="named",
            count="nonzero",
            grouped=True,
            prefixes=("", "model.language_model.", "model.", "language_model."),
            hybrid=True,
        ),
        Support(
            ("exaone_moe", "exaone4_5"),
            missing="unquantised",
            unknown="named",
            count="nonzero",
            grouped=True,
            strict=True,
        ),
        Support(
            ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
            heads=1,
            missing="layer",
            unknown="key",
            count="nonzero",
            grouped=True,
            plain=("eh_proj",),
            strict=True,
        ),
        Support(("deepseek_v4",), missing="layer", unknown="key", count="nonzero", prefixes=_AS_PUBLISHED),
        Support(
            ("glm4_moe", "glm4_moe_lite"),
            heads=1,
            missing="unquantised",
            unknown="key",
            spared=(".weight_scale", ".bias"),
            count="nonzero",
            grouped=True,
            prefixes=_AS_PUBLISHED,
            stops_at=(_LAYERS,),
            plain=("eh_proj",),
            strict=True,
        ),
        Support(
            ("glm_ocr",),
            heads=1,
            missing="unquantised",
            unknown="key",
            spared=(".weight_scale", ".bias"),
            count="nonzero",
            prefixes=("", _LAYERS),
            plain=("eh_proj",),
            strict=True,
        ),
        Support(("glm5_next",), missing="layer", unknown="key", count="nonzero", prefixes=("", _LAYERS)),
        Support(("mimo",), heads=1, drafts=1, missing="unquantised", unknown="named", count="nonzero"),
        Support(
            ("MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM", "MiMoV2FlashForCausalLM"),
            heads=1,
            missing="unquantised",
            unknown="skip",
            count="ignored",
        ),
        Support(
            ("nemotron_h", "nemotron_h_puzzle"),
            heads=1,
            missing="unquantised",
            unknown="skip",
            count="positive",
            prefixes=_WRAPPED,
            hybrid=True,
        ),
        Support(
            ("step3p5", "step3p7"),
            missing="error",
            unknown="key",
            count="nonzero",
            prefixes=_AS_PUBLISHED,
            stops_at=(_LAYERS,),
            plain=("eh_proj",),
        ),
        Support(("ernie4_5_moe",), heads=1, missing="unquantised", unknown="named", count="nonzero"),
        Support(("longcat_flash",), heads=1, missing="unquantised", unknown="key", count="nonzero"),
        Support(
            ("bailing_hybrid", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"),
            heads=1,
            missing="error",
            unknown="skip",
            count="nonzero",
        ),
        Support(("hy_v3",), heads=1, missing="unquantised", count="nonzero"),
        Support(("hy_v4",), heads=1, missing="unquantised", unknown="skip", count="nonzero", prefixes=_AS_PUBLISHED),
        Support(("minimax_m3_vl",), missing="error", unknown="skip", count="ignored", prefixes=_WRAPPED),
        Support(("kimi_k3",), missing="layer", unknown="skip", count="nonzero", prefixes=_WRAPPED),
        Support(("inkling_mm_model", "inkling_model"), missing="error", unknown="named", count="positive"),
    ),
    "transformers": (
        Support(("deepseek_v3", "glm4_moe", "step3p7"), missing="error", unknown="skip", count="nonzero"),
    ),
    "llamacpp": (
        Support(
            ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
            heads=1,
            missing="error",
            unknown="key",
            count="positive",
            grouped=True,
            hybrid=True,
        ),
        Support(("qwen3_next",), heads=1, missing="error", unknown="key", count="nonzero", grouped=True, hybrid=True),
        Support(
            (
                "glm4_moe",
                "glm_moe_dsa",
                "deepseek_v32",
                "deepseek_v4",
                "mimo_v2",
                "mimo_v2_flash",
                "nemotron_h",
                "step3p5",
                "step3p7",
                "bailing_hybrid",
                "hy_v3",
            ),
            missing="error",
            unknown="key",
            count="positive",
        ),
        Support(
            ("gguf:qwen3next", "gguf:qwen35", "gguf:qwen35moe"),
            heads=1,
            missing="error",
            unknown="key",
            count="positive",
            grouped=True,
            hybrid=True,
        ),
        Support(
            (
                "gguf:glm4moe",
                "gguf:glm-dsa",
                "gguf:deepseek2",
                "gguf:deepseek32",
                "gguf:deepseek4",
                "gguf:mimo2",
                "gguf:nemotron_h",
                "gguf:nemotron_h_moe",
                "gguf:step35",
                "gguf:bailingmoe3",
                "gguf:hy-v3",
            ),
            missing="error",
            unknown="key",
            count="positive",
            grouped=True,
        ),
    ),
    "tensorrt_llm": (
        Support(
            (
                "qwen3_next",
                "qwen3_5",
                "qwen3_5_text",
                "qwen3_5_moe",
                "qwen3_5_moe_text",
                "exaone_moe",
                "deepseek_v3",
                "deepseek_v32",
                "glm4_moe",
                "glm_moe_dsa",
                "nemotron_h",
                "step3p5",
                "step3p7",
            ),
        ),
    ),
    "nextn": (),
}
