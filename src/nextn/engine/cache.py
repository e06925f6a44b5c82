"""Storage that a decode keeps: target keys and values, draft keys and values, recurrent states. Fixed once made.

Target and draft have separate pools under one map from positions to slots. Delta-net layers keep, for each
sequence, the convolution's inputs in a ring by position, and either the state after each row of the last forward, or
one state and a log of the rows since (`kernels.delta`: snapshots, replay). `committed`, the rows of the last forward
that were kept, says which snapshot or how many logged rows the next forward starts from, so that accepting some draft
tokens copies nothing.
"""

from __future__ import annotations

import torch

from nextn.errors import NextnError
from nextn.kernels.delta import DeltaLog
from nextn.models.config import DecoderConfig


class Cache:
    """All pools of one engine.

    Args:
        config: the decoder.
        pages: pages of keys and values, shared by all sequences.
        page_size: positions a page.
        sequences: how many sequences can be held at once (recurrent layers).
        rows: most rows of a decoding forward, K + 1.
        dtype, device: of keys and values; states are in at least float32.
        replay: keep one recurrent state a sequence and a log, not a state a row: 1 / rows of the memory.

    Attributes:
        k, v: [full layers, pages, page_size, kv_heads, head_dim] of the target.
        draft_k, draft_v: the same with the head's layers first.
        states: [linear layers, sequences, rows, v_heads, k_dim, v_dim]; in replay without the dimension of rows.
        logs: one for each linear layer, of 2 * rows positions; empty without replay.
        offsets: 0 .. rows - 1, for the positions of a forward's rows.
        conv: [linear layers, sequences, kernel - 1 + rows, channels]; position p lies in column p % columns.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        pages: int,
        page_size: int,
        sequences: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        replay: bool = False,
    ) -> None:
        self.replay = replay
        self.page_size, self.rows, self.kernel = page_size, rows, max(config.conv, 1)
        self.table_width = -(-(config.max_positions + 3 * rows) // page_size)
        self.dtype, self.device = dtype, device
        c = config
        page = (pages, page_size, c.kv_heads, c.head_dim)
        high = torch.float64 if dtype == torch.float64 else torch.float32
        self.k, self.v = (torch.zeros(c.full_layers, *page, dtype=dtype, device=device) for _ in range(2))
        self.draft_k, self.draft_v = (torch.zeros(c.head_layers, *page, dtype=dtype, device=device) for _ in range(2))
        channels = 2 * c.gdn_k_heads * c.gdn_k_dim + c.gdn_v_heads * c.gdn_v_dim
        shape = (*(() if replay else (rows,)), c.gdn_v_heads, c.gdn_k_dim, c.gdn_v_dim)
        self.states = torch.zeros(c.linear_layers, sequences, *shape, dtype=high, device=device)
        self.logs: list[DeltaLog] = []
        if replay:
            widths = ((c.gdn_k_heads, c.gdn_k_dim), (c.gdn_v_heads, c.gdn_v_dim), (c.gdn_v_heads,))
            for _ in range(c.linear_layers):
                k, u, g = (torch.zeros(sequences, 2 * rows, *w, dtype=high, device=device) for w in widths)
                self.logs.append(DeltaLog(k, u, g))
        self.columns = self.kernel - 1 + rows
        self.conv = torch.zeros(c.linear_layers, sequences, self.columns, channels, dtype=dtype, device=device)
        self.offsets = torch.arange(rows, device=device)
        self.free_pages = list(range(pages - 1, -1, -1))
        self.free_slots = list(range(sequences - 1, -1, -1))

    def take(self, positions: int) -> tuple[list[int], int]:
        """Reserve pages for so many positions, and a sequence slot.

        Returns:
            (page ids in order of position, slot).
        Raises:
            NextnError: not enough room.
        """
        count, pages = self.pages_for(positions), list[int]()
        if not self.free_slots or not self.extend(pages, positions):
            raise NextnError(
                f"The cache has {len(self.free_pages)} free pages and {len(self.free_slots)} free sequences; "
                f"this prompt needs {count} pages.",
                "Lower max_tokens or the number of prompts at once.",
            )
        return pages, self.take_slot()

    def pages_for(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.page_size)

    def extend(self, pages: list[int], positions: int) -> bool:
        """Lengthen a sequence's pages, in place, to hold so many positions; False where too few are free.

        Pages are handed out cleared: attention multiplies what lies behind a sequence's end with zero, and zero times
        a NaN of an earlier owner would not be zero.
        """
        count = self.pages_for(positions) - len(pages)
        if count > len(self.free_pages):
            return False
        if count > 0:
            new = [self.free_pages.pop() for _ in range(count)]
            at = torch.tensor(new, device=self.device)
            for pool in (self.k, self.v, self.draft_k, self.draft_v):
                pool.index_fill_(1, at, 0)
            pages += new
        return True

    def take_slot(self) -> int:
        """A sequence slot with zeroed state."""
        slot = self.free_slots.pop()
        (self.states[:, slot] if self.replay else self.states[:, slot, 0]).zero_()
        return slot

    def give_back(self, pages: list[int], slot: int) -> None:
        """Return pages and slot; work launched before may still touch them, work launched later finds them free."""
        self.free_pages.extend(reversed(pages))
        self.free_slots.append(slot)

    @property
    def nbytes(self) -> int:
        pools = [self.k, self.v, self.draft_k, self.draft_v, self.states, self.conv]
        pools += [t for log in self.logs for t in (log.k, log.u, log.g)]
        return sum(p.numel() * p.element_size() for p in pools)
