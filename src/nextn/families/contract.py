"""What a family's checkpoint says, as frozen data: no torch, no input or output.

A family is described by tables of `TensorSpec`: the canonical name (ours, the same for all families), the
checkpoint key, the shape in symbolic dimensions, and the condition under which the tensor exists. Both
directions of the mapping, the set of expected keys and the expected shapes come from that one table.

Placeholders in names and keys:

- ``{i}`` the head layer, from 0
- ``{n}`` the head layer counted on from the target's layers: num_hidden_layers + i
- ``{l}`` a target layer, from 0
- ``{e}`` an expert, from 0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from nextn.errors import NextnError

MAX_EXPECTED = 4_000_000
"""Tensors of a head, at most, counted before any is named."""

Dims = Mapping[str, int]
"""Symbolic dimension or flag -> number; made by `nextn.families.geometry`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor, or one tensor an index, of a layout.

    Attributes:
        name: canonical name, e.g. ``mtp.{i}.block.attn.q.weight``.
        key: checkpoint key, e.g. ``mtp.layers.{i}.self_attn.q_proj.weight``.
        shape: symbolic sizes, each a sum of products of dimension names and integers, e.g. ``2*hidden``.
        when: flags of the geometry that must all be non-zero for the tensor to exist; ``!flag`` negates.
        optional: may be absent without being missing (copies of shared tensors, buffers).
        experts: for expert tensors, the storage that this spec describes; the keys found decide which applies.
        aliases: further keys under which exporters store the same tensor; `key` is the published one.
    """

    name: str
    key: str
    shape: tuple[str, ...]
    when: tuple[str, ...] = ()
    optional: bool = False
    experts: Literal["", "split", "grouped"] = ""
    aliases: tuple[str, ...] = ()

    def applies(self, dims: Dims) -> bool:
        """Whether the tensor exists in a checkpoint of these dimensions."""
        return all((dims.get(w[1:], 0) == 0) if w.startswith("!") else dims.get(w, 0) != 0 for w in self.when)

    def sizes(self, dims: Dims) -> tuple[int, ...]:
        """The shape in numbers, `ANY` where it is not pinned.

        Raises:
            KeyError: the geometry lacks a dimension; the argument is its name.
            NextnError: the config holds a value for it that cannot be.
        """
        return tuple(size(s, dims) for s in self.shape)

    def sizes_if_known(self, dims: Dims) -> tuple[int, ...]:
        """`sizes`, with `ANY` throughout where the geometry lacks one: for tensors that need not be there."""
        try:
            return self.sizes(dims)
        except (KeyError, NextnError):
            return (ANY,) * len(self.shape)

    @property
    def placeholders(self) -> frozenset[str]:
        return frozenset(re.findall(r"\{(\w)\}", self.key))


ANY = -1
"""A size that no source pins (written ``?`` in a table), or that differs between head layers."""


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor's shape is the expected one; `ANY` fits every size."""
    return len(shape) == len(wanted) and all(w in (ANY, n) for n, w in zip(shape, wanted, strict=True))


def size(expression: str, dims: Dims) -> int:
    """Evaluate a symbolic size: ``+`` of ``*`` of names and integers. ``size("2*hidden", {"hidden": 8}) == 16``."""
    if expression == "?":
        return ANY
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            factor = factor.strip()
            product *= int(factor) if factor.isdigit() else dims[factor]
        total += product
    return total


@dataclass(frozen=True, slots=True)
class Located:
    """Where a checkpoint key stands in a family's layout."""

    spec: TensorSpec
    name: str
    indices: Mapping[str, int] = field(default_factory=dict)
    prefix: str = ""


@dataclass(frozen=True)
class Family:
    """Everything that differs between families of native MTP heads (design: the family contract).

    Attributes:
        name: lower-case slug.
        title: name for people.
        architectures, model_types: what config.json may say; nested ``text_config`` values included.
        layer_count: dotted config paths that declare how many head layers there are; the first present wins.
        default_layers: layers that the family ships when nothing is declared; None if it then ships none.
        declares_count: whether published configs declare the count; where not, silence is no defect.
        spare_layers: how many layers more than there are published configs declare.
        padded_lists: lists in the config with an entry a layer that go on past the target's layers, into the head's.
        head: the head's tensors; their keys all start with ``model.``, or none does.
        prefixes: prefixes that exporters are known to put before the head's keys (see `join`); "" always comes first.
        fuse: ``concat`` of embedding and hidden through one matrix, or ``sum`` of two projections.
        order: which half comes first in the concatenation.
        norm: ``plain`` (x * w) or ``one_plus`` (x * (1 + w), weights stored around zero).
        target_hidden: the target's hidden state that the head is given: after or before its final norm.
        recycle: the head's own output that its next step is given: after or before its end norm.
        zero_embed_at_start: the embedding is blanked for the row at position 0.
        physical_layers: how draft steps map to layers: ``reuse`` one layer, ``one_each`` fed from the
            target's hidden state, or ``chain`` (layer i's output feeds layer i + 1).
        embedding, output_head: ``shared`` with the target, ``own``, or ``tied`` (as the config says).
        block: the decoder layer that the head repeats, for people and for choosing modules.
        ships_copies: the checkpoint may carry copies of shared tensors (neither missing nor unexpected).
        target: the target's own tensors, for families that nextn decodes; empty otherwise.
        target_prefixes: prefixes before the target's keys, replacing the leading ``model.`` of `target`.
        ignored: regular expressions of keys that are not the language model (vision towers, buffers).
        foreign: regular expressions of keys under the head's prefix that belong to another drafter.
        constants: dimensions and flags that no config spells out, e.g. ``("q_gate", 2)``.
        derive: dimensions and flags that follow from this family's own config fields.
        confidence: ``full`` where a loader or a published checkpoint pins every key; ``partial`` where some tensor,
            shape or count is an inference, so that nothing may be called missing on its strength alone.
        note: what is not pinned, or what else a reader of a report should know.
        source: where the layout was read (engine file, transformers file, or config).
    """

    name: str
    title: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    layer_count: tuple[str, ...]
    default_layers: int | None
    head: tuple[TensorSpec, ...]
    declares_count: bool = True
    spare_layers: int = 0
    padded_lists: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    fuse: Literal["concat", "sum"] = "concat"
    order: Literal["embed_first", "hidden_first"] = "embed_first"
    norm: Literal["plain", "one_plus"] = "plain"
    target_hidden: Literal["post_norm", "pre_norm"] = "post_norm"
    recycle: Literal["post_norm", "pre_norm"] = "post_norm"
    zero_embed_at_start: bool = False
    physical_layers: Literal["reuse", "one_each", "chain"] = "reuse"
    embedding: Literal["shared", "own", "tied"] = "shared"
    output_head: Literal["shared", "own", "tied"] = "shared"
    block: str = "full attention, dense MLP"
    ships_copies: bool = False
    target: tuple[TensorSpec, ...] = ()
    target_prefixes: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    constants: tuple[tuple[str, int], ...] = ()
    derive: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None
    confidence: Literal["full", "partial"] = "full"
    note: str = ""
    source: str = ""

    # -- the mapping, both ways ---------------------------------------------------------------

    def key_of(self, name: str, *, prefix: str = "", layers: int = 0, experts: str = "split") -> str:
        """Checkpoint key of a canonical head tensor name.

        Args:
            prefix: one of `prefixes`.
            layers: the target's num_hidden_layers, for ``{n}``.
            experts: which storage to prefer where both would match.
        Raises:
            KeyError: no tensor of this family has that name.
        """
        for spec in self.head:
            if spec.experts not in ("", experts):
                continue
            match = _pattern(spec.name).fullmatch(name)
            if match:
                found = {k: int(v) for k, v in match.groupdict().items()}
                found.setdefault("i", 0)
                found["n"] = layers + found["i"]
                return join(prefix, fill(spec.key, found))
        raise KeyError(name)

    def locate(self, key: str, *, layers: int = 0) -> Located | None:
        """The head tensor that a checkpoint key is, or None when it is not one of this family's head."""
        for prefix in self.prefixes:
            if not key.startswith(prefix):
                continue
            bare = key[len(prefix) :]
            if prefix.startswith("model.") and self.head[0].key.startswith("model."):
                bare = f"model.{bare}"
            for spec, pattern in (*self._by_tail.get(_tail(bare, 2), ()), *self._by_tail.get(_tail(bare, 1), ())):
                match = pattern.fullmatch(bare)
                if match:
                    found = {k: int(v) for k, v in match.groupdict().items()}
                    if "n" in found:
                        found["i"] = found.pop("n") - layers
                        if found["i"] < 0:
                            continue
                    return Located(spec, fill(spec.name, {"i": 0, **found}), found, prefix)
        return None

    def expected(
        self, dims: Dims, head_layers: int, *, experts: str = "split", prefix: str = ""
    ) -> Iterator[tuple[str, str, tuple[int, ...], TensorSpec]]:
        """Every head tensor that a checkpoint of these dimensions must or may hold.

        Yields (canonical name, checkpoint key, shape, spec); optional ones too, see ``spec.optional``.

        Raises:
            KeyError, NextnError: as `TensorSpec.sizes`; NextnError too for a count that no checkpoint can hold.
        """
        layers = dims.get("layers", 0)
        if head_layers * max(dims.get("experts", 0), 1) * len(self.head) > MAX_EXPECTED:
            raise NextnError(
                f"config.json declares {head_layers} head layers of {dims.get('experts', 0)} experts, which cannot be.",
                "Correct config.json.",
            )
        for spec in self.head:
            if not spec.applies(dims) or spec.experts not in ("", experts):
                continue
            marks = spec.placeholders
            sizes = spec.sizes_if_known(dims) if spec.optional else spec.sizes(dims)
            for i in range(head_layers) if marks & {"i", "n"} else (0,):
                for e in range(dims.get("experts", 0)) if "e" in marks else (0,):
                    at = {"i": i, "n": layers + i, "e": e}
                    yield fill(spec.name, at), join(prefix, fill(spec.key, at)), sizes, spec

    @cached_property
    def _by_tail(self) -> dict[str, list[tuple[TensorSpec, re.Pattern[str]]]]:
        """Specs by the last parts of their keys, so that a key is compared with few of them."""
        table: dict[str, list[tuple[TensorSpec, re.Pattern[str]]]] = {}
        for spec in self.head:
            for key in (spec.key, *spec.aliases):
                tail = _tail(key, 2)
                table.setdefault(tail if "{" not in tail else _tail(key, 1), []).append((spec, _pattern(key)))
        return table


def join(prefix: str, key: str) -> str:
    """A key under an exporter's prefix; ``model.`` is not doubled.

    ``join("model.language_model.", "model.layers.45.enorm.weight") == "model.language_model.layers.45.enorm.weight"``
    """
    return prefix + (key.removeprefix("model.") if prefix.startswith("model.") else key)


def _tail(key: str, parts: int) -> str:
    """The last dotted parts of a key: ``_tail("a.b.weight", 2) == "b.weight"``."""
    return ".".join(key.rsplit(".", parts)[-parts:])


@lru_cache(maxsize=8192)
def _pattern(template: str) -> re.Pattern[str]:
    """A template with placeholders as a regular expression with one named group a placeholder."""
    parts = re.split(r"\{(\w)\}", template)
    seen: set[str] = set()
    out = []
    for at, part in enumerate(parts):
        if at % 2 == 0:
            out.append(re.escape(part))
        elif part in seen:
            out.append(f"(?P={part})")
        else:
            seen.add(part)
            out.append(rf"(?P<{part}>0|[1-9]\d{{0,5}})")
    return re.compile("".join(out))


def fill(template: str, indices: Mapping[str, int]) -> str:
    """Put numbers into a template's placeholders."""
    return re.sub(r"\{(\w)\}", lambda m: str(indices[m[1]]), template)


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """Value at a dotted path of a config, or None: ``lookup(c, "text_config.hidden_size")``."""
    node: Any = config
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node
