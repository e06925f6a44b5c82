"""The engines and what holds for all that they run: versions, refusals, known-bad ranges. Data only."""

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
        index: whether files that the index does not name are left unread; None where that was not found out.
    """

    title: str
    newest: str
    read: tuple[str, ...]
    since: str
    basis: Literal["source", "documentation", "own code"]
    index: bool | None = True


ENGINE: dict[str, Engine] = {
    "sglang": Engine("SGLang", "0.5.23", ("0.5.17", "0.5.23"), "", "source"),
    "vllm": Engine("vLLM", "0.33.0", ("0.33.0",), "", "source"),
    "transformers": Engine("transformers", "5.24.0", ("5.24.0",), "5.14", "source"),
    "llamacpp": Engine("llama.cpp", "b10800", (), "b9180", "documentation", index=None),
    "tensorrt_llm": Engine("TensorRT-LLM", "1.2", (), "", "documentation", index=None),
    "nextn": Engine("nextn", __version__, (__version__,), "", "own code", index=False),
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
        text: what the user sees, or what has to be done instead.
    """

    engine: str
    since: str
    until: str
    hybrid: bool
    verdict: Literal["works", "degraded", "fails"]
    text: str


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad("llamacpp", "b10741", "b10743", False, "fails", "crashes on any GGUF that carries an MTP head"),
    KnownBad(
        "sglang",
        "0.0.0",
        "0.5.15",
        True,
        "works",
        "extra_buffer crashes on hybrid models before 0.5.16; the command takes no_buffer, without overlap",
    ),
)

FUSED_UNEXPANDED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "sglang", "", "0.5.17",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM",
         "Qwen3_5MoeForCausalLM"),
    ),
)  # fmt: skip
"""(engine, since, until, kinds): the head's class gives the matcher no fused names, so entries by projection miss."""
