"""divergence.py on a CPU: tokens by groups, where texts part, gaps and roundings; and kernels.py's sets of data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nextn.engine.engine import Engine
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder
from tests.engine.models import decode, decoder

pytest.importorskip("triton")

from benchmarks import divergence, kernels

PROMPTS = [[(7 * i + 3 * j) % 97 for j in range(divergence.PROMPT_TOKENS)] for i in range(5)]


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("k", [0, 3])
def test_groups_give_every_prompt_its_own_tokens(batch: int, k: int) -> None:
    model = decoder("qwen3_5")
    found = divergence.tokens_of(model, PROMPTS, batch, k, 6, exact=False)
    assert found == [s.tokens for s in decode(Engine(model, draft_tokens=0), PROMPTS, max_tokens=6)]


@given(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 6), st.integers(1, 9))
def test_where_texts_part(text: list[int], at: int, other: int) -> None:
    assert divergence.first_difference(text, list(text)) is None
    if at < len(text):
        changed = [t + other if i >= at else t for i, t in enumerate(text)]
        assert divergence.first_difference(text, changed) == at


def logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """After the last id, of a forward of one sequence."""
    post, _ = model(torch.tensor([ids]), SequenceContext(torch.arange(len(ids))[None]))
    return model.logits(post[:, -1])[0]


def test_gaps_and_roundings() -> None:
    """Against forwards of single sequences; the second prompt does not part."""
    rough, precise = decoder("qwen3_5", torch.bfloat16), decoder("qwen3_5", torch.float32)
    a = [[4, 5, 6, 7], [1, 2, 3, 4], [9, 9, 9, 9]]
    b = [[4, 5, 8, 7], [1, 2, 3, 4], [8, 9, 9, 9]]
    found = divergence.near_ties((rough, precise), PROMPTS[:3], a, b)
    assert len(found) == 2
    for (gap, rounding), (prompt, text, pair) in zip(
        found, [(PROMPTS[0], [4, 5], (6, 8)), (PROMPTS[2], [], (9, 8))], strict=True
    ):
        exact = logits(precise, [*prompt, *text])
        assert gap == pytest.approx(float(exact.max() - min(exact[pair[0]], exact[pair[1]])), abs=1e-4)
        error = (logits(rough, [*prompt, *text]).float() - exact).abs().max()
        assert rounding == pytest.approx(float(error), rel=0.5)
        assert rounding > 0


def test_a_row() -> None:
    job = divergence.Job("0.8b", prompts=3, count=4, batches=(8,), k=3, exact=False)
    plain = [[4, 5, 6, 7], [1, 2, 3, 4], [9, 9, 9, 9]], [[4, 5, 8, 7], [1, 2, 3, 4], [8, 9, 9, 9]]
    row = divergence.row_of(job, 8, [(0.3, 0.2), (0.3, 0.1)], plain, (plain[0], plain[0]))
    assert row == {
        "model": "random 0.8b",
        "batch": 8,
        "prompts": 3,
        "tokens_each": 4,
        "draft_tokens": 3,
        "parted": 2,
        # Six tokens are the same before texts part or end; two are not.
        "parted_per_1000_tokens": 250.0,
        "near_ties": 1,
        "largest_gap": 0.3,
        "largest_gap_over_rounding": 3.0,
        "parted_exact": 0,
    }
    assert divergence.row_of(job, 8, [], (plain[0], plain[0]), plain)["parted_exact"] == 2


def test_small_batches_decode_fewer_prompts() -> None:
    job = divergence.Job(divergence.EMBEDDED, prompts=128, count=4, batches=(1, 8, 128), k=3, exact=True)
    assert [job.taken(batch) for batch in job.batches] == [32, 128, 128]


@given(st.integers(1, 10**8), st.integers(1, 10**8), st.integers(1, 24))
def test_a_graph_moves_more_than_the_cache_holds_or_as_much_as_it_may(moved: int, l2: int, at_once: int) -> None:
    count = kernels.copies(moved, l2, at_once)
    assert 1 <= count <= kernels.CALLS // at_once
    enough = count * at_once * moved > kernels.L2_TIMES * l2
    assert enough or count == kernels.CALLS // at_once
    assert count == 1 or (count - 1) * at_once * moved <= kernels.L2_TIMES * l2
    assert kernels.copies(moved, 0, at_once) == 1


def test_layers_again_have_caches_of_their_own() -> None:
    layer = kernels.Layer({}, (torch.zeros(1), torch.zeros(1)), None, (torch.ones(2), torch.ones(3)))
    made = kernels.layers_again([layer], 3)
    assert [[t.tolist() for t in m.caches] for m in made] == [[[1, 1], [1, 1, 1]]] * 3
    assert len({t.data_ptr() for m in made for t in m.caches}) == 6
    assert made[0] is layer
