"""What checkpoints say about decoding: end ids from everywhere, sampling from generation_config.json."""

from __future__ import annotations

from typing import Any

import pytest

from nextn.engine.defaults import read_defaults
from nextn.engine.params import SamplingParams
from nextn.errors import NextnError


@pytest.mark.parametrize(
    "config, generation, tokenizer, expected",
    [
        ({}, None, (), ()),
        ({"eos_token_id": 5}, None, (), (5,)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 6]}, (5, 8), (7, 6, 5, 8)),
        ({"text_config": {"eos_token_id": 9}}, {"eos_token_id": 7}, (), (7, 9)),
        ({"eos_token_id": None, "text_config": None}, {"eos_token_id": -1}, (3,), (3,)),
        ({"eos_token_id": [1, 1]}, {}, (1,), (1,)),
    ],
)
def test_end_ids_are_a_union(
    config: Any, generation: Any, tokenizer: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert read_defaults(config, generation, tokenizer).eos_ids == expected


@pytest.mark.parametrize(
    "generation, expected",
    [
        (None, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "5"},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.6, "min_p": 0.1}, {"temperature": 0.6, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        (
            {"do_sample": False, "repetition_penalty": 1.05, "max_new_tokens": 2048},
            {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": 2048},
        ),
        ({"temperature": None, "top_k": None}, {}),
    ],
)
def test_sampling_defaults(generation: Any, expected: dict[str, Any]) -> None:
    options = read_defaults({}, generation).options
    assert options == expected
    params = SamplingParams(**(options | {"top_k": 3}))
    assert params.top_k == 3
    assert params.greedy is (expected.get("temperature") == 0.0)


def test_begin_and_padding() -> None:
    found = read_defaults({"bos_token_id": 1, "text_config": {"pad_token_id": 4}}, {"pad_token_id": -1})
    assert (found.bos_id, found.pad_id) == (1, 4)
    assert (read_defaults({}).bos_id, read_defaults({}).pad_id) == (None, None)


@pytest.mark.parametrize("value", ["5", 5.0, [1, "2"], True, {"id": 1}])
def test_an_end_id_that_is_none(value: Any) -> None:
    with pytest.raises(NextnError, match="eos_token_id is"):
        read_defaults({}, {"eos_token_id": value})
