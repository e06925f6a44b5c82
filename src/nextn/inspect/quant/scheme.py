"""One form for what every quantisation scheme's configuration claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a scheme's list.

    Attributes:
        text: as written.
        kind: how the scheme's own definition reads it: ``name`` (the module, whole, or its end after a dot),
            ``glob``, ``regex`` (matched from the start), or ``part`` (anywhere in the name).
        pattern: what to match, without markers such as ``re:`` or ``-:``.
        exempts: True if modules that match stay in full precision, False if they are the ones quantised.
        where: file and path it stands in, e.g. ``config.json quantization_config.ignore``.
    """

    text: str
    kind: Literal["name", "glob", "regex", "part"]
    pattern: str
    exempts: bool
    where: str


@dataclass(frozen=True)
class Scheme:
    """A quantisation declaration.

    Attributes:
        method: the engines' name for it, e.g. ``modelopt_fp4``, ``compressed-tensors``, ``fp8``, ``gptq``.
        file: the file that declares it.
        rules: its lists.
        by_default: whether a linear layer that no rule names is quantised.
        raw: the declaration itself.
    """

    method: str
    file: str
    rules: tuple[Rule, ...] = ()
    by_default: bool = True
    raw: dict[str, object] = field(default_factory=dict)
