"""The unroll says what the engine's head says for the same tokens, and variants that no engine runs do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nextn.errors import NextnError
from nextn.models.context import SequenceContext
from nextn.models.decoder import Decoder
from nextn.train import contexts
from nextn.train.contexts import PackedContext, UnrollContext, chain_attention
from nextn.train.layout import Layout
from nextn.train.unroll import head_unroll, require_layers, target_states, unrolled_logits, valid_rows
from tests.engine.models import KINDS, decoder
from tests.train.packs import packed, random_documents
from tests.train.recorder import Chain, engine_chains

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query blocks far shorter than the documents, so that their borders are crossed."""
    monkeypatch.setattr(contexts, "QUERY_BLOCK", 4)


def distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


def unrolled_chains(model: Decoder, chains: list[Chain], k: int, padding: int) -> list[list[Tensor]]:
    """Logits of the chains by an unroll over all their texts in one packed batch."""
    batch = packed([c.tokens for c in chains], padding)
    outputs = unrolled_logits(model, batch, k).outputs
    starts = torch.tensor([0, *(len(c.tokens) for c in chains)]).cumsum(0).tolist()
    return [
        [model.logits(out[0, first + c.start]) for out in outputs] for first, c in zip(starts, chains, strict=False)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_equals_the_engines_draft_logits(kind: str, dtype: torch.dtype) -> None:
    """Every draft step of every round: after the prefill in chunks, after full, partial and no acceptance."""
    model, k = decoder(kind, dtype), 4
    lies = frozenset({len(PROMPT) + 2, len(PROMPT) + 4, len(PROMPT) + 11})
    chains = engine_chains(model, PROMPT, k=k, chunk=3, lies=lies)
    assert len(chains) >= 4
    for mine, chain in zip(unrolled_chains(model, chains, k, padding=5), chains, strict=True):
        for ours, theirs in zip(mine, chain.logits, strict=True):
            assert distance(ours, theirs) < TOLERANCE[dtype]


@settings(max_examples=25)
@given(
    kind=st.sampled_from(("qwen3_5", "qwen3_next", "qwen2")),
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=14),
    k=st.integers(1, 5),
    chunk=st.integers(1, 9),
    lies=st.frozensets(st.integers(0, 30), max_size=12),
    padding=st.integers(0, 9),
)
@torch.no_grad()
def test_equals_the_engine_whatever_is_accepted(
    kind: str, prompt: list[int], k: int, chunk: int, lies: frozenset[int], padding: int
) -> None:
    model = decoder(kind)
    chains = engine_chains(model, prompt, k=k, chunk=chunk, lies=lies, count=8)
    for mine, chain in zip(unrolled_chains(model, chains, k, padding), chains, strict=True):
        for ours, theirs in zip(mine, chain.logits, strict=True):
            assert distance(ours, theirs) < 1e-9


class CausalContext(UnrollContext):
    """A wrong variant that trainers are known to run: a step sees the earlier chains' later steps too."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: object, rope: object) -> Tensor:
        q, k = contexts.qk_norm_rope(q, k, norms.q, norms.k, norms.eps, rope)  # type: ignore[attr-defined, arg-type]
        keys = self.kept.setdefault(layer, [])
        keys.append((k, v))
        rows = q.shape[1]
        mask = torch.ones(rows, rows, dtype=torch.bool).tril() & (
            self.layout.documents[0][:, None] == self.layout.documents[0]
        )
        return contexts._masked(
            q, *(torch.cat(x, 1) for x in zip(*keys, strict=True)), torch.cat([mask] * len(keys), 1)
        )


@pytest.mark.parametrize("kind", ["qwen3_5", "llama"])
@torch.no_grad()
def test_wrong_variants_differ(kind: str) -> None:
    model, k = decoder(kind), 3
    batch = packed(random_documents((20, 13)), padding=4)
    layout = Layout(batch.documents)
    states = target_states(model, batch, layout)
    right = unrolled_logits(model, batch, k).outputs
    wrong = head_unroll(model)(model, CausalContext(layout, batch.positions), batch.ids, states.given, k)
    rows = layout.same_document(k + 1)
    assert distance(wrong[0][rows], right[0][rows]) < 1e-12
    for step in (1, 2):
        assert distance(wrong[step][rows], right[step][rows]) > 1e-3
    _, pre_norm = model(batch.ids, PackedContext(layout, batch.positions))
    other = head_unroll(model)(model, UnrollContext(layout, batch.positions), batch.ids, pre_norm, k)
    assert all(distance(a[rows], b[rows]) > 1e-3 for a, b in zip(other, right, strict=True))


lengths = st.lists(st.integers(1, 11), min_size=1, max_size=5)


@settings(max_examples=30)
@given(kind=st.sampled_from(KINDS), lengths=lengths, padding=st.integers(0, 6), seed=st.integers(0, 99))
@torch.no_grad()
def test_documents_do_not_see_each_other(kind: str, lengths: list[int], padding: int, seed: int) -> None:
    """Target and head over packed documents equal each document alone, without any packing code."""
    model = decoder(kind)
    documents = random_documents(lengths, seed=seed)
    batch = packed(documents, padding)
    layout = Layout(batch.documents)
    states = target_states(model, batch, layout)
    unrolled = unrolled_logits(model, batch, 2)
    first = 0
    for document in documents:
        ids = torch.tensor([document])
        alone, _ = model(ids, SequenceContext(torch.arange(len(document))[None]))
        rows = slice(first, first + len(document))
        assert torch.allclose(states.teacher[:, rows], alone, atol=1e-10)
        if len(document) > 1:
            step, _ = model.head_forward(
                ids[:, 1:], alone[:, :-1], SequenceContext(torch.arange(len(document) - 1)[None])
            )
            assert torch.allclose(unrolled.outputs[0][:, first : first + len(document) - 1], step, atol=1e-10)
        first += len(document)


@settings(max_examples=60)
@given(lengths=lengths, padding=st.integers(0, 6), steps=st.integers(1, 5), seed=st.integers(0, 99))
def test_valid_rows_by_their_definition(lengths: list[int], padding: int, steps: int, seed: int) -> None:
    batch = packed(random_documents(lengths), padding)
    generator = torch.Generator().manual_seed(seed)
    batch = replace(batch, loss_mask=torch.rand(batch.ids.shape, generator=generator) < 0.7)
    valid = valid_rows(batch, Layout(batch.documents), steps)
    documents, mask = batch.documents[0].tolist(), batch.loss_mask[0].tolist()
    for k in range(1, steps + 1):
        for t in range(len(documents)):
            at = t + k + 1
            expected = at < len(documents) and documents[t] == documents[at] >= 0 and mask[at]
            assert bool(valid[k - 1][0, t]) == expected


def naive_chains(layout: Layout, q: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Row by row, from the definition."""
    out = torch.zeros_like(q)
    documents, heads, group = layout.documents[0].tolist(), q.shape[2], q.shape[2] // keys[0][0].shape[2]
    for t, document in enumerate(documents):
        if document < 0:
            continue
        first = [s for s in range(t + 1) if documents[s] == document]
        for h in range(heads):
            k = torch.cat([keys[0][0][0, first, h // group], *(k[0, [t], h // group] for k, _ in keys[1:])])
            v = torch.cat([keys[0][1][0, first, h // group], *(v[0, [t], h // group] for _, v in keys[1:])])
            out[0, t, h] = ((k @ q[0, t, h]) * q.shape[-1] ** -0.5).softmax(0) @ v
    return out


@settings(max_examples=15)
@given(lengths=lengths, padding=st.integers(0, 6), steps=st.integers(1, 3), seed=st.integers(0, 99))
def test_attention_of_chains(lengths: list[int], padding: int, steps: int, seed: int) -> None:
    """The CPU's blocks, gradients included, and flex_attention's block mask equal the definition."""
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(packed(random_documents(lengths), padding).documents)
    rows = layout.documents.shape[1]

    def fresh(heads: int) -> Tensor:
        return torch.randn(1, rows, heads, 16, dtype=torch.float64, generator=generator).requires_grad_()

    q, keys = fresh(4), [(fresh(2), fresh(2)) for _ in range(steps)]
    inputs = [q, *(x for pair in keys for x in pair)]
    real = layout.documents[0] >= 0
    weight = torch.randn(1, rows, 4, 16, dtype=torch.float64, generator=generator) * real[:, None, None]
    expected = naive_chains(layout, q, keys)
    found = chain_attention(layout, q, keys)
    assert torch.allclose(found, expected, atol=1e-10)
    slopes = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    for mine, theirs in zip(*slopes, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)
    with torch.no_grad():
        detached = [(k.detach(), v.detach()) for k, v in keys]
        fused = contexts._flex(layout, q.detach(), detached, flex_attention)
    assert torch.allclose(fused[:, real], expected[:, real], atol=1e-10)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6), padding=st.integers(0, 200), steps=st.integers(1, 3)
)
def test_block_mask_names_the_blocks(lengths: list[int], padding: int, steps: int) -> None:
    """Those that flex_attention finds by asking the mask at every pair of rows."""
    documents = packed([[0] * n for n in lengths], padding).documents
    mask = contexts.layout_mask(documents, steps)
    rows, keys = mask.seq_lengths
    asked = create_block_mask(mask.mask_mod, None, None, rows, keys, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, theirs = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(asked, f"{name}_num_blocks")[0, 0]
        assert torch.equal(counts, theirs)
        found, expected = getattr(mask, f"{name}_indices")[0, 0], getattr(asked, f"{name}_indices")[0, 0]
        for block, count in enumerate(counts.tolist()):
            assert set(found[block, :count].tolist()) == set(expected[block, :count].tolist())


@pytest.mark.parametrize("way", ["chain", "one_each"])
@torch.no_grad()
def test_one_physical_layer_a_step(way: str) -> None:
    """Layer k is causal over its own rows; it is fed the layer before's output, or the target's hidden state."""
    base = decoder("qwen3")
    config = replace(base.config, family=replace(base.config.family, physical_layers=way), head_layers=3)
    torch.manual_seed(0)
    model = Decoder(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    document = random_documents((12,))[0]
    batch = packed([[5, 6, 7], document], padding=2)
    outputs = unrolled_logits(model, batch, 3).outputs
    ids = torch.tensor([document])
    hidden, _ = model(ids, SequenceContext(torch.arange(12)[None]))
    state = hidden
    for k in (1, 2, 3):
        rows = 12 - k
        positions = torch.arange(k - 1, k - 1 + rows)[None]
        given = state if way == "chain" else hidden
        out, recycled = model.head_forward(ids[:, k:], given[:, :rows], SequenceContext(positions), k - 1)
        assert torch.allclose(outputs[k - 1][:, 3 : 3 + rows], out, atol=1e-10)
        state = recycled
    with pytest.raises(NextnError, match="3 layers"):
        require_layers(model, 4)


def test_gradients_stay_inside_documents() -> None:
    """A delta-net layer's row depends on the rows of its own document up to itself, and on no other."""
    model = decoder("qwen3_5", seed=1)
    documents = random_documents((7, 3, 9))
    batch = packed(documents, 2)
    embeddings = model.embed(batch.ids).detach().requires_grad_()
    layer = model.layers[0]
    layout = Layout(batch.documents)
    out, _ = layer(
        embeddings, None, model.rotary(batch.positions, torch.float64), PackedContext(layout, batch.positions)
    )
    (slope,) = torch.autograd.grad(out[0, 8].sum(), embeddings)
    touched = torch.nonzero(slope[0].abs().sum(-1))[:, 0].tolist()
    assert touched == [7, 8]


def test_compiled_attention_may_have_a_graph_for_every_step() -> None:
    """Past the limit dynamo runs flex_attention uncompiled, which makes whole score matrices: target and eight steps,
    with and without a gradient."""
    contexts._compiled_flex()
    assert torch._dynamo.config.recompile_limit >= 2 * (1 + 8)
