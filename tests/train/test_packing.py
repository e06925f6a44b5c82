"""Packed rows hold every document once, whole, and tell where each begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nextn.train.packing import PADDING, Document, bins, pack


@given(room=st.integers(1, 40), data=st.data())
def test_bins_hold_every_item_once_and_no_two_could_be_one(room: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, room), max_size=40))
    groups = bins(lengths, room)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in g) for g in groups]
    assert all(size <= room for size in sizes)
    assert all(a + b > room for n, a in enumerate(sizes) for b in sizes[:n])


documents = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=9).map(
        lambda tokens: Document([i for i, _ in tokens], [m for _, m in tokens], f"d{len(tokens)}")
    ),
    min_size=1,
    max_size=6,
)


@given(documents=documents, padding=st.integers(0, 5))
def test_a_packed_row_can_be_taken_apart(documents: list[Document], padding: int) -> None:
    used = sum(len(d.ids) for d in documents)
    batch = pack(documents, used + padding)
    numbers = batch.documents[0].tolist()
    assert numbers[used:] == [PADDING] * padding
    assert numbers[:used] == sorted(numbers[:used])
    assert not batch.loss_mask[0, used:].any()
    for n, document in enumerate(documents):
        at = [i for i, number in enumerate(numbers) if number == n]
        assert batch.ids[0, at].tolist() == list(document.ids)
        assert batch.loss_mask[0, at].tolist() == list(document.loss_mask)
        assert batch.positions[0, at].tolist() == list(range(len(document.ids)))
    assert batch.domains == tuple(d.domain for d in documents)
    assert pack(documents).ids.tolist() == batch.ids[:, :used].tolist()


def test_the_first_two_tokens_of_a_document_cannot_be_predicted() -> None:
    assert Document([1, 2], [True, True]).predictable() == 0
    assert Document([1, 2, 3, 4], [True, True, False, True]).predictable() == 1
