"""Read tensors of a remote file in blocks: neighbours in a file come with one request, far parts are never read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from nextn.errors import NextnError

BLOCK_BYTES = 16 << 20
KEPT_BLOCKS = 8


class BlockReader:
    """Bytes of one remote file between two offsets, fetched a block at a time and kept while there is room.

    Args:
        read: (file, start, length) -> bytes.
        name: the file.
        start, end: nothing outside is asked for.
    """

    def __init__(self, read: Callable[[str, int, int], bytes], name: str, start: int, end: int) -> None:
        self.read, self.name, self.start, self.end = read, name, start, end
        self.blocks: OrderedDict[int, bytes] = OrderedDict()

    def __call__(self, at: int, nbytes: int) -> bytes:
        """Raises NextnError where the file is gone or shorter than it was."""
        out = bytearray()
        while len(out) < nbytes:
            where = at + len(out) - self.start
            block = self._block(where // BLOCK_BYTES)
            out += block[where % BLOCK_BYTES :][: nbytes - len(out)]
        return bytes(out)

    def _block(self, number: int) -> bytes:
        if number in self.blocks:
            self.blocks.move_to_end(number)
            return self.blocks[number]
        first = self.start + number * BLOCK_BYTES
        length = min(BLOCK_BYTES, self.end - first)
        from nextn.checkpoint.hub import AbsentError

        try:
            raw = self.read(self.name, first, length)
        except AbsentError:
            raw = b""
        if len(raw) != length:
            raise NextnError(f"{self.name} changed on the hub while it was read.", "Repeat; name a commit to be safe.")
        self.blocks[number] = raw
        if len(self.blocks) > KEPT_BLOCKS:
            self.blocks.popitem(last=False)
        return raw
