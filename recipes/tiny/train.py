"""Train the embedded model: main model and head together, on one GPU or a CPU.

``python -m recipes.tiny.train DATA OUT`` reads what ``recipes.tiny.pack`` wrote into DATA and writes the checkpoint
and ``training.json`` into OUT. The main loss is the cross entropy of the next token. Each draft step's loss is the
cross entropy against the main model's own distribution at that place, which is what acceptance depends on; its
gradient also reaches the trunk. The schedule follows the steps done or the minutes spent, whichever is further.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nextn.models.blocks import MLP, Attention, GatedDeltaNet
from nextn.models.config import decoder_config
from nextn.models.decoder import Decoder
from nextn.models.load import build
from recipes.tiny.evaluate import evaluate
from recipes.tiny.export import export
from recipes.tiny.initialise import initialise
from recipes.tiny.unroll import TrunkContext, unroll


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on beside its data.

    Attributes:
        steps: optimiser steps of the whole schedule.
        minutes: time limit; the schedule then ends early, complete.
        tokens: a step.
        window: tokens of a training window.
        long_window: the same in the last `long_share` of the schedule.
        draft_steps: K of the unrolled head.
        draft_weight: of the draft losses together, beside the main loss; `draft_decay` is from step to step.
        dropout: on what mixers and MLPs add to the residual stream.
    """

    steps: int = 4000
    minutes: float = math.inf
    tokens: int = 32768
    window: int = 512
    long_window: int = 2048
    long_share: float = 0.2
    draft_steps: int = 3
    draft_weight: float = 0.5
    draft_decay: float = 0.8
    peak_rate: float = 3e-3
    last_rate: float = 0.02
    warmup: float = 0.03
    decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.05
    seed: int = 0
    evaluate_every: int = 500


def learning_rate(done: float, settings: Settings) -> float:
    """Rate at the share `done` of the schedule: linear warm-up, then a cosine down to `last_rate` of the peak."""
    if done < settings.warmup:
        return settings.peak_rate * done / settings.warmup
    at = (done - settings.warmup) / (1 - settings.warmup)
    low = settings.last_rate
    return settings.peak_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(at, 1.0))))


def losses(model: Decoder, ids: Tensor, draft_steps: int) -> tuple[Tensor, list[Tensor]]:
    """Main loss and the loss of each draft step, in nats a token, for windows ids [batch, window + 1]."""
    inputs = ids[:, :-1]
    positions = torch.arange(inputs.shape[1], device=ids.device).expand(len(ids), -1)
    post, pre = model(inputs, TrunkContext(positions))
    logits = model.logits(post).float()
    main = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    teacher = logits.detach().softmax(-1)
    drafts = unroll(model, inputs, model.head_hidden(post, pre), draft_steps)
    return main, [
        F.cross_entropy(draft.float().flatten(0, 1), teacher[:, k : k + draft.shape[1]].flatten(0, 1))
        for k, draft in enumerate(drafts, 1)
    ]


def add_dropout(model: nn.Module, share: float) -> None:
    """Dropout on the outputs of mixers and MLPs while the model is in training mode."""
    for module in model.modules():
        if isinstance(module, Attention | GatedDeltaNet | MLP):
            module.register_forward_hook(lambda m, _, out: F.dropout(out, share, m.training))


def optimiser(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": settings.decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak_rate, betas=(0.9, 0.95), fused=params[0].is_cuda)


def train(
    model: Decoder, stream: np.ndarray, held_out: np.ndarray, settings: Settings, device: torch.device
) -> dict[str, object]:
    """Train in place; returns steps, tokens, seconds and the losses along the way."""
    data = torch.from_numpy(stream.astype(np.int32)).to(device)
    model.requires_grad_(True).train()
    add_dropout(model, settings.dropout)
    adam = optimiser(model, settings)
    generator = torch.Generator(device).manual_seed(settings.seed)
    weights = [settings.draft_decay**k for k in range(settings.draft_steps)]
    weights = [settings.draft_weight * w / sum(weights) for w in weights]
    history: list[dict[str, float]] = []
    start, step, seen, done = time.monotonic(), 0, 0, 0.0
    while done < 1:
        window = settings.long_window if done >= 1 - settings.long_share else settings.window
        rows = max(settings.tokens // window, 1)
        at = torch.randint(len(data) - window - 1, (rows, 1), generator=generator, device=device)
        ids = data[at + torch.arange(window + 1, device=device)].long()
        for group in adam.param_groups:
            group["lr"] = learning_rate(done, settings)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            main, drafts = losses(model, ids, settings.draft_steps)
        torch.stack([main, *(w * d for w, d in zip(weights, drafts, strict=True))]).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + rows * window
        if step % 50 == 0 or step == 1:
            values = [x.item() for x in (main, *drafts)]
            seconds = time.monotonic() - start
            history.append({"step": step, "seconds": round(seconds, 1), "main": values[0]})
            shown = " ".join(f"{v:.3f}" for v in values)
            print(f"step {step} {100 * done:.0f} % losses {shown} {seen / seconds:,.0f} tokens/s", flush=True)
        if step % settings.evaluate_every == 0:
            model.eval()
            figures = evaluate(
                model, held_out, window=settings.window, batch=32, steps=settings.draft_steps, device=device, limit=128
            )
            model.train()
            history[-1] |= {"held_out": figures.loss, "accept_length": figures.accept_length}
            print(f"step {step} {figures.line()}", flush=True)
        done = max(step / settings.steps, (time.monotonic() - start) / 60 / settings.minutes)
    model.eval().requires_grad_(False)
    return {"steps": step, "tokens": seen, "seconds": round(time.monotonic() - start, 1), "history": history}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "config.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    data, out, device = given.pop("data"), given.pop("out"), torch.device(given.pop("device"))
    config = json.loads(given.pop("config").read_text())
    settings = Settings(**given)
    torch.set_float32_matmul_precision("high")
    model = build(decoder_config(config), dtype=torch.float32, device=device)
    initialise(model, settings.seed)
    held_out = np.load(data / "held_out.npy")
    run = train(model, np.load(data / "train.npy"), held_out, settings, device)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16())
    figures = evaluate(model, held_out, window=1024, batch=16, steps=settings.draft_steps, device=device)
    print(f"end: {run['steps']} steps, {run['tokens']:,} tokens, {run['seconds']} s; {figures.line()}", flush=True)
    export(model, config, data / "tokenizer", out)
    report = {
        "settings": asdict(settings) | {"minutes": settings.minutes if math.isfinite(settings.minutes) else None},
        "corpus": json.loads((data / "corpus.json").read_text()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "head_parameters": sum(p.numel() for p in model.mtp.parameters()) if model.mtp is not None else 0,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "run": run,
        "held_out": figures.as_json(),
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
