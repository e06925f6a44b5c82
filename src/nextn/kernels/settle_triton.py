"""The Triton kernel of `engine.sampling.settle`: what follows from a round's acceptance, one program a sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _settle(
    lengths: tl.tensor,
    tokens: tl.tensor,
    accepted: tl.tensor,
    drafts: tl.tensor,
    broken: tl.tensor,
    kept: tl.tensor,
    longer: tl.tensor,
    bonus: tl.tensor,
    outcome: tl.tensor,
    draft_row: tl.tensor,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0)
    own = tokens + batch * (STEPS + 1)
    count = tl.load(accepted + batch)
    tl.store(kept + batch, count + 1)
    tl.store(longer + batch, tl.load(lengths + batch) + count + 1)
    tl.store(bonus + batch, tl.load(own + count))
    i = tl.arange(0, PADDED)
    is_draft = (i > STEPS + 1) & (i < 2 * STEPS + 2)
    value = tl.load(own + i, mask=i <= STEPS, other=0)
    value += tl.load(drafts + batch * draft_row + i - (STEPS + 2), mask=is_draft, other=0)
    value = tl.where(i == STEPS + 1, count, value)
    value = tl.where(i == 2 * STEPS + 2, tl.load(broken + batch).to(tl.int64), value)
    tl.store(outcome + batch * (2 * STEPS + 3) + i, value, mask=i < 2 * STEPS + 3)


def settle(
    lengths: Tensor, tokens: Tensor, accepted: Tensor, drafts: Tensor, broken: Tensor, *, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sampling.settle` for contiguous tokens and drafts contiguous along K: (kept, lengths, bonus, outcome)."""
    batch, steps = drafts.shape
    kept, longer, bonus = (torch.empty_like(lengths) for _ in range(3))
    outcome = torch.empty(batch, 2 * steps + 3, dtype=torch.int64, device=tokens.device)
    _settle[(batch,)](
        lengths,
        tokens,
        accepted,
        drafts,
        broken,
        kept,
        longer,
        bonus,
        outcome,
        drafts.stride(0),
        STEPS=steps,
        PADDED=triton.next_power_of_2(2 * steps + 3),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return kept, longer, bonus, outcome
