"""What each engine supports and how it builds a head: data only. A new release is a change here.

Read from SGLang 0.5.17 and 0.5.23 (``srt/configs/model_config.py`` for the architectures, ``srt/models/*_nextn.py`` and
``*_mtp.py`` for the rest), vLLM 0.33.0 (``config/speculative.py``, ``model_executor/models/*_mtp.py``), transformers
5.24.0 (``generation/candidate_generator.py``). llama.cpp and TensorRT-LLM rest on their documentation and issue
threads. Nothing here was run unless a row says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nextn import __version__


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as a whole.

    Attributes:
        title: its name for people.
        newest: the newest version that this table speaks of.
        read: versions whose source was read.
        since: first version that runs native heads at all, "" if unknown.
        basis: what the verdicts rest on.
    """

    title: str
    newest: str
    read: tuple[str, ...]
    since: str
    basis: Literal["source", "documentation", "own code"]


ENGINE: dict[str, Engine] = {
    "sglang": Engine("SGLang", "0.5.23", ("0.5.17", "0.5.23"), "", "source"),
    "vllm": Engine("vLLM", "0.33.0", ("0.33.0",), "", "source"),
    "transformers": Engine("transformers", "5.24.0", ("5.24.0",), "5.14", "source"),
    "llamacpp": Engine("llama.cpp", "b10800", (), "b9180", "documentation"),
    "tensorrt_llm": Engine("TensorRT-LLM", "1.2", (), "", "documentation"),
    "nextn": Engine("nextn", __version__, (__version__,), "", "own code"),
}


@dataclass(frozen=True, slots=True)
class Support:
    """How one engine runs the heads of some architectures or model types.

    Attributes:
        kinds: architectures or model types of config.json.
        heads: how many head layers are run; None for all.
        drafts: the one number of draft tokens that works; None for any.
        since: first version with this support, "" for any that has native heads.
        missing: what missing head tensors cause: ``silent`` random weights, an ``error``, or ``unquantised``: an error
            only where the checkpoint is not quantised.
        unknown: what keys that the engine does not expect cause.
        count: what the declared layer count must be for a head to run: ``ignored``, ``positive`` (0 or absent
            fails), or ``nonzero`` (0 fails, absent is taken as 1).
        grouped: whether stacked experts are read; None where that was not found out.
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
    missing: Literal["silent", "error", "unquantised"] = "silent"
    unknown: Literal["skip", "error"] = "skip"
    count: Literal["ignored", "positive", "nonzero"] = "ignored"
    grouped: bool | None = True
    full: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    rename: tuple[str, str] = ("", "")
    strict: bool = False
    hybrid: bool = False


_DECODER = ("model.layers.{n}", "model.decoder")

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
            full=("modelopt_fp4",),
            plain=("mtp.fc",),
            strict=True,
            hybrid=True,
        ),
        Support(
            ("Qwen3NextForCausalLM",),
            heads=1,
            unknown="error",
            grouped=False,
            plain=("mtp.fc",),
            rename=("mtp.", "model."),
            strict=True,
            hybrid=True,
        ),
        Support(("Qwen4ExpForConditionalGeneration",), heads=1, since="0.5.23", full=("modelopt_fp4",), hybrid=True),
        Support(
            ("ExaoneMoEForCausalLM",), grouped=None, heads=1, plain=("mtp.fc",), rename=("mtp.", "model."), strict=True
        ),
        Support(
            ("ExaoneMoeForCausalLM",),
            grouped=None,
            heads=1,
            since="0.5.23",
            plain=("mtp.fc",),
            rename=("mtp.", "model."),
            strict=True,
        ),
        Support(
            ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
            grouped=None,
            heads=1,
            count="positive",
            full=("modelopt_fp4",),
            plain=("eh_proj",),
            rename=_DECODER,
            strict=True,
        ),
        Support(("DeepseekV4ForCausalLM",), grouped=None, heads=1),
        Support(
            ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmOcrForConditionalGeneration"),
            grouped=None,
            heads=1,
            count="positive",
            full=("modelopt_fp4",),
            plain=("eh_proj",),
            rename=_DECODER,
            strict=True,
        ),
        Support(
            ("Glm5NextForConditionalGeneration",),
            grouped=None,
            heads=1,
            since="0.5.23",
            count="positive",
            full=("modelopt_fp4",),
        ),
        Support(("MiMoForCausalLM",), heads=1, plain=("input_proj",)),
        Support(("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"), plain=("eh_proj",)),
        Support(("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"), grouped=None, heads=1, hybrid=True),
        Support(("NemotronH_Omni_Reasoning_V3",), heads=1, since="0.5.23", hybrid=True),
        Support(("Step3p5ForCausalLM",), grouped=None, missing="error", plain=("eh_proj",)),
        Support(
            ("Step3p7ForConditionalGeneration",), grouped=None, since="0.5.23", missing="error", plain=("eh_proj",)
        ),
        Support(("Ernie4_5_MoeForCausalLM",), grouped=None, heads=1),
        Support(("LongcatFlashForCausalLM",), grouped=None, heads=1),
        Support(
            ("BailingMoeV2ForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2_5ForCausalLM"),
            grouped=None,
            heads=1,
            full=("modelopt_fp4",),
        ),
        Support(("BailingMoeV3ForCausalLM",), grouped=None, heads=1, since="0.5.23", full=("modelopt_fp4",)),
        Support(("HYV3ForCausalLM",), grouped=None, heads=1, plain=("eh_proj",)),
        Support(("HYV4ForCausalLM",), grouped=None, heads=1, since="0.5.23", plain=("eh_proj",)),
        Support(("InklingForConditionalGeneration",), grouped=None),
        Support(("Qwen3MoeForCausalLM",), grouped=None, heads=1),
    ),
    "vllm": (
        Support(
            ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
            missing="unquantised",
            count="nonzero",
            strict=True,
            hybrid=True,
        ),
        Support(("qwen3_next",), missing="unquantised", count="nonzero", strict=True, hybrid=True),
        Support(("qwen4_exp", "qwen4_exp_text"), missing="unquantised", count="nonzero", hybrid=True),
        Support(("exaone_moe", "exaone4_5"), missing="unquantised", count="nonzero", strict=True),
        Support(
            ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
            heads=1,
            missing="error",
            count="nonzero",
            plain=("eh_proj",),
            strict=True,
        ),
        Support(("deepseek_v4",), missing="error", count="nonzero"),
        Support(
            ("glm4_moe", "glm4_moe_lite", "glm_ocr"),
            heads=1,
            missing="error",
            count="nonzero",
            plain=("eh_proj",),
            strict=True,
        ),
        Support(("glm5_next",), missing="error", count="nonzero"),
        Support(("mimo",), heads=1, drafts=1, missing="unquantised", count="nonzero"),
        Support(
            ("MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM", "MiMoV2FlashForCausalLM"), heads=1, missing="unquantised"
        ),
        Support(("nemotron_h", "nemotron_h_puzzle"), heads=1, missing="unquantised", count="positive", hybrid=True),
        Support(("step3p5", "step3p7"), missing="error", count="nonzero", plain=("eh_proj",)),
        Support(("ernie4_5_moe",), heads=1, missing="unquantised", count="nonzero"),
        Support(("longcat_flash",), heads=1, missing="unquantised", count="nonzero"),
        Support(
            ("bailing_hybrid", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"),
            heads=1,
            missing="error",
            count="nonzero",
        ),
        Support(("hy_v3", "hy_v4"), heads=1, missing="unquantised", count="nonzero"),
        Support(("minimax_m3_vl",), missing="error"),
        Support(("kimi_k3",), missing="error", count="nonzero"),
        Support(("inkling_mm_model", "inkling_model"), missing="error", count="positive"),
    ),
    "transformers": (Support(("deepseek_v3", "glm4_moe", "step3p7"), missing="error", count="nonzero", grouped=None),),
    "llamacpp": (
        Support(
            ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
            heads=1,
            missing="error",
            unknown="error",
            count="nonzero",
            hybrid=True,
        ),
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
            unknown="error",
            count="nonzero",
            grouped=None,
        ),
        Support(
            ("gguf:qwen3next", "gguf:qwen35", "gguf:qwen35moe"),
            heads=1,
            missing="error",
            unknown="error",
            count="positive",
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
            unknown="error",
            count="positive",
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
            count="positive",
        ),
    ),
    "nextn": (),
}

REFUSED: dict[str, dict[str, str]] = {
    "transformers": {
        "qwen3_next": "stateful models are refused by assisted generation, and loading drops mtp.* tensors",
        "qwen3_5": "stateful models are refused by assisted generation, and loading drops mtp.* tensors",
        "qwen3_5_text": "stateful models are refused by assisted generation, and loading drops mtp.* tensors",
        "qwen3_5_moe": "stateful models are refused by assisted generation, and loading drops mtp.* tensors",
        "qwen3_5_moe_text": "stateful models are refused by assisted generation, and loading drops mtp.* tensors",
        "exaone_moe": "no MTP head in the model class",
        "mimo": "no MTP head in the model class",
        "mimo_v2": "no MTP head in the model class",
        "nemotron_h": "no MTP head in the model class",
        "bailing_hybrid": "the model class raises by default",
    },
    "llamacpp": {
        "gguf:exaone-moe": "the weights are kept, but there is no graph for the head",
        "exaone_moe": "the weights are kept, but there is no graph for the head",
        "mimo": "no MTP for this architecture",
        "deepseek_v3": "the converter drops the head",
        "deepseek_v2": "the converter drops the head",
        "kimi_k3": "the converter drops the head",
    },
}
"""Engine -> model type -> why its head is not run."""

TRANSFORMERS_REASON = "generate(use_mtp=True) exists for deepseek_v3, glm4_moe and step3p7 only"


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A version range that misbehaves whatever the checkpoint says.

    Attributes:
        since, until: first and last version, inclusive; "" is open.
        hybrid: only for targets with recurrent layers.
        verdict: what becomes of it.
        error: what the user sees.
    """

    engine: str
    since: str
    until: str
    hybrid: bool
    verdict: Literal["degraded", "fails"]
    error: str


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad("llamacpp", "b10741", "b10743", False, "fails", "crashes on any GGUF that carries an MTP head"),
    KnownBad("sglang", "0.0.0", "0.5.15", True, "fails", "crashes with the extra_buffer strategy on hybrid models"),
)

FUSED_UNEXPANDED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "sglang", "", "0.5.17",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM",
         "Qwen3_5MoeForCausalLM"),
    ),
)  # fmt: skip
"""(engine, since, until, kinds): the head's class gives the matcher no fused names, so entries by projection miss."""
