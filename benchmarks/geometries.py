"""Shapes of the Qwen3.5 models that kernels are tuned and measured for (text part of their config.json)."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB = 248320


@dataclass(frozen=True)
class Geometry:
    """A dense Qwen3.5: three delta-net layers, then one of full attention, and so on."""

    name: str
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    v_heads: int
    k_heads: int = 16
    gdn_dim: int = 128
    head_dim: int = 256
    rotary_half: int = 32

    @property
    def key_width(self) -> int:
        return self.k_heads * self.gdn_dim

    @property
    def value_width(self) -> int:
        return self.v_heads * self.gdn_dim

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Name of each matrix product -> (outputs, inputs)."""
        return {
            "gdn_in": (2 * self.key_width + 2 * self.value_width + 2 * self.v_heads, self.hidden),
            "gdn_out": (self.hidden, self.value_width),
            "attn_in": ((2 * self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "attn_out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inter, self.hidden),
            "down": (self.hidden, self.inter),
            "logits": (VOCAB, self.hidden),
            "fuse": (self.hidden, 2 * self.hidden),
        }

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % 4 == 0


GEOMETRIES = {
    "0.8b": Geometry("0.8b", hidden=1024, inter=3584, layers=24, heads=8, kv_heads=2, v_heads=16),
    "4b": Geometry("4b", hidden=2560, inter=9216, layers=32, heads=16, kv_heads=4, v_heads=32),
    "9b": Geometry("9b", hidden=4096, inter=12288, layers=32, heads=16, kv_heads=4, v_heads=32),
}
