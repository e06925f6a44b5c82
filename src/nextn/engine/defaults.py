"""Read what a checkpoint itself says about decoding: its end ids and its sampling defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nextn.errors import NextnError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are options of the same name; engines read these and no more."""


@dataclass(frozen=True)
class GenerationDefaults:
    """What decoding falls back on where a request says nothing.

    Attributes:
        options: fields of `SamplingParams`; options that a request gives override them.
        eos_ids: ids that end a text, in the order found.
        bos_id, pad_id: None where not declared.
    """

    options: dict[str, Any]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None


def read_defaults(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, tokenizer_eos: Iterable[int] = ()
) -> GenerationDefaults:
    """Put together what generation_config.json, config.json (``text_config`` included) and the tokenizer say.

    End ids are the union of all of them, as in SGLang. ``do_sample: false`` means greedy decoding whatever stands
    beside it; where it is not said, the sampling fields count, as in vLLM.

    Raises:
        NextnError: an end id that is not a number.
    """
    generation = generation_config or {}
    text = config.get("text_config")
    places = [generation, config, text if isinstance(text, Mapping) else {}]
    eos = [id for place in places for id in _ids(place, "eos_token_id")]
    options: dict[str, Any]
    if generation.get("do_sample") is False:
        options = {"temperature": 0.0}
        if generation.get("repetition_penalty") is not None:
            options["repetition_penalty"] = generation["repetition_penalty"]
    else:
        options = {name: generation[name] for name in SAMPLING if generation.get(name) is not None}
    top_k = options.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        options["top_k"] = int(top_k)
    if generation.get("max_new_tokens") is not None:
        options["max_tokens"] = generation["max_new_tokens"]

    def single(name: str) -> int | None:
        return next((id for place in places for id in _ids(place, name)), None)

    return GenerationDefaults(
        options, tuple(dict.fromkeys([*eos, *tokenizer_eos])), single("bos_token_id"), single("pad_token_id")
    )


def _ids(place: Mapping[str, Any], name: str) -> list[int]:
    """An id, a list of ids or nothing, as a list; -1 stands for nothing in some configs."""
    value = place.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise NextnError(f"{name} is {value!r} in the checkpoint's configuration.", "Correct it to an id or a list.")
    return [id for id in ids if id >= 0]
