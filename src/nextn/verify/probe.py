"""The probe: does the head predict what its target would say, and does it do so only when it is wired right?

Teacher-forced acceptance by position on a text, once as the family says and once with each of several deliberate
mistakes. A head that was loaded whole but wired wrong shows here and nowhere else: one of the mistakes does better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nextn.errors import NextnError
from nextn.models.decoder import Decoder
from nextn.models.mtp import Fusion
from nextn.train.acceptance import Counts
from nextn.train.contexts import PackedContext, UnrollContext
from nextn.train.evaluate import evaluate
from nextn.train.layout import Layout
from nextn.train.packing import Document, PackedBatch, pack
from nextn.train.unroll import Unrolled, head_unroll, valid_rows

WEAK = 0.3
"""Acceptance of the first draft below which a head is called weak: reports on trained ones range from 0.6 to 0.97."""
Judgement = Literal["worse", "same", "better"]
DOCUMENT_TOKENS = 512
DEVIATIONS = 3.0
"""How many standard deviations apart two shares must be to call one better."""


@dataclass(frozen=True)
class Control:
    """Acceptance with one thing wrong, and how it stands to the head as it should be."""

    name: str
    mistake: str
    counts: Counts
    judgement: Judgement


@dataclass(frozen=True)
class Probe:
    """Acceptance of the head and of its controls on one text.

    Attributes:
        tokens: of text judged; rounds: places where K drafts could be judged.
        draft_vocab: how many ids the head drafts; None: all.
        suspects: controls that the head does not beat, as it should.
        warnings: what does not fail a head and is not as one would expect of a trained one.
    """

    tokens: int
    draft_tokens: int
    draft_vocab: int | None
    head: Counts
    controls: tuple[Control, ...]

    @property
    def suspects(self) -> tuple[Control, ...]:
        return tuple(c for c in self.controls if c.judgement == "better" or (c.judgement == "same" and _must(c.name)))

    @property
    def passed(self) -> bool:
        return not self.suspects

    @property
    def warnings(self) -> tuple[str, ...]:
        first = self.head.acceptance[0]
        if first >= WEAK:
            return ()
        return (f"only {first:.0%} of first drafts are accepted; trained heads reach far more on text of their kind",)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "tokens": self.tokens,
            "draft_tokens": self.draft_tokens,
            "draft_vocab": self.draft_vocab,
            "head": self.head.as_json(),
            "controls": [
                {"name": c.name, "mistake": c.mistake, "judgement": c.judgement, **c.counts.as_json()}
                for c in self.controls
            ],
            "suspects": [c.name for c in self.suspects],
            "warnings": list(self.warnings),
        }


def _must(name: str) -> bool:
    """Whether the head must beat a control clearly.

    The two sides of the final norm may lie close together, and so may the two norms before the fusion; there, only a
    control that does better shows a mistake.
    """
    return name not in ("other_norm", "norms_swapped")


def documents(ids: Sequence[int]) -> list[PackedBatch]:
    """A text cut into documents that are judged by themselves.

    Raises:
        NextnError: too few tokens to say anything.
    """
    if len(ids) < 32:
        raise NextnError(f"The probe's text has {len(ids)} tokens.", "Give a longer one; some thousands are good.")
    cuts = [ids[at : at + DOCUMENT_TOKENS] for at in range(0, len(ids), DOCUMENT_TOKENS)]
    return [pack([Document(cut, [True] * len(cut))]) for cut in cuts if len(cut) >= 16]


def probe(model: Decoder, ids: Sequence[int], draft_tokens: int, draft_ids: Sequence[int] | None = None) -> Probe:
    """Judge a head and its controls on a text.

    Args:
        model: target and head; its head is left as it was.
        draft_tokens: K.
        draft_ids: that the head drafts, ascending; None: all.
    Raises:
        NextnError: the text is too short, or the family has fewer layers than K.
    """
    batches = [batch.to(model.embed.weight.device) for batch in documents(ids)]
    listed = torch.tensor(draft_ids, device=model.embed.weight.device) if draft_ids is not None else None
    states = {id(batch.ids): target_states_of(model, batch) for batch in batches}

    def judge(mistake: str = "") -> tuple[int, Counts]:
        def unroll(model: Decoder, batch: PackedBatch, steps: int) -> Unrolled:
            return unrolled(model, batch, steps, states[id(batch.ids)], mistake)

        found = evaluate(model, batches, draft_tokens=draft_tokens, draft_ids=listed, unroll=unroll)
        return found.tokens, found.greedy.total

    tokens, healthy = judge()
    controls = []
    for name, text in mistakes(model).items():
        with made(model, name):
            counts = judge(name)[1]
        controls.append(Control(name, text, counts, compare(counts, healthy)))
    count = len(draft_ids) if draft_ids is not None else None
    return Probe(tokens, draft_tokens, count, healthy, tuple(controls))


def mistakes(model: Decoder) -> dict[str, str]:
    """The controls of a family: name -> what is wrong."""
    right, wrong = ("after", "before") if model.config.family.target_hidden == "post_norm" else ("before", "after")
    out = {"swapped": "embedding and hidden state change places in the fusion"}
    if model.config.family.fuse != "concat":
        out = {}
    return out | {
        "other_norm": f"the target's hidden state is taken {wrong} its final norm instead of {right} it",
        "shifted": "the head is held to the target's choice one token further on",
        "random": "the head's matrices are random, each of its own spread",
        "no_embedding": "the token's embedding is blanked before the fusion",
        "no_hidden": "the target's hidden state is blanked before the fusion",
        "no_attention": "the head's attention adds nothing",
        "norms_swapped": "the norms of embedding and hidden state change places",
    }


def compare(control: Counts, healthy: Counts) -> Judgement:
    """How the acceptance of the first draft stands, by a two-proportion z of `DEVIATIONS`."""
    a, b = control.kept[0], healthy.kept[0]
    n, m = control.rounds, healthy.rounds
    pooled = (a + b) / (n + m)
    spread = (pooled * (1 - pooled) * (1 / n + 1 / m)) ** 0.5
    apart = a / n - b / m
    if abs(apart) <= DEVIATIONS * spread:
        return "same"
    return "better" if apart > 0 else "worse"


@contextmanager
def made(model: Decoder, mistake: str) -> Iterator[None]:
    """A mistake made in the head's modules, and undone."""
    if mistake == "swapped":
        with swapped(model):
            yield
    elif mistake == "random":
        with randomised(model):
            yield
    elif mistake in ("no_embedding", "no_hidden", "no_attention"):
        with silenced(model, mistake):
            yield
    elif mistake == "norms_swapped":
        with norms_swapped(model):
            yield
    else:
        yield


@contextmanager
def swapped(model: Decoder) -> Iterator[None]:
    """The fusion with its inputs in the other order."""
    assert model.mtp is not None
    fusions = [f for f in model.mtp.fusions if isinstance(f, Fusion)]
    for fusion in fusions:
        fusion.embed_first = not fusion.embed_first
    try:
        yield
    finally:
        for fusion in fusions:
            fusion.embed_first = not fusion.embed_first


@contextmanager
def silenced(model: Decoder, mistake: str) -> Iterator[None]:
    """One input of the fusion, or the attention's output, set to zero."""
    assert model.mtp is not None
    if mistake == "no_attention":
        silent = [
            mixer for b in model.mtp.blocks for name in ("attn", "gdn") if (mixer := getattr(b, name)) is not None
        ]
    else:
        norm = "embed_norm" if mistake == "no_embedding" else "hidden_norm"
        silent = [fusion.get_submodule(norm) for fusion in model.mtp.fusions]

    def zero(module: nn.Module, given: object, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    hooks = [module.register_forward_hook(zero) for module in silent]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def norms_swapped(model: Decoder) -> Iterator[None]:
    """The two norms before the fusion in each other's place."""
    assert model.mtp is not None
    fusions = [f for f in model.mtp.fusions if isinstance(f, Fusion)]

    def swap() -> None:
        for fusion in fusions:
            fusion.embed_norm, fusion.hidden_norm = fusion.hidden_norm, fusion.embed_norm

    swap()
    try:
        yield
    finally:
        swap()


@contextmanager
def randomised(model: Decoder, seed: int = 0) -> Iterator[None]:
    """The head with random matrices; norms stay."""
    assert model.mtp is not None
    matrices = [p for p in model.mtp.parameters() if p.ndim > 1]
    kept = [p.detach().clone() for p in matrices]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in matrices:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(noise * parameter.float().std().cpu())
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(matrices, kept, strict=True):
                parameter.copy_(value)


States = tuple[Layout, Tensor, Tensor]
"""A batch's layout, and the target's hidden states after and before its final norm, [1, T, hidden]."""


@torch.no_grad()
def target_states_of(model: Decoder, batch: PackedBatch) -> States:
    """One pass of the target over a batch on its device."""
    layout = Layout(batch.documents)
    post, pre = model(batch.ids, PackedContext(layout, batch.positions))
    return layout, post, pre


def unrolled(model: Decoder, batch: PackedBatch, steps: int, states: States, mistake: str) -> Unrolled:
    """The unroll with the target's states at hand, and with one mistake (a name of `mistakes`; "" for none)."""
    layout, post, pre = states
    given = model.head_hidden(pre, post) if mistake == "other_norm" else model.head_hidden(post, pre)
    outputs = head_unroll(model)(model, UnrollContext(layout, batch.positions), batch.ids, given, steps)
    teacher = torch.cat((post[:, 1:], post[:, -1:]), 1) if mistake == "shifted" else post
    return Unrolled(outputs, valid_rows(batch, layout, steps), teacher)
