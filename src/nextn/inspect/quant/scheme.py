"""One form for what every quantisation scheme's configuration claims, and how a claim is read by the scheme itself."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property, lru_cache
from typing import Any, Literal

Kind = Literal["exact", "name", "glob", "regex", "prefix"]

VARIANTS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
"""What exporters put before a language model's module names."""

MAX_PATTERN = 400
MAX_REPEATS = 5
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a scheme's list.

    Attributes:
        text: as written.
        kind: how the scheme's own definition reads it: ``exact`` (the module's whole name), ``name`` (whole, or
            parts of it between dots), ``glob``, ``regex`` (matched from the start), or ``prefix``.
        pattern: what to match, without markers such as ``re:`` or ``-:``.
        exempts: True if modules that match stay in full precision, False if they are the ones quantised.
        where: file and path it stands in, e.g. ``config.json quantization_config.ignore``.
    """

    text: str
    kind: Kind
    pattern: str
    exempts: bool
    where: str

    def matches(self, module: str) -> bool:
        """Whether the entry names a module, by the scheme's own definition."""
        pattern = self.pattern
        if self.kind == "exact":
            return module == pattern
        if self.kind == "name":
            bare = pattern.strip(".")
            return f".{bare}." in f".{module}." if bare else False
        if self.kind == "prefix":
            return module.startswith(pattern)
        compiled = compile_glob(pattern) if self.kind == "glob" else compile_regex(pattern)
        return compiled is not None and len(module) <= MAX_NAME and compiled.match(module) is not None

    def matches_normalised(self, module: str) -> bool:
        """Whether it would, with another of the usual prefixes before the module's name."""
        bare = strip_prefix(module)
        return any(self.matches(variant + bare) for variant in VARIANTS)


@lru_cache(maxsize=1 << 16)
def strip_prefix(module: str) -> str:
    """A module's name without ``model.`` and ``language_model.``: the part that exporters agree on."""
    while True:
        head, dot, rest = module.partition(".")
        if not dot or head not in ("model", "language_model"):
            return module
        module = rest


@lru_cache(maxsize=1 << 16)
def runs(module: str) -> tuple[str, ...]:
    """Every run of name parts: ``a.b.c`` -> ``a``, ``a.b``, ``a.b.c``, ``b``, ``b.c``, ``c``."""
    parts = module.split(".")
    return tuple(".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))


@lru_cache(maxsize=4096)
def compile_glob(pattern: str) -> re.Pattern[str] | None:
    """A shell pattern as an expression for the whole name; None where it is too long or has too many stars."""
    if len(pattern) > MAX_PATTERN or pattern.count("*") > MAX_REPEATS:
        return None
    return re.compile(translate(pattern))


@lru_cache(maxsize=4096)
def compile_regex(pattern: str) -> re.Pattern[str] | None:
    """A regular expression from a file, or None where it is invalid, or such that matching could take for ever."""
    if len(pattern) > MAX_PATTERN:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None
    unescaped = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "x", pattern)
    if len(re.findall(r"[*+]|\{\d*,\d*\}", unescaped)) > MAX_REPEATS:
        return None
    if re.search(r"\([^()]*[*+}][^()]*\)\s*[*+{]", unescaped):
        return None
    return compiled


@dataclass(frozen=True)
class Scheme:
    """A quantisation declaration.

    Attributes:
        method: what the declaration calls itself, e.g. ``modelopt``, ``compressed-tensors``, ``fp8``, ``gptq``.
        algorithm: the scheme within the method where the declaration says it, e.g. ``NVFP4``; else "".
        file: the file that declares it.
        rules: its lists.
        by_default: whether a linear layer that no rule names is quantised.
        invalid: entries that cannot be read as a rule.
        raw: the declaration itself.
    """

    method: str
    algorithm: str
    file: str
    rules: tuple[Rule, ...] = ()
    by_default: bool = True
    invalid: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _exact(self) -> dict[str, Rule]:
        return {r.pattern: r for r in self.rules if r.kind == "exact"}

    @cached_property
    def _named(self) -> dict[str, Rule]:
        return {r.pattern.strip("."): r for r in self.rules if r.kind == "name"}

    @cached_property
    def _patterns(self) -> tuple[Rule, ...]:
        return tuple(r for r in self.rules if r.kind not in ("exact", "name"))

    def matching(self, module: str) -> Iterator[Rule]:
        """The rules that name a module, by the scheme's own definition; lists of thousands cost one look-up each."""
        if module in self._exact:
            yield self._exact[module]
        if self._named:
            yield from (self._named[run] for run in runs(module) if run in self._named)
        yield from (r for r in self._patterns if r.matches(module))

    def claims_quantised(self, module: str) -> bool:
        """Whether the declaration claims that a linear layer is quantised."""
        claimed = self.by_default
        for rule in self.matching(module):
            if rule.exempts:
                return False
            claimed = True
        return claimed

    @property
    def exempting(self) -> tuple[Rule, ...]:
        return tuple(r for r in self.rules if r.exempts)
