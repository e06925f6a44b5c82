"""Plan an extraction: the head of a checkpoint as a folder of its own.

The folder holds config.json (the source's, so that the head's geometry is known), an index, one safetensors file, the
ids that the head drafts where the source lists them, and a card that names every tensor's sha256 in the source.
`nextn merge`, `nextn train` and engines that take a draft directory read it.
"""

from __future__ import annotations

from pathlib import Path

from nextn.checkpoint.draft_ids import DRAFT_IDS, draft_ids
from nextn.checkpoint.source import INDEX_NAME, Checkpoint
from nextn.inspect.facts import gather
from nextn.surgery.card import card
from nextn.surgery.check import require_family, require_whole
from nextn.surgery.pieces import Wanted, head_pieces, in_model_tree
from nextn.surgery.plan import Plan, Shard, piece_bytes
from nextn.surgery.settings import edits, to_index, to_text, with_count, without_quantisation
from nextn.surgery.stream import in_file_order

HEAD_FILE = "model.safetensors"
QUANT_FILE = "hf_quant_config.json"


def plan_extract(model: Checkpoint, out: Path) -> Plan:
    """What `nextn extract` would write; nothing is written.

    Raises:
        NextnError: no head, half a head, or one that cannot stand alone.
    """
    facts = gather(model)
    family = require_family(facts)
    require_whole(facts)
    wanted = Wanted(
        family=family,
        dims=facts.dims,
        layers=facts.dims.get("layers", 0),
        prefix=facts.prefix if in_model_tree(family) else "",
        storage="grouped" if facts.stacked else "split",
        dtype=lambda name, stored: stored,
        keep_quantised=lambda module: True,
    )
    head = head_pieces(facts, wanted)
    pieces = in_file_order(head.pieces)
    depth = max(facts.layers, default=0) + 1
    config = model.config
    if not head.quantised:
        config = without_quantisation(config)
    if not facts.declared:
        config = with_count(family, config, depth)
    total = sum(piece_bytes(p) for p in pieces)
    index = to_index({p.key: HEAD_FILE for p in pieces}, {}, total)
    texts = [to_text("config.json", config), to_text(INDEX_NAME, index)]
    beside = model.json(QUANT_FILE)
    if beside is not None and head.quantised:
        texts.append(to_text(QUANT_FILE, beside))
    ids = draft_ids(model)
    if ids is not None:
        texts.append(to_text(DRAFT_IDS, {"ids": ids}))
    about = {"from": model.source, "family": family.name, "layers": depth, "tensors": len(pieces), "bytes": total}
    return Plan(
        action="extract",
        out=out,
        family=family.name,
        facts=about,
        links=(),
        rewritten={},
        dropped={},
        shards=(Shard(HEAD_FILE, pieces, {"format": "pt"}, hashed=True),),
        texts=(*texts, card(facts, pieces)),
        edits=tuple(edits("config.json", model.config, config)),
        renamed=head.renamed,
        left_out=head.left_out,
    )
