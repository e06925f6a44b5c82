"""List the tokens of the training stream by frequency: `token_order.json`, what a reduced draft vocabulary is cut from.

``python -m recipes.tiny.order DATA src/nextn/tiny`` reads the stream that ``pack`` wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from nextn.engine.draft_vocab import TOKEN_ORDER


def token_order(ids: np.ndarray, vocab: int) -> list[int]:
    """All ids of the vocabulary, the most frequent of `ids` first; equally frequent ones in ascending order."""
    counts = np.bincount(ids, minlength=vocab)
    order: list[int] = np.argsort(-counts, kind="stable").tolist()
    return order


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("checkpoint", type=Path)
    options = parser.parse_args()
    vocab = json.loads((options.checkpoint / "config.json").read_text())["vocab_size"]
    order = token_order(np.load(options.data / "train.npy"), vocab)
    (options.checkpoint / TOKEN_ORDER).write_text(json.dumps(order, separators=(",", ":")) + "\n")
