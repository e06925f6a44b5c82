"""A step of training from given hidden states: nextn's, and that of speculators' MTP trainer, in one process.

``python -m benchmarks.train_beside_speculators SITE --out FILE.json`` on one GPU, where SITE is a folder that
``pip install --no-deps --target SITE speculators`` filled. Both train one head of Qwen3.5-4B's geometry, random
weights, three steps, AdamW with float32 weights under bfloat16 autocast, from the same ids and hidden states.
speculators compiles its model and takes the data's tokens as labels; nextn does that too (`ce`) and, as it is meant to
be used, takes the target's distribution (`kl`). Neither runs the target's layers here.

speculators' data pipeline imports packages that a step does not need; those that are missing are replaced by mocks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import time
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from benchmarks.command_line import RESULTS
from benchmarks.geometries import GEOMETRIES
from benchmarks.train_step import batch_of, config_of, random_model, timed
from nextn.checkpoint.source import Checkpoint
from nextn.train.config import load_config
from nextn.train.losses import LossSpec
from nextn.train.processes import Processes
from nextn.train.start import Start
from nextn.train.step import HeadStep
from nextn.train.unroll import TargetStates, head_unroll

STEPS = 3


class _Missing(MagicMock):
    """A package that is not installed, nor used by a step."""

    __path__: tuple[str, ...] = ()


def speculators_module(site: Path) -> tuple[Any, list[str]]:
    """(speculators.models.mtp.core, packages replaced by mocks)."""
    sys.path.append(str(site))
    replaced: list[str] = []
    while True:
        try:
            return importlib.import_module("speculators.models.mtp.core"), replaced
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("speculators"):
                raise
            replaced.append(error.name)
            sys.modules[error.name] = _Missing(__spec__=importlib.util.spec_from_loader(error.name, None))
            for loaded in [name for name in sys.modules if name.partition(".")[0] == "speculators"]:
                del sys.modules[loaded]


def speculators_head(core: Any, config: dict[str, Any], device: torch.device) -> Any:
    """Its head at random weights, as its trainer would make it of a checkpoint."""
    from speculators.config import SpeculatorsConfig, VerifierConfig  # type: ignore[import-not-found]
    from speculators.models.mtp.config import MTPSpeculatorConfig  # type: ignore[import-not-found]
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # type: ignore[import-not-found]
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3_5ForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    made = core.MTPDraftModel(
        MTPSpeculatorConfig(
            transformer_layer_config=Qwen3_5TextConfig(**{k: v for k, v in config.items() if k != "architectures"}),
            speculators_config=SpeculatorsConfig(
                algorithm="mtp", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
            ),
        )
    ).to(device)
    del made.verifier_lm_head
    for name, parameter in made.named_parameters():
        shared = name.startswith(("embed_tokens", "lm_head"))
        parameter.requires_grad_(not shared)
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return made.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--size", choices=GEOMETRIES, default="4b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device, size = torch.device(given.device), GEOMETRIES[given.size]
    batch = batch_of(given.tokens, given.documents, device)
    hidden = torch.randn(1, given.tokens, size.hidden, device=device, dtype=torch.bfloat16)
    rows: list[dict[str, Any]] = []

    def record(what: str, figures: dict[str, float]) -> None:
        rows.append({"what": what, **figures})
        print(rows[-1], flush=True)

    def ours() -> None:
        model = random_model(size, device)
        assert model.mtp is not None
        model.mtp.float()
        unroll = head_unroll(model).requires_grad_(True)
        begun = Start(Checkpoint("random", None, {}, {}), model, unroll, {}, "split")
        words = ["data=none", f"unroll={STEPS}", f"batch_tokens={given.tokens}", "lr=1e-6"]
        config = load_config(None, words)
        states = TargetStates(hidden, hidden)
        for kind, vocab in (("ce", None), ("kl", None), ("kl", torch.arange(32768, device=device))):
            spec = LossSpec(kind, config.step_weights, vocab=vocab)  # type: ignore[arg-type]
            step = HeadStep(begun, config, Processes(0, 1, device), spec)
            name = f"nextn, {kind}" + ("" if vocab is None else f", {len(vocab):,} ids")
            record(name, timed(lambda step=step: step([(batch, states)]), given.repeats))  # type: ignore[misc]

    def theirs() -> list[str]:
        core, replaced = speculators_module(given.site)
        head = speculators_head(core, config_of(size), device)
        weights = core.compute_step_weights(num_steps=STEPS)
        optimiser = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-6)
        mask = batch.loss_mask.long()

        def step() -> float:
            with torch.autocast(device.type, torch.bfloat16):
                logits, loss, _ = head(
                    input_ids=batch.ids,
                    hidden_states=hidden,
                    position_ids=batch.positions,
                    loss_mask=mask,
                    step_weights=weights,
                )
            del logits
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimiser.step()
            return float(loss.detach())

        record("speculators, ce", timed(step, given.repeats))
        return replaced

    ours()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    replaced = theirs()
    names = {row["what"]: row["median_ms"] for row in rows}
    report = {
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "speculators": distribution("speculators").version,
        },
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.train_beside_speculators SITE --size {given.size} --tokens {given.tokens}"
        f" --out {RESULTS}/{given.out.name}",
        "documents": given.documents,
        "draft_steps": STEPS,
        "mocked": replaced,
        "speculators_over_nextn_ce": names["speculators, ce"] / names["nextn, ce"],
        "rows": rows,
    }
    given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
