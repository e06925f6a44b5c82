"""The contexts of a training step: the trunk's forward under autocast, and the head's several draft steps at once.

Chain t drafts from position t: step k stands at position t + k - 1, takes the embedding of token t + k and the
target's hidden state of position t (k = 1) or what the step before handed on, sees the first steps of all chains up
to t and its own later ones, and predicts token t + k + 1. Decoding does the same one chain at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nextn.kernels import gdn
from nextn.kernels.rope import Rope, qk_norm_rope
from nextn.models.context import DeltaInput, QKNorm, SequenceContext
from nextn.models.decoder import Decoder


class TrunkContext(SequenceContext):
    """Whole sequences; the delta net runs in float32 under autocast, its convolution as a sum of shifted rows.

    On a GPU that sum's gradient is much cheaper than that of a depthwise convolution over few channels.
    """

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        rows, kernel = x.mixed.shape[1], x.conv.shape[1]
        with torch.autocast(x.mixed.device.type, enabled=False):
            window = F.pad(x.mixed.float(), (0, 0, kernel - 1, 0))
            mixed = sum(
                (window[:, i : i + rows] * x.conv[:, i] for i in range(1, kernel)), window[:, :rows] * x.conv[:, 0]
            )
            q, k, v = x.split(F.silu(mixed))
            g, beta = gdn.decay_and_strength(x.a.float(), x.b.float(), x.a_log, x.dt_bias)
            return gdn.gdn_chunk(q, k, v, g, beta, None)[0]


class ChainContext:
    """Draft step after draft step of all chains at once; keys and values of earlier steps are kept.

    Args:
        chains: their number; chain t starts at position t.
        batch: sequences.
    """

    def __init__(self, batch: int, chains: int, device: torch.device) -> None:
        self.starts = torch.arange(chains, device=device).expand(batch, -1)
        self.kept: list[tuple[Tensor, Tensor]] = []

    @property
    def positions(self) -> Tensor:
        return self.starts + len(self.kept)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: QKNorm, rope: Rope) -> Tensor:
        """One draft step: q, k, v [batch, chains, heads or kv_heads, head_dim] -> shape of q."""
        q, k = qk_norm_rope(q, k, norms.q, norms.k, norms.eps, rope)
        self.kept.append((k, v))
        chains, group = q.shape[1], q.shape[2] // k.shape[2]
        keys, values = (
            torch.cat(x, 1).repeat_interleave(group, 2).transpose(1, 2) for x in zip(*self.kept, strict=True)
        )
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2).to(values.dtype), keys.to(values.dtype), values, self.seen(chains, q.device)
        )
        return out.transpose(1, 2)

    def delta(self, layer: int, x: DeltaInput) -> Tensor:
        raise AssertionError("the head has no delta net")

    def seen(self, chains: int, device: torch.device) -> Tensor:
        """[chains, steps * chains] bool: first steps of chains up to one's own, then one's own later steps."""
        first = torch.ones(chains, chains, dtype=torch.bool, device=device).tril()
        own = torch.eye(chains, dtype=torch.bool, device=device)
        return torch.cat([first] + [own] * (len(self.kept) - 1), 1)


def unroll(model: Decoder, ids: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
    """Draft logits of every chain.

    Args:
        ids: [batch, tokens].
        hidden: [batch, tokens, hidden], what the head is given of the target.
        steps: K.
    Returns:
        K tensors [batch, tokens - K, vocab]; entry k - 1 at t predicts token t + k + 1.
    """
    batch, tokens = ids.shape
    chains = tokens - steps
    context = ChainContext(batch, chains, ids.device)
    state = hidden[:, :chains]
    drafts = []
    for k in range(1, steps + 1):
        out, state = model.head_forward(ids[:, k : k + chains], state, context)
        drafts.append(model.logits(out))
    return drafts
