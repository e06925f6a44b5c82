"""Write the figures of docs/train.md from the result files; with --check only say whether they are current.

A figure stands between the lines ``<!-- NAME -->`` and ``<!-- /NAME -->``, NAME being one of `BLOCKS`.

python benchmarks/write_training.py
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "train.md"


def stale_head(record: dict[str, Any]) -> list[str]:
    kinds = [name for name in record["rows"][0] if name != "state"]
    k = record["draft_tokens"]
    columns = [f"{kind}: accept length | by position | loss of the target" for kind in kinds]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * 3 * len(kinds)]
    for row in record["rows"]:
        cells = [row["state"]]
        for kind in kinds:
            found = row[kind]
            shares = " ".join(f"{share:.2f}" for share in found["acceptance"])
            cells += [f"{found['accept_length']:.2f}", shares, f"{found['target_loss']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    shifted, trained = record["shift"]["tokens"] / 1e3, record["training"]["tokens"] / 1e3
    return [
        *lines,
        "",
        f"K = {k}. The target was fine-tuned on {shifted:,.0f} thousand tokens of dialogue, the head then trained for",
        f"{record['training']['steps']} steps on {trained:,.0f} thousand. {source('stale-head.json', record)}",
    ]


def read_data(record: dict[str, Any]) -> list[str]:
    rates = {row["form"]: row["tokens_per_cpu_second"] / 1e3 for row in record["rows"]}
    return [
        f"A core reads {rates['conversations']:,.0f} thousand tokens a second of conversations, {rates['text']:,.0f}",
        f"of plain text and {rates['input_ids']:,.0f} of `input_ids` (vocabulary {record['vocabulary']:,}).",
        source("read-data.json", record),
    ]


def train_step(record: dict[str, Any]) -> list[str]:
    lines = ["| | ms | over the forward | memory beyond weights, GB |", "|---|---|---|---|"]
    for row in record["rows"]:
        over = f"{row['over_forward']:.2f}" if "over_forward" in row else ""
        lines.append(f"| {row['what']} | {row['median_ms']:.0f} | {over} | {row['peak_gb']:.1f} |")
    return [*lines, "", source("train-step-h200.json", record)]


def train_beside(record: dict[str, Any]) -> list[str]:
    lines = ["| | ms | memory beyond weights, GB |", "|---|---|---|"]
    lines += [f"| {row['what']} | {row['median_ms']:.0f} | {row['peak_gb']:.1f} |" for row in record["rows"]]
    return [*lines, "", source("train-beside-h200.json", record)]


def train_smollm2(record: dict[str, Any]) -> list[str]:
    head = ["variant", "accept length", "d1", "d2", "d3", "by rounds", "where answers ended", "tokens trained"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in record["rows"]:
        cells = [row["variant"], f"{row['accept_length']:.2f}", *(f"{share:.2f}" for share in row["acceptance"])]
        cells += [f"{row['accept_length_by_rounds']:.2f}", f"{row['by_ending']['stop']['accept_length']:.2f}"]
        more = "" if row["start"] == "scratch" else f"{row['start']} + "
        lines.append("| " + " | ".join([*cells, f"{more}{row['tokens_trained'] / 1e6:.1f} million"]) + " |")
    wrote, held = record["regenerate"], record["held_out"]
    million = sum(visit["tokens"] for visit in wrote) / 1e6
    rate = max(visit["tokens_per_second"] for visit in wrote) / 1e3
    return [
        *lines,
        "",
        f"K = {record['rows'][0]['draft_tokens']}, greedy, on the model's own answers to {held['questions']} held-out",
        f"questions, of which {held['ended']['stop']} end within 512 tokens. `nextn regenerate` wrote {million:.1f}",
        f"million tokens to train on, {rate:.0f} thousand a second by {wrote[0]['engines']} processes.",
        source("train-smollm2.json", record),
        "",
        *rates(record["rows"]),
        "",
        f"Decoding held-out questions on that GPU, one at a time, greedy, {record['decode'][0]['tokens']:,} tokens:",
        "",
        *speeds(record["decode"], "head"),
    ]


def rates(rows: Sequence[dict[str, Any]]) -> list[str]:
    """At which lr each optimiser ran, and how far a comparison of the two goes."""
    found = {row["variant"]: row for row in rows}
    muon, adamw, shipped = found["kl, own text"], found["adamw"], found["shipped"]
    usual = {row["lr"] for row in rows if row["optimizer"] == "muon" and row is not shipped}
    assert usual == {muon["lr"]}
    apart = muon["accept_length"] - adamw["accept_length"]
    return [
        f"AdamW ran at lr {adamw['lr']:g}, Muon at {muon['lr']:g} (`shipped`: {shipped['lr']:g}). There is no record",
        f"of other rates, so the {apart:.2f} between `adamw` and `kl, own text` may be those of the rates as much as",
        "of the optimisers.",
    ]


def smollm2_cpu(record: dict[str, Any]) -> list[str]:
    return [*speeds(record["rows"], None), "", source("smollm2-cpu.json", record)]


def speeds(rows: Sequence[dict[str, Any]], name: str | None) -> list[str]:
    """Tokens a second with heads, beside the first row, which has none."""
    head = [*([name] if name else []), "K", "draft vocabulary", "accept length", "tokens/s", "times"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        drafted = (row["draft_vocab"] or "all") if row["draft_tokens"] else ""
        accepted = f"{row['accept_length']:.2f}" if row["accept_length"] else ""
        cells = [*([row[name]] if name else []), row["draft_tokens"], drafted, accepted]
        times = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        cells += [f"{row['tokens_per_second']:,.0f}", f"{times:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def source(name: str, record: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    return f"From `benchmarks/results/{name}`: {record['machine']}, {versions}, {record['date']}."


BLOCKS: dict[str, Callable[[dict[str, Any]], Sequence[str]]] = {
    "stale-head": stale_head,
    "read-data": read_data,
    "train-step-h200": train_step,
    "train-beside-h200": train_beside,
    "train-smollm2": train_smollm2,
    "smollm2-cpu": smollm2_cpu,
}


def page(text: str) -> str:
    """The page with every block written anew."""
    for name, write in BLOCKS.items():
        record = json.loads((RESULTS / f"{name}.json").read_text())
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if len(re.findall(pattern, text, re.S)) != 1:
            raise SystemExit(f"{PAGE.relative_to(ROOT)} has no place for {name}: {begin.strip()} ... {end}")
        head, _, rest = text.partition(begin)
        text = head + begin + "\n".join(write(record)) + "\n" + end + rest.partition(end)[2]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = page(before)
    if options.check:
        if before != after:
            raise SystemExit(f"{PAGE.relative_to(ROOT)} is not current; run benchmarks/write_training.py.")
        return
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
