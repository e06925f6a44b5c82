"""Turn the corpus into a tokenizer and two streams of token ids: ``train.npy`` and ``held_out.npy``.

``python -m recipes.tiny.pack OUT`` needs no network and about a minute. Documents are separated by
``<|endoftext|>``; the training stream also holds every documented function once more as a chat turn, so that the
chat template means something to the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from recipes.tiny.corpus import collect, figures, questions, standard_library
from recipes.tiny.tokenizer import END_OF_TEXT, chat, save_tokenizer, train_tokenizer

CONFIG = Path(__file__).parent / "config.json"


def stream(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """All texts as one array [tokens] of uint16, each followed by ``<|endoftext|>``."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts = [np.array([*encoded.ids, end], np.uint16) for encoded in tokenizer.encode_batch(list(texts))]
    return np.concatenate(parts)


def pack(root: Path, out: Path) -> dict[str, object]:
    """Write tokenizer, streams and ``corpus.json`` into `out`; return what corpus.json says."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads(CONFIG.read_text())
    documents = collect(root)
    train = [d for d in documents if not d.held_out]
    tokenizer = train_tokenizer((d.text for d in train), config["vocab_size"])
    save_tokenizer(tokenizer, out / "tokenizer", config["max_position_embeddings"])
    chats = [chat(q, a) for d in train for q, a in questions(d)]
    streams = {
        "train": stream(tokenizer, [d.text for d in train] + chats),
        "held_out": stream(tokenizer, [d.text for d in documents if d.held_out]),
    }
    for name, ids in streams.items():
        np.save(out / f"{name}.npy", ids)
    facts = figures(documents) | {"chat_turns": len(chats)} | {f"{n}_tokens": len(s) for n, s in streams.items()}
    (out / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    print(json.dumps(pack(standard_library(), parser.parse_args().out), indent=2))
