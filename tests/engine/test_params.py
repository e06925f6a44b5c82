"""Options are checked where they enter; defaults are the OpenAI API's and vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from nextn.engine.params import SamplingParams
from nextn.errors import NextnError


@pytest.mark.parametrize(
    "option, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logprobs", -1),
        ("max_tokens", 0),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("min_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_named(option: str, value: Any) -> None:
    with pytest.raises(NextnError) as error:
        SamplingParams(**{option: value})
    assert error.value.exit_code == 2
    assert option.replace("_token_ids", "") in error.value.what.replace(" ", "_")
    assert error.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 5.0},
        {"top_p": 1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"logprobs": 0},
        {"max_tokens": None},
        {"max_tokens": 5, "min_tokens": 5},
        {"stop": "x"},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == (("x",) if name == "stop" else value)


def test_min_tokens_over_max_tokens() -> None:
    with pytest.raises(NextnError, match="min_tokens is 4 and max_tokens 3"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_forms_that_json_and_shells_give() -> None:
    params = SamplingParams(stop=["a", "b"], logit_bias={"7": 1, 9: -2}, stop_token_ids=[4, 5])  # type: ignore[dict-item]
    assert params.stop == ("a", "b")
    assert params.logit_bias == {7: 1.0, 9: -2.0}
    assert params.stop_token_ids == (4, 5)


def test_stop_ids() -> None:
    assert SamplingParams(stop_token_ids=[4, 5]).stop_ids([1, 5]) == {1, 4, 5}
    assert SamplingParams(stop_token_ids=[4], ignore_eos=True).stop_ids([1]) == {4}


@pytest.mark.parametrize("temperature, greedy", [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy
