"""Hidden states of the target, kept on disk: `nextn cache` writes them, training reads them instead of a target pass.

A cache is a folder of safetensors shards and ``cache.json``, which is written after each shard (of each process), so
that a killed run goes on with the next, with another number of processes too. Batch n holds ``n.ids``,
``n.positions``, ``n.documents``, ``n.loss_mask``, ``n.given`` and, where the head is given another hidden state than
the output head, ``n.teacher``; all [1, T(, hidden)]. ``id-counts.safetensors`` holds how often each id is predicted in
the data, cached or not, so that a draft vocabulary chosen from the cache is the one chosen from the data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from nextn.checkpoint.header import read_header
from nextn.checkpoint.jsonfile import read_json
from nextn.errors import NextnError
from nextn.models.decoder import Decoder
from nextn.train.config import TrainConfig
from nextn.train.export import write_json, write_tensors
from nextn.train.layout import Layout
from nextn.train.packing import PackedBatch
from nextn.train.processes import Processes
from nextn.train.source import Source
from nextn.train.step import Item
from nextn.train.unroll import TargetStates, target_states

FACTS = "cache.json"
COUNTS, COUNTS_KEY = "id-counts.safetensors", "counts"
OWN = re.compile(r"\.?(cache\.json|id-counts\.safetensors|states-\d{5,}\.safetensors)")
"""Files of a cache; with a dot before, half written ones."""
SHARD_BYTES = 1 << 30
ANEW = "Delete that file, if it is there, and run the `nextn cache` command that wrote it again: only it is made anew."
"""What mends any file of a cache that is not ``cache.json``."""
PLACES = ("ids", "positions", "documents", "loss_mask")
SETTINGS = ("data", "batch_tokens", "max_length", "seed")


def refuse_other(out: Path) -> None:
    """Raises NextnError where `out` is a file, or holds other things than a cache or what a killed run left of one."""
    if out.exists() and not out.is_dir():
        raise NextnError(f"{out} is a file.", "Name a folder for the cache.")
    inside = [path.name for path in out.iterdir()] if out.is_dir() else []
    if FACTS not in inside and not all(OWN.fullmatch(name) for name in inside):
        raise NextnError(f"{out} holds other files, and no cache.", "Give an --out that is new or empty.")


def write_cache(
    model: Decoder,
    identity: str,
    source: Source,
    config: TrainConfig,
    out: Path,
    count: int,
    processes: Processes,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Cache the hidden states of a run's first `count` packed batches, in their order.

    Shards that are `damaged` are written again. Each of several processes writes every world-th shard; the shards are
    those that one process would write.

    Args:
        model: the target, sharded where there are several processes.
        identity: the target's, see `target_identity`.
        source: of one process, at its beginning: each reads the whole sequence.
        progress: called with the batches done, of all processes.
    Returns:
        what ``cache.json`` holds.
    Raises:
        NextnError: `out` holds a cache of other data, of another model or with other settings.
    """
    wanted = {"model": identity, **{name: getattr(config, name) for name in SETTINGS}}
    facts: dict[str, Any] = {**wanted, "batches": 0, "shards": [], "state": source.state_dict()}
    known = (out / FACTS).is_file()
    if known:
        begun = read_facts(out)
        _require_same(begun, {**wanted, "state": facts["state"]}, out)
        facts = begun
        anew = processes.each(damaged(out, facts) if processes.first else [])[0]
        _write_anew(model, source, out, anew, processes, progress)
        source.load_state_dict(facts["state"])
    processes.wait()
    # Without facts it may count other data.
    if processes.first and not (known and _is_whole(out / COUNTS, {COUNTS_KEY})):
        counts = source.id_counts(model.config.vocab)
        out.mkdir(parents=True, exist_ok=True)
        write_tensors(out / COUNTS, {COUNTS_KEY: counts})
    processes.wait()
    size = -(-shard_bytes // _batch_bytes(model, config.batch_tokens))
    while facts["batches"] < count:
        first, written = facts["batches"], len(facts["shards"])
        taken = [source.take()[0] for _ in range(min(size * processes.world, count - first))]
        parts = [
            (f"states-{written + i:05d}.safetensors", first + at, taken[at : at + size])
            for i, at in enumerate(range(0, len(taken), size))
        ]
        _write_shards(model, out, parts, processes, progress)
        facts["shards"] += [{"file": name, "first": at, "batches": len(held)} for name, at, held in parts]
        facts |= {"batches": first + len(taken), "state": source.state_dict(), "report": source.report()}
        processes.wait()
        if processes.first:
            write_json(out / FACTS, facts)
    processes.wait()
    return facts


def read_facts(folder: Path) -> dict[str, Any]:
    """What ``cache.json`` holds.

    Raises:
        NextnError: it is damaged.
    """
    damage = NextnError(f"{folder / FACTS} is damaged.", f"Delete {folder} and write the cache anew.")
    try:
        facts = read_json(folder / FACTS)
    except NextnError:
        raise damage from None
    try:
        at = 0
        for shard in facts["shards"]:
            named = OWN.fullmatch(shard["file"]) and shard["file"].startswith("states-")
            if not named or shard["first"] != at or int(shard["batches"]) < 1:
                raise damage
            at += shard["batches"]
        if at != facts["batches"] or "data" not in facts["state"]:
            raise damage
    except (KeyError, TypeError, ValueError, AttributeError):
        raise damage from None
    return dict(facts)


Part = tuple[str, int, list[PackedBatch]]
"""Of a cache: the shard's file, the number of its first batch, and its batches."""


def _write_shards(
    model: Decoder, out: Path, parts: Sequence[Part], processes: Processes, progress: Callable[[int], None] | None
) -> None:
    """Write as many shards as there are processes, or fewer, each by one of them."""
    name, first, own = parts[processes.rank] if processes.rank < len(parts) else ("", 0, [])
    total = sum(len(batches) for _, _, batches in parts)
    held: dict[str, Tensor] = {}
    for turn in range(max(len(batches) for _, _, batches in parts)):
        # A sharded model's forwards are run together: where this process has none left, one is thrown away.
        states = _states(model, own[turn] if turn < len(own) else parts[0][2][0])
        if turn < len(own):
            held |= _named(first + turn, own[turn], states)
        if progress is not None:
            progress(parts[0][1] + min((turn + 1) * len(parts), total))
    if own:
        write_tensors(out / name, held)


def _write_anew(
    model: Decoder,
    source: Source,
    out: Path,
    shards: Sequence[Mapping[str, Any]],
    processes: Processes,
    progress: Callable[[int], None] | None,
) -> None:
    """Write shards of a cache again.

    Args:
        source: at its beginning.
    """
    at = 0
    for start in range(0, len(shards), processes.world):
        parts: list[Part] = []
        for told in shards[start : start + processes.world]:
            while at < told["first"]:
                source.take()
                at += 1
            parts.append((told["file"], at, [source.take()[0] for _ in range(told["batches"])]))
            at += told["batches"]
        _write_shards(model, out, parts, processes, progress)


def damaged(out: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of ``cache.json`` whose shards are missing, truncated or lack a batch; their values are not read."""
    return [
        shard
        for shard in facts["shards"]
        if not _is_whole(
            out / shard["file"],
            {f"{shard['first'] + i}.{name}" for i in range(shard["batches"]) for name in (*PLACES, "given")},
        )
    ]


def _is_whole(path: Path, names: Set[str]) -> bool:
    """Whether a safetensors file is as long as its header says, and has tensors of these names."""
    try:
        return names <= read_header(path)[0].keys()
    except NextnError:
        return False


def _batch_bytes(model: Decoder, tokens: int) -> int:
    """Of one packed batch in a shard."""
    copies = 1 if model.config.family.target_hidden == "post_norm" else 2
    return tokens * (25 + copies * model.config.hidden * model.embed.weight.element_size())


def _states(model: Decoder, batch: PackedBatch) -> TargetStates:
    placed = batch.to(model.embed.weight.device)
    return target_states(model, placed, Layout(placed.documents))


def require_settings(facts: Mapping[str, Any], config: TrainConfig) -> None:
    """Raises NextnError where settings that were given contradict those that a cache was written with.

    `seed` may differ where it decides a head's first weights.
    """
    given = config.model_fields_set - ({"seed"} if config.init == "scratch" else set())
    for name in SETTINGS:
        mine, written = getattr(config, name), facts.get(name)
        if name == "data":
            mine, written = ([Path(path).name for path in paths or []] for paths in (mine, written))
        if name in given and mine and mine != written:
            raise NextnError(
                f"The cache {config.cache} was written with {name} = {facts.get(name)}, and {getattr(config, name)} is "
                "given.",
                f"Leave {name} out, or write a cache anew.",
            )


def _named(number: int, batch: PackedBatch, states: TargetStates) -> dict[str, Tensor]:
    """A batch's tensors under the names that a shard has for them."""
    held = {f"{number}.{name}": getattr(batch, name) for name in PLACES}
    held[f"{number}.given"] = states.given.cpu()
    if states.teacher is not states.given:
        held[f"{number}.teacher"] = states.teacher.cpu()
    return held


class CachedSource:
    """A cache's batches in order, over and over, shared among processes as data files are.

    Args:
        folder: written by `write_cache`.
        identity: of the target that training runs with, see `target_identity`.
        processes: of the run.
    Raises:
        NextnError: no cache, an empty one, or one of another target.
    """

    def __init__(self, folder: Path, identity: str, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        if not (folder / FACTS).is_file():
            raise NextnError(f"{folder} holds no cache.", "Write one with `nextn cache`.")
        self.facts = read_facts(folder)
        if self.facts.get("model") != identity:
            raise NextnError(
                f"The cache {folder} was written with another target, or in another dtype.",
                "Use that target and target_dtype, or write a cache anew.",
            )
        if not self.facts.get("batches"):
            raise NextnError(f"The cache {folder} is empty.", "Write it with `nextn cache`.")
        self.next = 0

    def take(self) -> Item:
        number = self.next + self.processes.rank
        self.next += self.processes.world
        return self._read(number % int(self.facts["batches"]))

    def id_counts(self, vocab: int) -> Tensor:
        """As counted when the cache was written, over its data.

        Raises:
            NextnError: the cache was written without, or they cannot be read.
        """
        if not (self.folder / COUNTS).is_file():
            raise NextnError(
                f"The cache {self.folder} lacks {COUNTS}, which says what ids are frequent in the data.",
                "Run the `nextn cache` command that wrote it again to add them, or give draft_vocab a file of ids.",
            )
        try:
            with safe_open(self.folder / COUNTS, "pt") as file:
                counts: Tensor = file.get_tensor(COUNTS_KEY)
        except Exception as error:
            raise _unreadable(COUNTS, error, ANEW) from None
        if counts.shape != (vocab,):
            raise NextnError(f"{COUNTS} of the cache counts {counts.numel()} ids of {vocab}.", ANEW)
        return counts

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.next, "cache": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("cache") != self.identity:
            raise NextnError("The run was begun with another cache.", "Resume with that one, or start anew.")
        self.next = state["batch"]

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.facts.get("report", {})
        return report

    @cached_property
    def identity(self) -> str:
        """Of the cache's contents as ``cache.json`` tells them."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:32]

    def _read(self, number: int) -> Item:
        shard = next(s for s in self.facts["shards"] if s["first"] <= number < s["first"] + s["batches"])
        try:
            with safe_open(self.folder / shard["file"], "pt") as file:
                ids, positions, documents, mask = (file.get_tensor(f"{number}.{name}") for name in PLACES)
                batch = PackedBatch(ids, positions, documents, mask)
                given = file.get_tensor(f"{number}.given")
                other = f"{number}.teacher"
                return batch, TargetStates(given, file.get_tensor(other) if other in list(file.keys()) else given)
        except Exception as error:
            raise _unreadable(shard["file"], error, ANEW) from None


def _unreadable(name: str, error: Exception, fix: str) -> NextnError:
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return NextnError(f"{name} of the cache cannot be read ({reason}).", fix)


def _require_same(facts: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    different = next((name for name in ("model", *SETTINGS) if facts.get(name) != wanted[name]), None)
    if different is None and facts["state"]["data"] != wanted["state"]["data"]:
        different = "content of its data"
    if different is not None:
        raise NextnError(
            f"{out} holds a cache that was written with another {different}.", "Give another --out, or delete it."
        )
