"""Write docs/performance.md from the result files; with --check only say whether it is current.

    python benchmarks/write_performance.py

What a record was made without, such as decode.py's `--full`, is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.targets import TIMES_FASTER, WARM_START_UP, Target, ratio, target

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PLANS = ROOT / "src" / "nextn" / "kernels" / "rows_h200.json"
FORCED = "Acceptance is forced by a test-only switch, `Forced` of `benchmarks/decode_bench.py`."

Cell = tuple[str, int, str, float, float]
"""Geometry, batch size, step or round, milliseconds of nextn and of SGLang."""


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


def against(ratio: float, goal: Target | None) -> str:
    """A ratio, with what it must be and aims to be where that was set."""
    return f"{ratio:.2f}" + (f" ({goal.must:.2f} / {goal.aim:.2f})" if goal is not None else "")


def floors(record: dict[str, Any]) -> list[str]:
    rows = []
    for r in record["rows"]:
        cells = [r["geometry"], r["batch"], r["draft_tokens"], r["draft_vocab"] or "all"]
        for what in ("step", "round"):
            cells += [f"{r[f'{what}_ms']:.3f}", f"{r[f'{what}_floor_ms']:.3f}"]
            cells.append(against(ratio(r, what), target(r, what)))
        cells.append(f"{r['round_ms'] / r['step_ms']:.2f}")
        rows.append([*cells, f"{r['peak_memory_gb']:.1f}"])
    head = ["geometry", "batch", "K", "draft vocabulary", "step ms", "floor", "ratio", "round ms", "floor", "ratio"]
    return table([*head, "breaks even at", "peak GB"], rows)


def verdict(record: dict[str, Any]) -> list[str]:
    """Which targets are met, in words; by the ratios before they are rounded."""
    found: dict[str, list[str]] = {"reached": [], "missed": [], "exceeded": []}
    for r in record["rows"]:
        for what in ("step", "round"):
            goal, times = target(r, what), ratio(r, what)
            if goal is None:
                continue
            named = f"{r['geometry']} {what}"
            found["reached" if times <= goal.aim else "missed"].append(f"{named} ({times:.3f}, aim {goal.aim:.2f})")
            if times > goal.must:
                found["exceeded"].append(f"{named} ({times:.3f}, must {goal.must:.2f})")
    musts = listed(found["exceeded"]) or "none"
    return [
        f"- above what they must be: {musts}",
        f"- aims reached: {listed(found['reached']) or 'none'}",
        f"- aims missed: {listed(found['missed']) or 'none'}",
    ]


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return ", ".join(names[:-1]) + (" and " if len(names) > 1 else "") + names[-1] if names else ""


def quicker(cells: Sequence[Cell]) -> str:
    """In how many cells nextn takes less time than SGLang, and by how much where more than that is asked for."""
    slower = [f"{g} {what} at batch {b}" for g, b, what, mine, theirs in cells if mine >= theirs]
    less = f"nextn takes less time in {len(cells) - len(slower)} of {len(cells)} cells"
    less += f"; not in {listed(slower)}" if slower else ""
    more = [
        f"The {g} {what} at batch {b} is {theirs / mine:.2f} times as fast "
        f"(to reach: {wanted:.0f}, {'met' if theirs / mine >= wanted else 'missed'})."
        for g, b, what, mine, theirs in cells
        if (wanted := TIMES_FASTER.get((g, b, what))) is not None
    ]
    return " ".join([f"{less}.", *more])


def anchor_cells(record: dict[str, Any], peer: dict[str, Any]) -> list[Cell]:
    """Of two records; of a range, SGLang's best."""
    ours = {
        (r["geometry"], r["batch"]): r for r in record["rows"] if r["draft_vocab"] is None and r["draft_tokens"] == 3
    }
    return [
        (r["geometry"], r["batch"], what, ours[r["geometry"], r["batch"]][f"{what}_ms"], theirs)
        for r in peer["rows"]
        for what, theirs in (("step", r["step_ms"]), ("round", r["round_ms"][0]))
    ]


def anchor(cells: Sequence[Cell], peer: dict[str, Any]) -> list[str]:
    rows = []
    for r, (_, _, _, step, _), (_, _, _, round_, _) in zip(peer["rows"], cells[::2], cells[1::2], strict=True):
        low, high = r["round_ms"]
        rows.append(
            (
                r["geometry"], r["batch"], f"{step:.2f}", f"{r['step_ms']:.2f}", f"{r['step_ms'] / step:.2f}",
                f"{round_:.2f}", f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}", f"{low / round_:.2f}",
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
        lines += ["## Speed-up by accept length", "", FORCED, ""]
        lengths = [f["accept_length"] for f in forced[0]["forced"]]
        gained = ([f["accept_length"] * r["step_ms"] / f["round_ms"] for f in r["forced"]] for r in forced)
        rows = (
            (r["geometry"], r["batch"], *(f"{times:.2f}" for times in every))
            for r, every in zip(forced, gained, strict=True)
        )
        lines += table(["geometry", "batch", *(f"accept length {n}" for n in lengths)], rows)
    if exact := [r for r in whole if "exact_step_ms" in r]:
        lines += ["## Exact decoding", "", "`--exact`, milliseconds, and how much slower than without it.", ""]
        rows = (
            (r["geometry"], r["batch"], f"{r['exact_step_ms']:.3f}", f"{r['exact_step_ms'] / r['step_ms']:.2f}",
             f"{r['exact_round_ms']:.3f}", f"{r['exact_round_ms'] / r['round_ms']:.2f}")
            for r in exact
        )  # fmt: skip
        lines += table(["geometry", "batch", "step ms", "times", "round ms", "times"], rows)
    return [*lines, *separate_draft(whole), *start_up(record)]


def separate_draft(whole: Sequence[dict[str, Any]]) -> list[str]:
    """Rounds with the head as a second model, and their memory."""
    apart = [r for r in whole if "separate_draft_round_ms" in r]
    if not apart:
        return []
    other = max(r[f"{name}_other_gb"] for r in apart for name in ("peak_memory", "separate_draft_peak_memory"))
    keys = ("peak_memory_gb", "separate_draft_peak_memory_gb", "separate_draft_extra_gb")
    rows = (
        (r["geometry"], r["batch"], f"{r['round_ms']:.3f}", f"{r['separate_draft_round_ms']:.3f}",
         *(f"{r[key]:.2f}" for key in keys))
        for r in apart
    )  # fmt: skip
    head = ["geometry", "batch", "native round ms", "separate round ms", "native GB", "separate GB", "difference"]
    return [
        "## The head as a separate draft",
        "",
        "`--separate-draft`: a second embedding and output head beside the target's, which then has no head of its",
        "own. Peaks of memory while a round is compiled, captured and run. Allocated before: weights, a cache",
        f"and at most {other:.2f} GB.",
        "",
        *table(head, rows),
    ]


def start_up(record: dict[str, Any]) -> list[str]:
    starts: dict[str, dict[str, Any]] = record.get("start_up", {})
    if not starts:
        return []
    lengths = listed([f"{n:,}" for n in sorted({s["prompt_tokens"] for s in starts.values()})])
    slowest = max(s["start_up_warm_s"] for s in starts.values())
    rows = ((g, s["start_up_cold_s"], s["start_up_warm_s"]) for g, s in starts.items())
    return [
        "## Start-up",
        "",
        f"Seconds from weights on the GPU to the first answer, batch 1, K = 3: a prompt of {lengths} tokens and a",
        f"round. Warm, it must be under {WARM_START_UP:.0f}: {'met' if slowest < WARM_START_UP else 'missed'}.",
        "",
        *table(["geometry", "empty caches of kernels and of their tuning", "warm"], rows),
    ]


def product(record: dict[str, Any]) -> list[str]:
    """`nextn.generate` beside the executor alone, where the record has it."""
    measured = [r for r in record["rows"] if "generate_step_ms" in r]
    if not measured:
        return []
    rows = (
        (r["geometry"], r["batch"], r["draft_tokens"], f"{r['step_ms']:.3f}", f"{r['generate_step_ms']:.3f}",
         f"{r['round_ms']:.3f}", f"{r['generate_round_ms']:.3f}", f"{r['generate_accept_length']:.2f}",
         f"{r['generate_step_tokens_per_s']:.0f}", f"{r['generate_round_tokens_per_s']:.0f}")
        for r in measured
    )  # fmt: skip
    head = ["geometry", "batch", "K", "step: executor", "generate", "round: executor", "generate", "accept length"]
    return [
        "## The whole product",
        "",
        f"`nextn.generate` with scheduler, stops and text: prompts of {measured[0]['context']:,} tokens,",
        f"{measured[0]['generate_tokens']} greedy tokens each. Milliseconds from one forward's tokens to the next's,",
        "by the host's clock, beside the executor's loop. Tokens a second are those of a whole call, its prompts and",
        "the capturing of its graph included. The head's weights are random, so that hardly a draft token is accepted",
        "and decoding with it is slower; what it gains is in the speed-up by accept length below.",
        "",
        *table([*head, "tokens / s at K = 0", "with the head"], rows),
    ]


def sampling(record: dict[str, Any]) -> list[str]:
    rows = []
    greedy: dict[str, Any] = {}
    for r in record["rows"]:
        greedy = r if r["sampling"] == "greedy" else greedy
        cells = [r["geometry"], r["batch"], r["sampling"]]
        for what in ("step_ms", "round_ms"):
            cells += [f"{r[what]:.3f}", f"{r[what] / greedy[what]:.2f}"]
        rows.append(cells)
    return table(["geometry", "batch", "sampling", "step ms", "over greedy", "round ms", "over greedy"], rows)


def parting(record: dict[str, Any]) -> list[str]:
    rows = (
        (r["model"], r.get("batch", r["prompts"]), f"{r['prompts']} x {r['tokens_each']}", r["parted"],
         r["parted_per_1000_tokens"], r["near_ties"], r["largest_gap_over_rounding"], r["parted_exact"])
        for r in record["rows"]
    )  # fmt: skip
    head = ["model", "batch", "prompts x tokens", "parted", "per 1,000 tokens", "of them near-ties"]
    return table([*head, "largest gap / rounding", "parted with `--exact`"], rows)


def together_cells(record: dict[str, Any]) -> list[Cell]:
    return [
        (r["geometry"], r["batch"], what, mine, theirs)
        for r in record["rows"]
        for what in ("step", "round")
        if (mine := r[f"nextn_{what}_ms"]) is not None and (theirs := r[f"sglang_{what}_ms"]) is not None
    ]


def together(cells: Sequence[Cell]) -> list[str]:
    rows = ((g, b, what, f"{mine:.2f}", f"{theirs:.2f}", f"{theirs / mine:.2f}") for g, b, what, mine, theirs in cells)
    return table(["geometry", "batch", "what", "nextn ms", "SGLang ms", "times faster"], rows)


def in_place(record: dict[str, Any]) -> list[str]:
    """What choosing the plans of products inside whole forwards gained."""
    if not (found := record.get("in_place")):
        return []
    rows = (
        (f["geometry"], f["rows"], f["tried"], f"{f['before_ms']:.3f}", f"{f['after_ms']:.3f}",
         f"{f['after_ms'] / f['before_ms'] - 1:+.1%}")
        for f in sorted(found, key=lambda f: (f["geometry"], f["rows"]))
    )  # fmt: skip
    return [
        "## Products tuned in place",
        "",
        "The kernel of each product was chosen by its time among products of its own shape",
        "(`benchmarks/tune_rows.py`), then again by the time of a whole forward around it",
        "(`benchmarks/tune_in_place.py`); both in `src/nextn/kernels/rows_h200.json`. Milliseconds of that forward at",
        "batch 1, before and after the second. A row counts all searches of its forward, from where the first began;",
        "other kernels became faster between them, most at 0.8b with 4 rows, so not all of the change is the plans'.",
        "",
        *table(["geometry", "rows", "plans tried", "before", "after", "change"], rows),
    ]


def delta_programs(record: dict[str, Any]) -> list[str]:
    """Forwards with the delta step's programs as few sequences have them, and as chosen by the number of heads."""
    rows = []
    for r in record["rows"]:
        few, chosen, best = r["forward_ms"]["32x4"], r["forward_ms"][r["in_use"]], min(r["forward_ms"].values())
        rows.append(
            (r["geometry"], r["batch"], r["rows"], f"{few:.3f}", r["in_use"].replace("x", " x "), f"{chosen:.3f}",
             f"{best:.3f}")
        )  # fmt: skip
    return table(["geometry", "batch", "rows", "32 x 4, ms", "in use", "ms", "best of six, ms"], rows)


def traces() -> str:
    """How the scheduler's random traces ended."""
    record = result("scheduler-traces.json")
    failed = len(record["failed"])
    return f"{failed or 'none'} of {record['traces']:,}\nfailed (`benchmarks/results/scheduler-traces.json`)"


def page() -> str:
    decode, peer, apart = (result(n) for n in ("decode-h200.json", "sglang-h200.json", "divergence-h200.json"))
    pair, sampled = result("pair-h200.json"), result("sampled-h200.json")
    programs = result("delta-programs-h200.json")
    far, near = anchor_cells(decode, peer), together_cells(pair)
    lines = [
        "# Performance",
        "",
        "Written by `benchmarks/write_performance.py` from the files under `benchmarks/results/`. `bash",
        "benchmarks/record_gpu.sh LOGS` runs the GPU tests and records decoding, sampling, parting texts and the delta",
        "step's programs; the pair with SGLang, products tuned in place and trials are records of their own, and may",
        f"be older. Of random traces of the scheduler, each request compared with itself alone, {traces()}.",
        "",
        "## Against the bytes that must move",
        "",
        f"{source('decode-h200.json', decode)} Read bandwidth in the same process: {decode['read_gb_per_s']:.0f} GB/s.",
        "Random weights of the Qwen3.5 geometries, bf16, 1,024 positions of context. A step is one token without the",
        "head; a round is verify, accept, extend and K - 1 draft steps, one CUDA graph. Times are those of the",
        "engine's executor, which launches a round and collects the one before it, without scheduler, stops and text.",
        "The floor is weights, states and K/V over that bandwidth. Behind a ratio: what it must be / aims to be. A",
        f"round breaks even at the accept length given. {decode.get('note', '')}".rstrip(),
        "",
        "At batch 1 and K = 3, as multiples of the floor:",
        "",
        *verdict(decode),
        "",
        *floors(decode),
        *product(decode),
        *prompts(decode),
        "## Beside SGLang",
        "",
        f"{source('sglang-h200.json', peer)} {peer['note']}",
        "Milliseconds. nextn's are those of its executor's loop, without scheduler, stops and text; SGLang's are those",
        "of its whole offline engine. nextn at 1,024 positions of context, SGLang at 512 to 768; different machines.",
        quicker(far),
        "",
        *anchor(far, peer),
        f"On one machine, one after the other, each timed as above. {source('pair-h200.json', pair)} {pair['note']}",
        quicker(near),
        "",
        *together(near),
        *extras(decode),
        *in_place(json.loads(PLANS.read_text())),
        "## Programs of the delta step",
        "",
        source("delta-programs-h200.json", programs),
        "Columns of a head's state and warps of a program hang on how many heads all sequences have together",
        "(`program_of` in `src/nextn/kernels/delta_triton.py`). Milliseconds of a forward.",
        "",
        *delta_programs(programs),
        "What did not pay: products that take in the norm before them, or the residual stream behind them",
        "(`benchmarks/results/rows-fused-h200.json`; it tried the gate behind them together with the norm only, and by",
        "itself that pays where a program has all inputs of its outputs). Trials of the small kernels, those that paid",
        "and those that did not, are in `benchmarks/results/kernels-trials-h200.json`.",
        "",
        "## What sampling costs",
        "",
        f"{source('sampled-h200.json', sampled)} {sampled.get('note', '')}".rstrip(),
        "K = 3. A round turns seven rows of logits into probabilities, draws, and tests drafts against them. Random",
        "weights spread their probability wide, so that top-p alone cuts among many ids.",
        "",
        *sampling(sampled),
        "## Greedy tokens in bf16 with the head on and off",
        "",
        f"{source('divergence-h200.json', apart)} {apart.get('note', '')}".rstrip(),
        "A verify of several rows rounds differently from a step of one. Where texts part, all logits at that position",
        "are computed again through the whole model, in float32 and in bf16. The gap is how far the lower of the two",
        "tokens' float32 logits lies under the best one. The rounding is the largest error of any bf16 logit there. A",
        "gap of at most twice the rounding is a near-tie. Random weights leave the best of 248,320 logits close",
        "together, so they part often.",
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
