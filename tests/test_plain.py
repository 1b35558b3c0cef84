"""Caches that keep every row, and recurrent ones, by hand: a row is the number of its token."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, QuantizedKVCache

from ds4cli.caches.adapter import LayerAdapter, SharedRows
from ds4cli.caches.plain import ConcatenateAdapter, KVAdapter, QuantizedAdapter, leaves
from ds4cli.caches.recurrent import RecurrentAdapter
from ds4cli.errors import StateError

KINDS = {
    "kv": (KVCache, KVAdapter),
    "quantized kv": (lambda: QuantizedKVCache(32, 8), QuantizedAdapter),
    "concatenate": (ConcatenateKVCache, ConcatenateAdapter),
}
DIM = 32


def rows(tokens):
    """(1, 2, n, DIM): a row of two heads for each token."""
    column = mx.array(tokens, mx.float32)[None, None, :, None]
    return mx.broadcast_to(column, (1, 2, len(tokens), DIM))


def make(kind):
    cache, adapter = KINDS[kind]
    return adapter(cache())


def plain(shown):
    """Numbers of the rows that attention is shown."""
    shown = mx.dequantize(*shown, 32, 8) if isinstance(shown, tuple) else shown
    return [round(x) for x in shown[0, 1, :, 3].tolist()]


def feed(layer, *tokens):
    """Read tokens; all that is shown then."""
    keys, values = layer.cache.update_and_fetch(rows(tokens), -rows(tokens))
    shown = plain(keys)
    assert plain(values) == [-t for t in shown] and layer.pos() == len(shown)
    return shown


@pytest.mark.parametrize("kind", KINDS)
def test_the_cursor_goes_back_and_forth_until_something_is_written(kind):
    layer = make(kind)
    assert (layer.low(), layer.pos(), layer.high(), layer.kind) == (0, 0, 0, kind)
    assert feed(layer, *range(1, 8)) == [*range(1, 8)]
    for pos in (3, 5, 0, 7, 2):
        layer.seek(pos)
        assert (layer.low(), layer.pos(), layer.high()) == (0, pos, 7)
        assert layer.checkpoint() == pos and layer.checkpoint_arrays(pos) == []
    for pos in (8, -1):
        words = f"`{pos}` is out of reach: a {kind} layer holds `0` to `7`"
        with pytest.raises(StateError, match=words):
            layer.seek(pos)
    assert layer.pos() == 2
    assert feed(layer, 20, 21) == [1, 2, 20, 21] and layer.high() == 4
    with pytest.raises(StateError):
        layer.seek(5)
    layer.seek(1)
    layer.forget_redo()
    assert layer.high() == 1 and feed(layer, 30) == [1, 30]
    with pytest.raises(StateError, match="taken at `1` cannot restore position `0`"):
        layer.restore_checkpoint(1, 0)
    layer.restore_checkpoint(1, 1)
    assert (layer.pos(), layer.high()) == (1, 2) and layer.restores(1)
    layer.seek(0)
    assert feed(layer, 40) == [40]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_layer_goes_on(kind):
    layer, other = make(kind), make(kind)
    feed(layer, *range(1, 8))
    layer.seek(5)
    arrays, facts = layer.state_dict()
    assert facts == {"pos": 5} and layer.saved_rows(facts) == 5
    assert {a.shape[-2] for a in arrays.values()} == {5}
    feed(other, 9)
    other.seek(0)
    other.load_state(arrays, facts)
    assert (other.pos(), other.high()) == (5, 5)
    assert feed(other, 50) == [1, 2, 3, 4, 5, 50]
    assert feed(layer, 60) == [1, 2, 3, 4, 5, 60]
    arrays, facts = make(kind).state_dict()
    assert (arrays, facts) == ({}, {"pos": 0})
    other.load_state(arrays, facts)
    assert other.pos() == 0 and feed(other, 7) == [7]


@pytest.mark.parametrize("kind", KINDS)
def test_branches_write_apart(kind):
    layer = make(kind)
    feed(layer, *range(1, 8))
    layer.seek(4)
    twin = layer.fork()
    assert twin.cache is not layer.cache and (twin.pos(), twin.high(), layer.high()) == (4, 4, 7)
    twin.leave([layer])
    assert feed(twin, 20, 21) == [1, 2, 3, 4, 20, 21]
    layer.seek(7)
    assert feed(layer, 8) == [*range(1, 9)] and feed(twin, 22)[4:] == [20, 21, 22]


@pytest.mark.parametrize("kind", ["kv", "quantized kv"])
def test_who_shares_rows_leaves_before_it_overwrites_them(kind):
    """A branch that wrote into the rows of another; one that copied all of them for nothing."""

    def buffer(layer):
        return layer._buffers()[0]

    layer = make(kind)
    feed(layer, *range(1, 8))
    twin, alone = layer.fork(), make(kind)
    assert isinstance(layer, SharedRows) and buffer(twin) is buffer(layer)
    assert buffer(alone) is None and layer.leave([alone]) is False and alone.leave([]) is False
    assert layer.leave([twin]) is True and buffer(twin) is buffer(layer)  # who is first may stay
    assert layer.leave([twin, alone], writers=[twin]) is False
    assert buffer(twin) is not buffer(layer) and layer.pos() == 7
    assert buffer(layer).shape[-2] == 7, "views of our rows: the next write copies"
    assert layer.leave([twin]) is False
    assert feed(layer, 30)[-1] == 30 and feed(twin, 40)[-1] == 40
    behind = twin.fork()
    twin.seek(3)
    assert twin.leave([behind]) is False and buffer(twin) is not buffer(behind)
    assert feed(twin, 50) == [1, 2, 3, 50] and feed(behind, 60)[3:] == [4, 5, 6, 7, 40, 60]
    third = behind.fork()
    third.cache.keys = alone.cache.keys
    assert behind.leave([third]) is True, "values alone are shared"
    third.cache.values = alone.cache.values
    assert behind.leave([third]) is False


def test_replaced_rows_are_cut_as_views_and_let_go_of():
    """The stock trim moves the offset only: the next write joined rows of a text that was gone."""
    layer = make("concatenate")
    feed(layer, *range(1, 8))
    layer.seek(4)
    assert layer.cache.keys.shape[2] == 4 and plain(layer.cache.keys) == [1, 2, 3, 4]
    layer.seek(6)
    assert plain(layer.cache.keys) == [1, 2, 3, 4, 5, 6]
    layer.seek(0)
    assert layer.cache.keys is layer.cache.values is None and layer.arrays() == []
    layer.seek(7)
    assert plain(layer.cache.values) == [-i for i in range(1, 8)]
    layer.forget_redo()
    assert layer._whole == () and layer.high() == 7


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_layer_says_of_itself(kind):
    layer = make(kind)
    assert layer.seekable and layer.keeps_every_row and layer.row_axis == 2
    assert layer.bytes_per_token() == 0 and layer.arrays() == []
    assert "any depth" in layer.describe() and not layer.splits_long_calls
    feed(layer, 1, 2)
    held = layer.arrays()
    assert layer.bytes_per_token() == sum(a.nbytes for a in held) // held[0].shape[2]
    one = 2 * DIM * (4 if kind != "quantized kv" else 1) + (16 if kind == "quantized kv" else 0)
    assert layer.bytes_per_token() == 2 * one and isinstance(layer.bytes_per_token(), int)
    assert len(leaves((None, held, (None, held[0])))) == len(held) + 1


def test_recurrent_slots_come_back_as_they_were():
    layer = RecurrentAdapter(ArraysCache(3))
    assert (layer.pos(), layer.kind, layer.seekable, layer.row_axis) == (
        None,
        "recurrent",
        False,
        None,
    )
    assert not layer.keeps_every_row and layer.bytes_per_token() == 0
    assert "replayed" in layer.describe() and layer.arrays() == []
    for reach in (layer.low, layer.high, lambda: layer.seek(0)):
        with pytest.raises(StateError, match="no rows to seek in"):
            reach()
    chunk = mx.arange(4000.0).reshape(1, 1000, 4)
    mx.eval(chunk)
    layer.cache.cache = [chunk[:, -3:], None, mx.ones((1, 2))]
    state = layer.checkpoint()
    assert state[1] is None and len(layer.checkpoint_arrays(state)) == 2
    assert [a.tolist() for a in layer.arrays()] == [
        a.tolist() for a in layer.checkpoint_arrays(state)
    ]
    twin = layer.fork()
    twin.cache.cache[2] = None
    assert twin.cache is not layer.cache and layer.cache.cache[2] is not None
    arrays, facts = layer.state_dict()
    assert set(arrays) == {"0", "2"} and facts == {"slots": 3}
    twin.load_state(arrays, facts)
    assert [a is None for a in twin.cache.cache] == [False, True, False]
    assert layer.saved_rows(facts) is None
    layer.cache.cache = [None, None, None]
    layer.restore_checkpoint(state, 5)
    assert layer.cache.cache == state and layer.cache.cache is not state
    assert layer.leave([twin]) is False and layer.forget_redo() is None and layer.restores(state)


def test_what_an_adapter_forgets_to_say_is_noticed():
    """An adapter of a new kind that inherited a guess."""
    for ask in ("pos", "low", "high", "checkpoint", "fork", "arrays", "state_dict", "describe"):
        with pytest.raises(NotImplementedError):
            getattr(LayerAdapter(None), ask)()
    assert not {"kind", "seekable", "keeps_every_row"} & {*vars(LayerAdapter)}
    assert LayerAdapter(None).checkpoint_arrays(1) == []
