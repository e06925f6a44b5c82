"""Run the rows of a round with the fused kernels, over the same parameters as the modules.

A decoder layer becomes eight to ten kernels: add and norm, input product, mixer (delta step, its norm and gate; or
q/k/v into pages, attention, combine), output product, add and norm, gate/up product, activation (inside that product
where its plan can), down product.
Products with few rows may leave partial sums, which the kernel that follows adds up. With dependent launch each kernel
is started while the one before it finishes. A prefill's many rows take the library's products and attention and the
chunked recurrence between the same small kernels. What the kernels do not cover runs the modules.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from nextn.engine.cache import Cache
from nextn.engine.contexts import Rows, keep_inputs, prefill_delta
from nextn.engine.draft_vocab import DraftVocab
from nextn.engine.runner import PlainRunner
from nextn.engine.sampling import ACCEPT, DRAW, LANES, SamplingState, Settled, accept_greedy, adjust
from nextn.kernels import (
    activation_triton,
    attention,
    attention_triton,
    delta_inputs_triton,
    delta_triton,
    norm_triton,
    probs_triton,
    random_triton,
    rope_triton,
    settle_triton,
    tokens_triton,
)
from nextn.kernels.delta import DeltaWeights
from nextn.kernels.row_plans import RowPlan, RowPlans, measured_plans
from nextn.kernels.rows_triton import gated_product, row_product
from nextn.models.blocks import MLP, Attention, GatedDeltaNet, RMSNorm
from nextn.models.decoder import Decoder, DecoderLayer, Drafter
from nextn.models.mtp import Fusion

MAX_ROWS = 9
"""Rows a sequence that the kernels take: the bonus token and 8 drafts."""
EXACT_PARTS = 16
"""Programs that share a sequence's keys in exact decoding."""


def power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


class FusedRunner(PlainRunner):
    """`Runner` over fused kernels.

    Args:
        target, draft: the models; dense layers only (`supports`).
        cache: whose page size and capacity fix the launch shapes.
        plans: how to multiply a few rows with each weight; by default what was measured on an H200, and on another
            kind of GPU the library.
        dependent: start each kernel while the one before it finishes (compute capability 9.0 and above).
        longest: most positions a sequence can have; decides how many programs share a sequence's keys.
        vocab: the ids to draft from, None for all.
        exact: give a row the same bits whatever rows and sequences stand beside it: one kernel a product, one split of
            the keys, rows padded alike.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Drafter,
        cache: Cache,
        *,
        longest: int,
        plans: RowPlans | None = None,
        dependent: bool | None = None,
        vocab: DraftVocab | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__(target, draft, vocab)
        device = cache.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self.cache = cache
        self.dependent = dependent if dependent is not None else capability >= (9, 0)
        self.plans = plans if plans is not None else measured_plans(capability)
        self.dtype = target.embed.weight.dtype
        positions = torch.arange(target.config.max_positions + 4 * MAX_ROWS, device=device)[None]
        cos, sin = target.rotary(positions, self.dtype)
        self.cos, self.sin = cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()
        self.longest, self.exact = longest, exact
        self.pad_rows = MAX_ROWS if exact else 1
        self.deltas = {
            layer.gdn.layer: _delta_weights(layer.gdn)
            for layer in target.layers
            if isinstance(layer.gdn, GatedDeltaNet)
        }

    @staticmethod
    def supports(target: Decoder, draft: Drafter) -> bool:
        """Whether the kernels cover a model: dense MLPs, head dims that are powers of two, biases on q, k, v only
        where no gate shares their product."""
        c = target.config
        return (
            not any(c.sparse_layers)
            and not (draft.mtp is not None and c.head_sparse)
            and power_of_two(c.head_dim)
            and (not c.linear_layers or (power_of_two(c.gdn_k_dim) and power_of_two(c.gdn_v_dim)))
            and not c.o_bias
            and not (c.qkv_bias and c.q_gate == 2)
            and c.family.fuse == "concat"
        )

    def target_rows(self, ids: Tensor, where: Rows) -> tuple[Tensor, Tensor]:
        if not where.prefill and ids.shape[1] > MAX_ROWS:
            return super().target_rows(ids, where)
        pdl = self.dependent and not where.prefill
        x: Tensor = self.target.embed.weight
        residual: Tensor | None = None
        flat: Tensor | None = ids.reshape(-1).contiguous()
        for layer in self.target.layers:
            assert isinstance(layer, DecoderLayer)
            x, residual = self._layer(layer, x, residual, where, self.cache.k, self.cache.v, ids=flat)
            flat = None
        norm = self.target.norm
        post, pre = norm_triton.add_rms_norm(x, residual, norm.scale, norm.eps, dtype=self.dtype, pdl=pdl)
        return post.view(*ids.shape, -1), pre.view(*ids.shape, -1)

    def head_rows(self, ids: Tensor, hidden: Tensor, where: Rows, step: int = 0) -> tuple[Tensor, Tensor]:
        head = self.draft.mtp
        assert head is not None
        if (not where.prefill and ids.shape[1] > MAX_ROWS) or head.zero_embed_at_start:
            return super().head_rows(ids, hidden, where, step)
        pdl = self.dependent and not where.prefill
        at = 0 if head.reuse else min(step, len(head.blocks) - 1)
        own = min(at, len(head.fusions) - 1)
        fusion, block, norm = head.fusions[own], head.blocks[at], head.out_norms[own]
        assert isinstance(fusion, Fusion)
        assert isinstance(block, DecoderLayer)
        assert isinstance(norm, RMSNorm)
        width = hidden.shape[-1]
        both = torch.empty(ids.numel(), 2 * width, dtype=self.dtype, device=ids.device)
        halves = both[:, :width], both[:, width:]
        embed, state = fusion.embed_norm, fusion.hidden_norm
        norm_triton.rms_norm_pair(
            self.draft.embed.weight, ids.reshape(-1).contiguous(), embed.scale, embed.eps,
            hidden.reshape(-1, width), state.scale, state.eps,
            out=halves if fusion.embed_first else halves[::-1], pdl=pdl,
        )  # fmt: skip
        x = self._product(both, fusion.fuse.weight, ids.shape[0], where)
        x, residual = self._layer(block, x, None, where, self.cache.draft_k, self.cache.draft_v)
        out, stream = norm_triton.add_rms_norm(x, residual, norm.scale, norm.eps, dtype=self.dtype, pdl=pdl)
        out = out.view(*ids.shape, -1)
        return out, out if head.recycle_post else stream.view(*ids.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden, self.target.output_weight)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        if self.vocab is None:
            return self._logits(hidden, self.draft.output_weight)
        return self.vocab.widen(self._logits(hidden, self.vocab.weight))

    def best(self, logits: Tensor) -> Tensor:
        ids, _ = tokens_triton.argmax(logits.view(-1, logits.shape[-1]), pdl=self.dependent)
        return ids.view(logits.shape[:-1])

    def accept_best(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tokens_triton.accept_best(logits, drafts, pdl=self.dependent)

    def process(self, logits: Tensor, state: SamplingState, drafts: Tensor, first_row: int = 0) -> Tensor:
        plan = state.plan
        return probs_triton.process(
            adjust(logits, state, drafts, first_row).contiguous(),
            state.temperature.view(-1),
            state.top_k.view(-1) if plan.top_k else None,
            state.top_p.view(-1) if plan.top_p else None,
            state.min_p.view(-1),
            state.greedy.view(-1),
            pdl=self.dependent,
        )

    def uniforms(self, seed: Tensor, position: Tensor) -> Tensor:
        return random_triton.uniforms(seed, position, LANES, pdl=self.dependent)

    def sample(self, probs: Tensor, draws: Tensor) -> Tensor:
        flat = tokens_triton.sample(probs.view(-1, probs.shape[-1]), draws.reshape(-1), pdl=self.dependent)
        return flat.view(draws.shape)

    def accept(self, probs: Tensor, drafts: Tensor, draft_probs: Tensor | None, draws: Tensor) -> tuple[Tensor, Tensor]:
        if draft_probs is None or not drafts.shape[1]:
            return accept_greedy(self.sample(probs, draws[..., DRAW]), drafts)
        drafts, draft_probs = drafts.contiguous(), draft_probs.contiguous()
        return tokens_triton.accept(
            probs, drafts, draft_probs, draws[..., ACCEPT], draws[..., DRAW], pdl=self.dependent
        )

    def settle(self, lengths: Tensor, tokens: Tensor, accepted: Tensor, drafts: Tensor, broken: Tensor) -> Settled:
        return Settled(*settle_triton.settle(lengths, tokens, accepted, drafts, broken, pdl=self.dependent))

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        out = self._product(hidden.reshape(-1, hidden.shape[-1]), weight, hidden.shape[0])
        if out.dim() == 3:
            out = out.sum(0).to(self.dtype)
        return out.view(*hidden.shape[:-1], -1)

    def _product(self, x: Tensor, weight: Tensor, batch: int, where: Rows | None = None) -> Tensor:
        """x [rows, in] of `batch` sequences times weight [out, in]: [rows, out], or partial sums [splits, rows, out].

        The plan is that of the batch padded to a power of two, as graphs pad it, so that an eager round multiplies by
        the same kernels.
        """
        if where is not None and where.prefill:
            return F.linear(x, weight)
        plan = self._plan(x, weight, batch)
        return row_product(x, weight, plan, pdl=self.dependent and plan.kind != "library")

    def _plan(self, x: Tensor, weight: Tensor, batch: int) -> RowPlan:
        n, k = weight.shape
        rows = triton.next_power_of_2(batch) * (x.shape[0] // batch)
        return self.plans.fixed(n, k) if self.exact else self.plans.plan(n, k, rows)

    def _layer(
        self,
        layer: DecoderLayer,
        x: Tensor,
        residual: Tensor | None,
        where: Rows,
        k_pools: Tensor,
        v_pools: Tensor,
        *,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward` on flat rows; x may be partial sums, or with `ids` an embedding to look up."""
        pdl, batch = self.dependent and not where.prefill, where.positions.shape[0]
        norm = layer.input_norm
        h, residual = norm_triton.add_rms_norm(x, residual, norm.scale, norm.eps, dtype=self.dtype, ids=ids, pdl=pdl)
        if isinstance(layer.gdn, GatedDeltaNet):
            inputs = self._product(h, layer.gdn.inputs.weight, batch, where)
            mixed, out = self._delta(layer.gdn, inputs, where), layer.gdn.out
        else:
            assert isinstance(layer.attn, Attention)
            attn = layer.attn
            mixed = self._attend(
                attn, self._product(h, attn.qkv.weight, batch, where), where, k_pools[attn.layer], v_pools[attn.layer]
            )
            out = attn.o
        norm = layer.post_norm
        h, residual = norm_triton.add_rms_norm(
            self._product(mixed, out.weight, batch, where), residual, norm.scale, norm.eps, dtype=self.dtype, pdl=pdl
        )
        assert isinstance(layer.mlp, MLP)
        weight = layer.mlp.gate_up.weight
        if where.prefill:
            gated = activation_triton.silu_mul(F.linear(h, weight), dtype=self.dtype)
        else:
            gated = gated_product(h, weight, self._plan(h, weight, batch), pdl=pdl)
        return self._product(gated, layer.mlp.down.weight, batch, where), residual

    def _delta(self, net: GatedDeltaNet, x: Tensor, where: Rows) -> Tensor:
        cache, layer = self.cache, net.layer
        weights = self.deltas[layer]
        if where.prefill:
            inputs = delta_inputs_triton.delta_inputs(weights, x, cache.conv[layer], where.slots, where.first)
            keep_inputs(where, layer, x.view(*where.positions.shape, -1)[..., : net.conv.shape[0]])
            raw = prefill_delta(where, cache.states[layer], *inputs).reshape(x.shape[0], -1)
            return delta_triton.norm_gate(weights, raw, x, dtype=self.dtype)
        pools = weights, x, cache.conv[layer], cache.states[layer]
        if cache.replay:
            return delta_triton.delta_replay(
                *pools,
                cache.logs[layer],
                where.slots,
                where.first,
                where.committed,
                pad_rows=self.pad_rows,
                pdl=self.dependent,
            )
        return delta_triton.delta_snapshots(
            *pools, where.slots, where.first, where.select, pad_rows=self.pad_rows, pdl=self.dependent
        )

    def _attend(self, attn: Attention, x: Tensor, where: Rows, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        dim = attn.head_dim
        q_scale = attn.q_norm.scale if attn.q_norm is not None else None
        k_scale = attn.k_norm.scale if attn.k_norm is not None else None
        q = rope_triton.qkv_to_pages(
            x,
            attn.heads,
            q_scale,
            k_scale,
            attn.eps,
            self.cos,
            self.sin,
            where.positions,
            where.table,
            k_pool,
            v_pool,
            q_step=2 * dim if attn.gated else None,
            bias=attn.qkv.bias,
            pdl=self.dependent and not where.prefill,
        )
        gate = x[..., dim:] if attn.gated else None
        if where.starts is not None:
            heads = q.view(*where.positions.shape, attn.heads, dim)
            out = attention.prefill_attention(heads, k_pool, v_pool, where.table, where.starts, dim**-0.5)
            out = out.view(x.shape[0], -1)
            return out if gate is None else activation_triton.sigmoid_mul(out, gate, dim)
        return attention_triton.paged_attention(
            q,
            k_pool,
            v_pool,
            where.table,
            where.positions,
            dim**-0.5,
            parts=EXACT_PARTS if self.exact else None,
            longest=self.longest,
            pad_rows=self.pad_rows,
            gate=gate,
            settled=where.settled,
            pdl=self.dependent,
        )


def _delta_weights(net: GatedDeltaNet) -> DeltaWeights:
    return DeltaWeights(
        net.conv, net.a_log, net.dt_bias, net.norm.scale, net.norm.eps, net.k_heads, net.k_dim, net.v_heads, net.v_dim
    )
