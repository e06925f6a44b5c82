"""The kernels of one forward of a Qwen3.5 geometry in order, on random weights and caches: what a round is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import with_triton  # noqa: F401
from benchmarks.geometries import VOCAB, Geometry
from nextn.kernels import attention_triton, delta_triton, norm_triton, rope_triton, tokens_triton
from nextn.kernels.delta import DeltaLog, DeltaWeights
from nextn.kernels.row_plans import RowPlans
from nextn.kernels.rows_triton import gated_product, row_product

BF16 = torch.bfloat16
PAGE = 64


def weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5


@dataclass
class Layer:
    """Weights and caches of one layer; `delta` is None for full attention."""

    products: dict[str, Tensor]
    norms: tuple[Tensor, Tensor]
    delta: DeltaWeights | None
    caches: tuple[Tensor, ...]
    log: DeltaLog | None = None


class Chain:
    """A geometry's layers, `batch` sequences of `context` positions, `rows` new rows each.

    Args:
        parts: programs that share a sequence in attention, or None for its own choice.
        replay: the delta net's state by replay, else by snapshots.
    """

    def __init__(
        self,
        g: Geometry,
        batch: int,
        rows: int,
        context: int,
        plans: RowPlans,
        *,
        parts: int | None = None,
        replay: bool = True,
    ) -> None:
        self.g, self.batch, self.rows, self.context, self.plans = g, batch, rows, context, plans
        self.parts, self.replay = parts, replay
        pages = -(-(context + 16) // PAGE)
        self.slot = torch.randperm(batch, device="cuda")
        self.position = torch.full((batch,), context, device="cuda")
        self.positions = (self.position[:, None] + torch.arange(rows, device="cuda")).contiguous()
        self.table = torch.randperm(batch * pages, device="cuda").view(batch, pages)
        self.pending = torch.full((batch,), rows if replay else 0, device="cuda")
        self.cos, self.sin = (torch.rand(pages * PAGE, g.rotary_half, device="cuda").to(BF16) for _ in range(2))
        self.head_scale = 1 + 0.1 * torch.randn(g.head_dim, device="cuda")
        self.layers = [self._full(pages) if g.is_full(i) else self._delta() for i in range(g.layers)]
        self.final = 1 + 0.1 * torch.randn(g.hidden, device="cuda")
        self.output = weight(VOCAB, g.hidden)
        self.x = torch.randn(batch * rows, g.hidden, dtype=BF16, device="cuda")

    def _common(self, kind: str) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        names = {"in": f"{kind}_in", "out": f"{kind}_out", "gate_up": "gate_up", "down": "down"}
        products = {name: weight(*self.g.products[key]) for name, key in names.items()}
        norms = [1 + 0.1 * torch.randn(self.g.hidden, device="cuda") for _ in range(2)]
        return products, (norms[0], norms[1])

    def _full(self, pages: int) -> Layer:
        shape = (self.batch * pages, PAGE, self.g.kv_heads, self.g.head_dim)
        pools = tuple(torch.randn(shape, dtype=BF16, device="cuda") for _ in range(2))
        return Layer(*self._common("attn"), None, pools)

    def _delta(self) -> Layer:
        g, rows = self.g, self.rows
        channels = 2 * g.key_width + g.value_width
        weights = DeltaWeights(
            torch.randn(channels, 4, dtype=BF16, device="cuda") * 0.5,
            torch.randn(g.v_heads, device="cuda") * 0.3,
            torch.randn(g.v_heads, device="cuda"),
            1 + 0.1 * torch.randn(g.gdn_dim, device="cuda"),
            1e-6, g.k_heads, g.gdn_dim, g.v_heads, g.gdn_dim,
        )  # fmt: skip
        ring = torch.randn(self.batch, 3 + rows, channels, dtype=BF16, device="cuda")
        snapshots = () if self.replay else (rows,)
        states = torch.randn(self.batch, *snapshots, g.v_heads, g.gdn_dim, g.gdn_dim, device="cuda") * 0.1
        log = DeltaLog(
            torch.randn(self.batch, 2 * rows, g.k_heads, g.gdn_dim, device="cuda") * 0.1,
            torch.randn(self.batch, 2 * rows, g.v_heads, g.gdn_dim, device="cuda") * 0.1,
            -torch.rand(self.batch, 2 * rows, g.v_heads, device="cuda"),
        )
        return Layer(*self._common("gdn"), weights, (ring, states), log)

    def weight_bytes(self) -> int:
        own = sum(w.numel() * 2 for layer in self.layers for w in layer.products.values())
        return own + self.output.numel() * 2

    def cache_bytes(self) -> int:
        """States read and written once, K/V read once."""
        g = self.g
        full = sum(g.is_full(i) for i in range(g.layers))
        states = (g.layers - full) * g.v_heads * g.gdn_dim**2 * 4 * 2
        return self.batch * (states + full * self.context * g.kv_heads * g.head_dim * 2 * 2)

    def product(self, x: Tensor, w: Tensor, pdl: bool) -> Tensor:
        plan = self.plans.plan(*w.shape, x.shape[0])
        return row_product(x, w, plan, pdl=pdl)

    def forward(self, pdl: bool = True) -> tuple[Tensor, Tensor]:
        """(ids [batch * rows], hidden after the final norm)."""
        x, residual = self.x, None
        product = partial(self.product, pdl=pdl)
        for layer in self.layers:
            h, residual = norm_triton.add_rms_norm(x, residual, layer.norms[0], 1e-6, dtype=BF16, pdl=pdl)
            mixed = product(h, layer.products["in"])
            x = product(self.mix(layer, mixed, pdl), layer.products["out"])
            h, residual = norm_triton.add_rms_norm(x, residual, layer.norms[1], 1e-6, dtype=BF16, pdl=pdl)
            gate_up = layer.products["gate_up"]
            gated = gated_product(h, gate_up, self.plans.plan(*gate_up.shape, h.shape[0]), pdl=pdl)
            x = product(gated, layer.products["down"])
        h, _ = norm_triton.add_rms_norm(x, residual, self.final, 1e-6, dtype=BF16, pdl=pdl)
        return tokens_triton.argmax(product(h, self.output), pdl=pdl)[0], h

    def mix(self, layer: Layer, mixed: Tensor, pdl: bool) -> Tensor:
        g = self.g
        if layer.delta is None:
            q = rope_triton.qkv_to_pages(
                mixed, g.heads, self.head_scale, self.head_scale, 1e-6, self.cos, self.sin, self.positions, self.table,
                *layer.caches, q_step=2 * g.head_dim, pdl=pdl,
            )  # fmt: skip
            return attention_triton.paged_attention(
                q, *layer.caches, self.table, self.positions, g.head_dim**-0.5, parts=self.parts,
                gate=mixed[..., g.head_dim :], settled=self.position, pdl=pdl,
            )  # fmt: skip
        arguments = (layer.delta, mixed, *layer.caches)
        if self.replay:
            return delta_triton.delta_replay(*arguments, layer.log, self.slot, self.position, self.pending, pdl=pdl)
        return delta_triton.delta_snapshots(*arguments, self.slot, self.position, self.pending, pdl=pdl)
