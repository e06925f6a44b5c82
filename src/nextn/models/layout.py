"""Which checkpoint key fills which canonical name in one checkpoint: prefix, layer kinds and expert storage decided."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from nextn.families.contract import TensorSpec, fill
from nextn.families.registry import family_geometry
from nextn.models.config import DecoderConfig


def target_keys(config: DecoderConfig, raw: dict[str, object], present: Collection[str]) -> Iterator[tuple[str, str]]:
    """(canonical name, checkpoint key) of every tensor of the target.

    Args:
        config: the decoder.
        raw: config.json.
        present: keys of the checkpoint; they decide the prefix and whether experts are split or grouped.
    """
    family = config.family
    prefix = next(
        (p for p in family.target_prefixes if f"{p}embed_tokens.weight" in present), family.target_prefixes[0]
    )
    dims = family_geometry(family, raw)
    for spec in family.target:
        if "{l}" not in spec.key:
            if spec.applies(dims):
                yield from _keys(spec, dims, prefix, {}, present)
            continue
        for layer, (kind, sparse) in enumerate(zip(config.layer_kinds, config.sparse_layers, strict=True)):
            at_layer = {**dims, "full": kind == "full", "linear": kind == "linear", "sparse_layer": sparse}
            if spec.applies(at_layer):
                yield from _keys(spec, dims, prefix, {"l": layer}, present)


def head_keys(config: DecoderConfig, raw: dict[str, object], present: Collection[str]) -> Iterator[tuple[str, str]]:
    """(canonical name, checkpoint key) of every tensor that the head must have; arguments as `target_keys`."""
    family = config.family
    dims = family_geometry(family, raw)
    prefix, grouped = "", False
    for key in present:
        located = family.locate(key, layers=config.layers)
        if located is not None:
            prefix = located.prefix
            grouped = grouped or located.spec.experts == "grouped"
    for name, key, _, spec in family.expected(
        dims, config.head_layers, experts="grouped" if grouped else "split", prefix=prefix
    ):
        if not spec.optional:
            yield name, key


def _keys(
    spec: TensorSpec, dims: dict[str, int], prefix: str, at: dict[str, int], present: Collection[str]
) -> Iterator[tuple[str, str]]:
    template = prefix + spec.key.removeprefix("model.") if spec.key.startswith("model.") else spec.key
    if spec.experts == "grouped" and fill(template, at) not in present:
        return
    if spec.experts == "split":
        if fill(template, {**at, "e": 0}) not in present:
            return
        for e in range(dims["experts"]):
            yield fill(spec.name, {**at, "e": e}), fill(template, {**at, "e": e})
        return
    yield fill(spec.name, at), fill(template, at)
