"""Write docs/performance.md from the result files; with --check only say whether it is current.

python benchmarks/write_performance.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
TARGETS = {"4b": ((1.52, 1.25), (1.50, 1.25)), "9b": ((1.30, 1.15), (1.32, 1.15)), "0.8b": ((3.2, 1.8), (2.5, 1.6))}
"""Times floor at batch 1, (must, aim) for the step and for the round at K = 3."""


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def source(name: str, record: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    command = f" `{record['command']}`." if "command" in record else ""
    return f"From `benchmarks/results/{name}`: {record['machine']}, {versions}, {record['date']}.{command}"


def against(ratio: float, goal: tuple[float, float] | None) -> str:
    """A ratio, with what it must be and aims to be where that was set."""
    return f"{ratio:.2f}" + (f" ({goal[0]:.2f} / {goal[1]:.2f})" if goal is not None else "")


def floors(record: dict[str, Any]) -> list[str]:
    rows = []
    for r in record["rows"]:
        known = r["batch"] == 1 and r["draft_tokens"] == 3 and r["draft_vocab"] is None
        goals = TARGETS[r["geometry"]] if known else (None, None)
        rows.append(
            (
                r["geometry"], r["batch"], r["draft_tokens"], r["draft_vocab"] or "all",
                f"{r['step_ms']:.3f}", f"{r['step_floor_ms']:.3f}", against(r["step_ratio"], goals[0]),
                f"{r['round_ms']:.3f}", f"{r['round_floor_ms']:.3f}", against(r["round_ratio"], goals[1]),
                f"{r['break_even_accept_length']:.2f}", f"{r['peak_memory_gb']:.1f}",
            )
        )  # fmt: skip
    head = ["geometry", "batch", "K", "draft vocabulary", "step ms", "floor", "ratio", "round ms", "floor", "ratio"]
    return table([*head, "breaks even at", "peak GB"], rows)


def anchor(record: dict[str, Any], peer: dict[str, Any]) -> list[str]:
    ours = {
        (r["geometry"], r["batch"]): r for r in record["rows"] if r["draft_vocab"] is None and r["draft_tokens"] == 3
    }
    rows = []
    for r in peer["rows"]:
        mine = ours[r["geometry"], r["batch"]]
        low, high = r["round_ms"]
        rows.append(
            (
                r["geometry"], r["batch"], f"{mine['step_ms']:.2f}", f"{r['step_ms']:.2f}",
                f"{r['step_ms'] / mine['step_ms']:.2f}", f"{mine['round_ms']:.2f}",
                f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}", f"{low / mine['round_ms']:.2f}",
            )
        )  # fmt: skip
    head = ["geometry", "batch", "step: nextn", "SGLang", "times faster", "round: nextn", "SGLang", "times faster"]
    return table(head, rows)


def prompts(record: dict[str, Any]) -> list[str]:
    if not record.get("prefill"):
        return []
    rows = (
        (r["geometry"], r["tokens"], r["recurrence"], f"{r['ms']:.1f}", f"{r['tokens_per_s']:,}",
         f"{r['share_of_peak']:.0%}", f"{r['ms_in_chunks_of_512']:.1f}")
        for r in record["prefill"]
    )  # fmt: skip
    head = ["geometry", "tokens", "recurrence", "ms", "tokens / s", "of the peak", "ms in chunks of 512"]
    return [
        "## Prompts",
        "",
        "From a prompt to its first token and first draft, one sequence, by the host's clock. The peak is what a",
        f"square bf16 product of 8,192 reached in the same process, {record['bf16_tflops']} TFLOP/s.",
        "",
        *table(head, rows),
    ]


def extras(record: dict[str, Any]) -> list[str]:
    """What the full benchmark adds, where the record has it."""
    lines: list[str] = []
    whole = [r for r in record["rows"] if r["draft_vocab"] is None]
    if shares := [r for r in record["rows"] if r.get("head_share") is not None]:
        lines += ["## Share of a round spent in head passes", ""]
        rows = ((r["geometry"], r["batch"], r["draft_vocab"] or "all", f"{r['head_share']:.0%}") for r in shares)
        lines += table(["geometry", "batch", "draft vocabulary", "share"], rows)
    if forced := [r for r in whole if r.get("forced")]:
        lines += ["## Speed-up by accept length", "", f"Acceptance is forced: {record['forced_by']}.", ""]
        lengths = [f["accept_length"] for f in forced[0]["forced"]]
        rows = ((r["geometry"], r["batch"], *(f"{f['speed_up']:.2f}" for f in r["forced"])) for r in forced)
        lines += table(["geometry", "batch", *(f"accept length {n}" for n in lengths)], rows)
    if exact := [r for r in whole if "exact_step_ms" in r]:
        lines += ["## Exact decoding", "", "`--exact`, milliseconds, and how much slower than without it.", ""]
        rows = (
            (r["geometry"], r["batch"], f"{r['exact_step_ms']:.3f}", f"{r['exact_step_ms'] / r['step_ms']:.2f}",
             f"{r['exact_round_ms']:.3f}", f"{r['exact_round_ms'] / r['round_ms']:.2f}")
            for r in exact
        )  # fmt: skip
        lines += table(["geometry", "batch", "step ms", "times", "round ms", "times"], rows)
    if memory := [r for r in whole if "separate_draft_peak_memory_gb" in r]:
        lines += ["## Peak memory with the head inside and as a separate draft", ""]
        rows = (
            (r["geometry"], r["batch"], r["peak_memory_gb"], r["separate_draft_peak_memory_gb"],
             f"{r['separate_draft_round_ms']:.3f}")
            for r in memory
        )  # fmt: skip
        lines += table(["geometry", "batch", "native GB", "separate GB", "separate round ms"], rows)
    if starts := record.get("start_up"):
        lines += ["## Start-up", "", "Seconds from weights on the GPU to the first round, batch 1, K = 3.", ""]
        rows = ((g, s["start_up_cold_s"], s["start_up_warm_s"]) for g, s in starts.items())
        lines += table(["geometry", "empty Triton cache", "warm"], rows)
    return lines


def sampling(record: dict[str, Any]) -> list[str]:
    rows = (
        (r["geometry"], r["batch"], r["sampling"], f"{r['step_ms']:.3f}", f"{r['step_ratio']:.2f}",
         f"{r['round_ms']:.3f}", f"{r['round_ratio']:.2f}")
        for r in record["rows"]
    )  # fmt: skip
    return table(["geometry", "batch", "sampling", "step ms", "over greedy", "round ms", "over greedy"], rows)


def parting(record: dict[str, Any]) -> list[str]:
    rows = (
        (r["model"], f"{r['prompts']} x {r['tokens_each']}", r["parted"], r["parted_per_1000_tokens"], r["near_ties"],
         r["largest_gap_over_rounding"], r["parted_exact"])
        for r in record["rows"]
    )  # fmt: skip
    head = ["model", "prompts x tokens", "parted", "per 1,000 tokens", "of them near-ties", "largest gap / rounding"]
    return table([*head, "parted with `--exact`"], rows)


def together(record: dict[str, Any]) -> list[str]:
    rows = (
        (r["geometry"], r["batch"], what, f"{mine:.2f}", f"{theirs:.2f}", f"{theirs / mine:.2f}")
        for r in record["rows"]
        for what in ("step", "round")
        if (mine := r[f"nextn_{what}_ms"]) is not None and (theirs := r[f"sglang_{what}_ms"]) is not None
    )
    return table(["geometry", "batch", "what", "nextn ms", "SGLang ms", "times faster"], rows)


def page() -> str:
    decode, peer, apart = (result(n) for n in ("decode-h200.json", "sglang-h200.json", "divergence-h200.json"))
    pair, sampled = result("pair-h200.json"), result("sampled-h200.json")
    lines = [
        "# Performance",
        "",
        "Written by `benchmarks/write_performance.py` from the files under `benchmarks/results/`.",
        "",
        "## Against the bytes that must move",
        "",
        f"{source('decode-h200.json', decode)} Read bandwidth in the same process: {decode['read_gb_per_s']:.0f} GB/s.",
        "Random weights of the Qwen3.5 geometries, bf16, 1,024 positions of context. A step is one token without the",
        "head; a round is verify, accept, extend and K - 1 draft steps, one CUDA graph. The floor is weights, states",
        "and K/V over that bandwidth. Behind a ratio: what it must be / aims to be. A round breaks even at the accept",
        f"length given. {decode.get('note', '')}".rstrip(),
        "",
        *floors(decode),
        *prompts(decode),
        "## Beside SGLang",
        "",
        f"{source('sglang-h200.json', peer)} {peer['note']}",
        "Milliseconds; nextn at 1,024 positions of context, SGLang at 512 to 768; different machines.",
        "",
        *anchor(decode, peer),
        f"On one machine, one after the other. {source('pair-h200.json', pair)} {pair['note']}",
        "",
        *together(pair),
        *extras(decode),
        "## What sampling costs",
        "",
        source("sampled-h200.json", sampled),
        "K = 3. A round turns seven rows of logits into probabilities, draws, and tests drafts against them. Random",
        "weights spread their probability wide, so that top-p alone cuts among many ids.",
        "",
        *sampling(sampled),
        "## Greedy tokens in bf16 with the head on and off",
        "",
        f"{source('divergence-h200.json', apart)} {apart.get('note', '')}".rstrip(),
        "A verify of several rows rounds differently from a step of one. Where texts part, the two tokens' logits are",
        "computed again in float32; a gap of at most twice the rounding of a bf16 logit there is a near-tie. Random",
        "weights leave the best of 248,320 logits close together, so they part often.",
        "",
        *parting(apart),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = page()
    if options.check:
        if PAGE.read_text() != text:
            raise SystemExit(f"{PAGE.relative_to(ROOT)} is not current; run benchmarks/write_performance.py.")
        return
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
