"""A GGUF file as a folder: the weights, the logits and the ids of the model that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nextn import api
from nextn.convert.folder import write_folder
from nextn.convert.llama_gguf import LlamaFile, deinterleave
from nextn.convert.tokenizer import tokenizer_files
from nextn.engine.text import load_tokenizer
from nextn.errors import NextnError
from nextn.models.context import SequenceContext
from tests.convert.made import SIZES, SPECIAL, TEXT, interleaved, llama, tokenizer, write_gguf

Q8 = gguf.GGMLQuantizationType.Q8_0
Q4 = gguf.GGMLQuantizationType.Q4_1


WORDS = tokenizer()


@pytest.fixture
def words() -> Tokenizer:
    return WORDS


def metadata(words: Tokenizer, **values: Any) -> dict[str, Any]:
    """What a GGUF file says of a tokenizer."""
    state = json.loads(words.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    types = [3 if token in SPECIAL else 1 for token in tokens]
    told = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": merges, "token_type": types, **values}
    return {f"tokenizer.ggml.{name}": value for name, value in told.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_that_went_in(tmp_path: Path, words: Tokenizer, tied: bool) -> None:
    model = llama(words.get_vocab_size(), tied=tied)
    write_folder(write_gguf(tmp_path / "m.gguf", model, words), tmp_path / "out")
    found, state = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    expected = {k: v for k, v in state.items() if not (tied and k == "lm_head.weight")}
    assert set(found) == set(expected)
    assert all(torch.equal(found[k].float(), v) for k, v in expected.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: config[name] for name in SIZES} == SIZES
    assert (config["tie_word_embeddings"], config["bos_token_id"], config["eos_token_id"]) == (tied, 1, 2)


@torch.no_grad()
def test_the_logits_that_transformers_gives(tmp_path: Path, words: Tokenizer) -> None:
    model = llama(words.get_vocab_size(), tied=False)
    write_folder(write_gguf(tmp_path / "m.gguf", model, words), tmp_path / "out")
    target = api.load(tmp_path / "out", mtp=False, dtype="float32", device="cpu").target
    ids = torch.randint(0, words.get_vocab_size(), (1, 40), generator=torch.Generator().manual_seed(0))
    post, _ = target(ids, SequenceContext(torch.arange(40)[None]))
    assert torch.allclose(target.logits(post), model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("quantised", [Q8, Q4])
def test_quantised_weights_are_those_of_transformers_loader(tmp_path: Path, words: Tokenizer, quantised: Any) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = llama(words.get_vocab_size(), tied=False)
    file = write_gguf(tmp_path / "m.gguf", model, words, quantised=quantised)
    write_folder(file, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    loaded = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    assert set(found) == set(loaded)
    for key, value in loaded.items():
        assert torch.equal(found[key], value.bfloat16())
        near = model.state_dict()[key]
        assert float((value - near).norm() / near.norm()) < 0.12


@given(heads=st.integers(1, 4), half=st.integers(1, 8), width=st.integers(1, 3))
def test_rows_come_back_in_order(heads: int, half: int, width: int) -> None:
    weight = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(-1, width)
    assert torch.equal(deinterleave(torch.from_numpy(interleaved(weight, heads)), heads), torch.from_numpy(weight))


def plain_bpe(words: Tokenizer, text: str) -> list[int]:
    """Ids by the definition: digits apart, GPT-2's pattern, then the earliest merge again and again."""
    import regex
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    state = json.loads(words.to_str())["model"]
    vocab = state["vocab"]
    ranks = {tuple(m.split(" ") if isinstance(m, str) else m): i for i, m in enumerate(state["merges"])}
    shown = bytes_to_unicode()
    pattern = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    ids = []
    for part in regex.split(r"(\p{N})", text):
        for word in pattern.findall(part):
            pieces = [shown[b] for b in word.encode()]
            while len(pieces) > 1:
                best = min(range(len(pieces) - 1), key=lambda i: ranks.get((pieces[i], pieces[i + 1]), len(ranks)))
                if (pieces[best], pieces[best + 1]) not in ranks:
                    break
                pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
            ids += [vocab[piece] for piece in pieces]
    return ids


@given(text=st.one_of(st.text(max_size=40), st.lists(st.sampled_from([*TEXT[0], *TEXT[1]]), max_size=40).map("".join)))
def test_ids_of_a_text(text: str) -> None:
    made = Tokenizer.from_str(tokenizer_files(metadata(WORDS), "m.gguf")[0])
    ids = made.encode(text, add_special_tokens=False).ids
    assert ids == plain_bpe(WORDS, text)
    assert made.decode(ids, skip_special_tokens=False) == text


def test_ids_around_a_text_and_the_chat(tmp_path: Path, words: Tokenizer) -> None:
    model = llama(words.get_vocab_size(), tied=True)
    write_folder(write_gguf(tmp_path / "m.gguf", model, words, bos=True), tmp_path / "out")
    made = load_tokenizer(tmp_path / "out")
    assert made is not None
    assert made.encode("are") == [1, *plain_bpe(words, "are")]
    assert made.eos_ids == (2,)
    asked = made.encode_chat([{"role": "user", "content": "7 are"}])
    assert asked == [
        1,
        *plain_bpe(words, "user\n7 are"),
        2,
        *plain_bpe(words, "\n"),
        1,
        *plain_bpe(words, "assistant\n"),
    ]
    assert made.decode(asked) == "user\n7 are\nassistant\n"


def test_what_is_refused(tmp_path: Path, words: Tokenizer) -> None:
    model = llama(words.get_vocab_size(), tied=True)
    file = tmp_path / "m.gguf"

    def refused(said: str, **options: Any) -> None:
        write_gguf(file, model, words, **options)
        with pytest.raises(NextnError, match=said):
            write_folder(file, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]

    refused("no tensor for model.layers.1.mlp.up_proj", without="blk.1.ffn_up.weight")
    refused("'rope_freqs.weight'", tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    refused("pre-tokenizer 'llama-bpe'", values={"tokenizer.ggml.pre": "llama-bpe"})
    refused("kind 'llama'", values={"tokenizer.ggml.model": "llama"})
    refused("llama.rope.scaling.type", values={"llama.rope.scaling.type": "yarn"})
    whole = write_gguf(file, model, words).read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NextnError, match="truncated"):
        LlamaFile(file)
    other = gguf.GGUFWriter(file, "qwen2")
    other.write_header_to_file()
    other.write_kv_data_to_file()
    other.close()
    with pytest.raises(NextnError, match="architecture 'qwen2'"):
        LlamaFile(file)


def test_a_folder_that_another_process_made_stays(tmp_path: Path, words: Tokenizer) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama(words.get_vocab_size(), tied=True), words)
    write_folder(file, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").stat().st_ino
    write_folder(file, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(NextnError, match="cannot be written"):
        write_folder(file, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "m.gguf", "out"]
