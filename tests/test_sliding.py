"""Windows and chunks by hand: a row is the number of its token, so what is shown is a list."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from ds4cli.caches.sliding import (
    ChunkedAdapter,
    LinearRows,
    SlackChunkedKVCache,
    SlidingKVCache,
    WindowAdapter,
)
from ds4cli.errors import StateError

SIZE, SLACK, STEP = 5, 6, 4
MOST = SIZE - 1 + SLACK  # rows that are kept when a buffer is full
KINDS = {"window": (SlidingKVCache, WindowAdapter), "chunks": (SlackChunkedKVCache, ChunkedAdapter)}


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Buffers that are soon full."""
    monkeypatch.setattr(LinearRows, "step", STEP)


def rows(tokens, dim=1):
    """(1, 2, n, dim): a row of two heads for each token."""
    return mx.broadcast_to(
        mx.array(tokens, mx.float32)[None, None, :, None], (1, 2, len(tokens), dim)
    )


class Layer:
    """A cache with its adapter, and the text that it read."""

    def __init__(self, kind, slack=SLACK):
        cls, adapter = KINDS[kind]
        self.kind, self.text = kind, []
        self.adapter = adapter(cls(SIZE, slack))
        self.fresh = lambda: adapter(cls(SIZE, slack))

    @property
    def cache(self):
        return self.adapter.cache

    def first_shown(self):
        """The first row that a call behind the text is shown, as in stock; a chunk may lack rows of
        the chunk before, which its mask hides."""
        pos = len(self.text)
        first = max(0, pos - SIZE + 1)
        if self.kind == "window":
            return first
        assert self.cache.start <= pos - pos % SIZE
        return max(first, self.cache.start)

    def feed(self, *tokens):
        first = self.first_shown()
        if self.kind == "chunks":
            self.cache.maybe_trim_front()
        keys, values = self.cache.update_and_fetch(rows(tokens), -rows(tokens, 3))
        self.text += tokens
        assert keys.shape == (1, 2, len(self.text) - first, 1) and values.shape[3] == 3
        assert keys[0, 1, :, 0].tolist() == self.text[first:]
        assert values[0, 0, :, 2].tolist() == [-t for t in self.text[first:]]
        again = self.cache.state
        assert again[0].tolist() == keys.tolist() and again[1].tolist() == values.tolist()

    def back(self, pos):
        self.adapter.seek(pos)
        del self.text[pos:]
        assert self.adapter.pos() == self.cache.offset == pos

    def lowest(self):
        """The first position that all rows are there for, from what the buffer holds."""
        start = self.cache.start
        if self.kind == "window":
            return start + SIZE - 1 if start else 0
        return -(-start // SIZE) * SIZE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_shown_as_stock_shows_them_wherever_the_cursor_was(kind):
    """A row too few or too many, an old text's rows, a buffer that forgot what slack is for."""
    dice = random.Random(kind)
    layer, token = Layer(kind), iter(range(1, 10_000))
    assert layer.cache.state == (None, None) and layer.adapter.arrays() == []
    assert (layer.adapter.low(), layer.adapter.high(), layer.adapter.pos()) == (0, 0, 0)
    seen, top = set(), 0
    for _ in range(150):
        top = max(top, len(layer.text))
        layer.feed(*[next(token) for _ in range(dice.choice((1, 1, 1, 2, 3, 7)))])
        pos, held = len(layer.text), layer.cache.keys.shape[2]
        assert layer.adapter.high() == pos and layer.adapter.low() == layer.lowest()
        assert layer.cache.start <= max(0, top - MOST)
        assert held <= MOST + 2 * STEP and layer.cache.values.shape[2] == held
        seen.add(held)
        if dice.random() < 0.5:
            layer.back(dice.randint(layer.adapter.low(), pos))
    assert len(seen) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_grows_by_whole_steps_and_drops_what_nobody_needs(kind):
    layer, sizes = Layer(kind), []
    for token in range(1, 30):
        layer.feed(token)
        sizes.append((layer.cache.keys.shape[2], layer.cache.start))
    assert sizes[:4] == [(4, 0)] * 4 and sizes[4:8] == [(8, 0)] * 4 and sizes[8:12] == [(12, 0)] * 4
    assert sizes[12:16] == [(14, 12 - MOST)] * 4 and sizes[16:20] == [(14, 16 - MOST)] * 4
    layer.feed(*range(30, 39))  # more than one step of rows
    assert (layer.cache.keys.shape[2], layer.cache.start) == (MOST + 3 * STEP, 29 - MOST)


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_the_reach_is_refused_and_nothing_moves(kind):
    layer = Layer(kind)
    layer.feed(*range(1, 12))
    layer.feed(12, 13)
    layer.feed(14)
    low = layer.adapter.low()
    assert low > 0
    for pos in (low - 1, 15, -1):
        words = f"`{pos}` is out of reach: a {layer.adapter.kind} layer holds `{low}` to `14`"
        with pytest.raises(StateError, match=words):
            layer.adapter.seek(pos)
    assert layer.adapter.pos() == 14
    layer.adapter.seek(low)
    assert layer.adapter.high() == 14
    with pytest.raises(StateError):
        layer.adapter.seek(15)
    layer.adapter.seek(13)  # forward again
    assert layer.adapter.high() == 14
    layer.adapter.forget_redo()
    assert layer.adapter.high() == 13
    layer.text = layer.text[:13]
    layer.feed(20)
    assert layer.adapter.high() == 14


def test_the_chunks_cursor_needs_its_chunk_from_the_first_row_on():
    layer = Layer("chunks", slack=0)
    layer.feed(*range(1, 9))
    assert layer.cache.start == 0 and layer.adapter.low() == 0
    layer.feed(9)
    assert (layer.cache.start, layer.adapter.low()) == (4, 5)
    assert [layer.adapter._needs_from(pos) for pos in (4, 5, 9, 10)] == [0, 5, 5, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_its_position_back_from_anywhere(kind):
    """Rows that were dropped since; a checkpoint that is written into."""
    layer = Layer(kind)
    for token in range(1, 18):
        layer.feed(token)
    text, state = list(layer.text), layer.adapter.checkpoint()
    first = layer.adapter._needs_from(17)
    assert state[:2] == (17, first)
    assert [a.shape[2] for a in layer.adapter.checkpoint_arrays(state)] == [17 - first] * 2
    assert state[2].tolist() == rows(text[first:]).tolist()
    low = layer.adapter.low()
    layer.adapter.restore_checkpoint(state, 17)  # here, and near: what is below stays
    assert layer.adapter.low() == low
    layer.feed(18)
    layer.adapter.restore_checkpoint(state, 17)
    assert layer.adapter.low() < 17 - SLACK + 1 and layer.adapter.high() == 18
    layer.text = list(text)
    for _ in range(2):
        for token in range(100, 140):
            layer.feed(token)
        with pytest.raises(StateError, match="taken at `17` cannot restore position `16`"):
            layer.adapter.restore_checkpoint(state, 16)
        layer.adapter.restore_checkpoint(state, 17)
        assert layer.adapter.low() == layer.lowest() and layer.adapter.high() == 17
        layer.text = list(text)
        layer.feed(50)
        assert layer.adapter.pos() == 18
    assert state[2].tolist() == rows(text[first:]).tolist()


def test_a_checkpoint_of_nothing_and_one_at_the_start_of_a_chunk():
    """A window that nothing was read into; a chunk that has just begun keeps no rows."""
    for kind in KINDS:
        empty = Layer(kind)
        state = empty.adapter.checkpoint()
        assert state == (0, 0, None, None) and empty.adapter.checkpoint_arrays(state) == []
        empty.feed(1, 2)
        empty.adapter.restore_checkpoint(state, 0)
        assert empty.adapter.pos() == 0
    layer = Layer("chunks")
    for token in range(1, 11):
        layer.feed(token)
    state = layer.adapter.checkpoint()
    assert state == (10, 10, None, None)
    for token in range(11, 40):
        layer.feed(token)
    layer.adapter.restore_checkpoint(state, 10)
    assert (layer.adapter.low(), layer.adapter.pos(), layer.cache.keys) == (10, 10, None)
    layer.cache.update_and_fetch(rows([7]), rows([7]))
    assert layer.adapter.pos() == 11


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_layer_goes_on_and_goes_back(kind):
    layer = Layer(kind)
    for token in range(1, 24):
        layer.feed(token)
    arrays, facts = layer.adapter.state_dict()
    start = 23 - MOST
    assert facts == {"pos": 23, "start": start} and layer.adapter.saved_rows(facts) == 23 - start
    assert {name: a.shape[2] for name, a in arrays.items()} == {"keys": 10, "values": 10}
    other = Layer(kind)
    other.adapter.load_state(arrays, facts)
    other.text = list(layer.text)
    assert other.adapter.high() == 23
    other.back(other.adapter.low())
    other.feed(70)
    none, facts = Layer(kind).adapter.state_dict()
    assert none == {} and facts == {"pos": 0, "start": 0}
    other.adapter.load_state(none, facts)
    other.text = []
    other.feed(1, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_branches_share_rows_until_one_would_write_over_anothers(kind):
    layer = Layer(kind)
    for token in range(1, 9):
        layer.feed(token)
    layer.back(7)
    twin = Layer(kind)
    twin.adapter, twin.text = layer.adapter.fork(), list(layer.text)
    assert twin.cache is not layer.cache and twin.adapter.high() == 7 and layer.adapter.high() == 8
    buffer = layer.cache.keys
    assert twin.cache.keys is buffer
    assert twin.adapter.leave([layer.adapter]) is False  # row 7 is the other's, to go forward to
    assert twin.cache.keys is not buffer and twin.adapter.pos() == 7
    twin.feed(50, 51)
    layer.adapter.seek(8)
    layer.text += [8]
    layer.feed(9)
    third = layer.adapter.fork()
    assert layer.adapter.leave([third]) is True and layer.cache.keys is third.cache.keys
    assert layer.adapter.leave([third], writers=[third]) is False
    assert layer.adapter.leave([twin.adapter]) is False
    layer.feed(10)
    twin.feed(52)


def test_the_mask_of_one_token_hides_what_a_smaller_window_does_not_see():
    """Rows in order, where stock turns the mask with its ring."""
    cache, stock = SlidingKVCache(SIZE, SLACK), RotatingKVCache(SIZE)
    for n in range(9):
        shown = min(n, SIZE - 1) + 1
        for window in (3, 4, 5, 6):
            mask = cache.make_mask(1, window_size=window)
            if shown <= window:
                assert mask is None
            else:
                assert mask.tolist() == [i >= shown - window for i in range(shown)]
        assert cache.make_mask(1) is None
        for length in (2, 4):
            for how in ({}, {"window_size": 3}, {"return_array": True}):
                ours, theirs = cache.make_mask(length, **how), stock.make_mask(length, **how)
                same = ours == theirs if isinstance(ours, str) else ours.tolist() == theirs.tolist()
                assert same and type(ours) is type(theirs)
        for each in (cache, stock):
            each.update_and_fetch(rows([n]), rows([n]))


def test_what_a_layer_says_of_itself():
    layer = Layer("window")
    assert layer.adapter.kind == "window" and layer.adapter.seekable
    assert not layer.adapter.keeps_every_row and layer.adapter.row_axis == 2
    assert (
        layer.adapter.bytes_per_token() == 0
        and f"last {SLACK} positions" in layer.adapter.describe()
    )
    assert Layer("chunks").adapter.kind == "chunked" and layer.adapter.restores(None)
    layer.feed(1, 2)
    assert [a.nbytes for a in layer.adapter.arrays()] == [2 * STEP * 4, 2 * STEP * 3 * 4]
    with pytest.raises(AssertionError, match="below the buffer"):
        for token in range(3, 30):
            layer.feed(token)
        layer.cache.rows_from(0)
