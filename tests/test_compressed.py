"""DeepSeek V4's compressed rows by hand: a layer holds what mlx-lm's own cache would hold of the
same text, read in one call."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from ds4cli.errors import StateError

deepseek = pytest.importorskip("mlx_lm.models.deepseek_v41")
compressed = pytest.importorskip("ds4cli.caches.compressed")

WINDOW, SLACK, DIM = 4, 5, 2


def rows(tokens):
    """(1, n, DIM): a row for each token."""
    column = mx.array([*tokens], mx.float32)[None, :, None]
    return mx.broadcast_to(column, (1, len([*tokens]), DIM))


class Decoder(nn.Module):
    """The parts of a decoder layer that fill its cache; a compressor that pools plain means."""

    def __init__(self, ratio):
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.ratio = ratio
        if ratio:
            args = SimpleNamespace(
                compress_ratios=(ratio,), hidden_size=DIM, head_dim=DIM, rms_norm_eps=1.0
            )
            made = self.self_attn.compressor = deepseek.Compressor(args, 0)
            made.kv_proj.weight, made.kv_norm = mx.eye(DIM), nn.Identity()
            if ratio > 1:
                made.gate_proj.weight = 0.1 * mx.eye(DIM)

    def __call__(self, tokens, cache):
        x, start = rows(tokens), cache.offset
        shown = cache.update_window(x)
        if self.self_attn.ratio:
            groups, first = self.self_attn.compressor(x, start, cache)
            if groups is not None:
                done = 0 if cache.compress_kv is None else cache.compress_kv.shape[1]
                assert first == done, "the group follows those that are closed"
                cache.compress_kv = deepseek._append(cache.compress_kv, groups)
                cache.index_k = deepseek._append(cache.index_k, -groups)
        return shown


def numbers(a):
    return [] if a is None else [round(x, 3) for x in a[0, :, 0].tolist()]


class Layer:
    """A layer and the text that it should hold."""

    def __init__(self, ratio=3, slack=SLACK):
        self.decoder, self.ratio = Decoder(ratio), max(ratio, 1)
        self.cache = compressed.with_slack(self.decoder, WINDOW, slack)
        self.adapter = compressed.CompressedAdapter(self.cache)
        self.text, self.slack = [], slack

    def feed(self, *tokens):
        before = self.text[max(0, len(self.text) - WINDOW + 1) :]
        shown = numbers(self.decoder(tokens, self.cache))
        assert shown[-len(tokens) - len(before) :] == [*before, *tokens]
        self.text += tokens
        self.check()

    def check(self):
        """As a stock cache, with a window that nothing leaves."""
        text, cache = self.text, self.cache
        stock, decoder = deepseek.LayerCache(1000), Decoder(self.decoder.self_attn.ratio)
        if text:
            decoder(text, stock)
        assert self.adapter.pos() == cache.offset == len(text)
        for name in ("compress_kv", "index_k", "pending_kv", "pending_gate"):
            assert numbers(getattr(cache, name)) == numbers(getattr(stock, name)), name
        window = numbers(cache.window)
        assert window == text[len(text) - len(window) :]
        assert min(len(text), WINDOW - 1) <= len(window) <= WINDOW + self.slack

    def back(self, pos):
        self.adapter.seek(pos)
        self.text = self.text[:pos]
        self.check()

    def lowest(self):
        """From what is held: a window before the position, and the open group from its start."""
        pos, ratio = len(self.text), self.ratio
        first = pos - len(numbers(self.cache.window))
        logged = pos - len(numbers(self.cache.log_kv)) if ratio > 1 else 0
        whole = [first == 0 or p - first >= WINDOW - 1 for p in range(pos)]
        known = [p // ratio * ratio >= logged for p in range(pos)]
        return min([p for p in range(pos) if whole[p] and known[p]], default=pos)


RATIOS = (0, 1, 2, 3, 4)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_layer_goes_back_and_forth_within_its_reach(ratio):
    """An open group of the wrong rows; one position below: rows that are not there."""
    layer, token = Layer(ratio), 0
    for n in (1, 2, 1, 1, 4, 1, 1, 1, 3, 7, 1, 1, 1, 1):
        layer.feed(*range(token + 1, token + n + 1))
        token += n
        end, low, text = len(layer.text), layer.adapter.low(), layer.text
        assert low == layer.lowest() and layer.adapter.high() == end
        for pos in (low, end, (low + end) // 2, low, end - 1 if end > low else end, end):
            layer.adapter.seek(pos)
            layer.text = text[:pos]
            layer.check()
            assert layer.adapter.high() == end and layer.adapter.low() <= pos
        for pos in (low - 1, end + 1):
            with pytest.raises(StateError, match="is out of reach: a compressed layer holds"):
                layer.adapter.seek(pos)
    low = layer.adapter.low()
    assert len(layer.text) - low >= 1
    layer.back(low)
    layer.feed(100)
    assert layer.adapter.high() == low + 1, "what was ahead is written over"
    layer.back(low)
    layer.adapter.forget_redo()
    assert layer.adapter.high() == low
    layer.feed(200, 201, 202, 203)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_layer_reaches_its_slack(ratio):
    layer = Layer(ratio)
    for token in range(1, 30):
        layer.feed(token)
        assert layer.adapter.low() <= max(0, token - SLACK)
        if ratio < 2:
            assert layer.adapter.low() in (0, token - SLACK - 1)
    assert len(numbers(layer.cache.window)) == WINDOW + SLACK
    kept = SLACK + ratio if ratio > 1 else 0
    assert len(numbers(layer.cache.log_kv)) == len(numbers(layer.cache.log_gate)) == kept


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_checkpoint_brings_its_position_back_from_any_later_one(ratio):
    for at in (1, 2, 7, 8, 9):
        layer = Layer(ratio)
        layer.feed(*range(1, at + 1))
        state, text = layer.adapter.checkpoint(), [*layer.text]
        assert state[0] == at and numbers(state[1]) == text[-WINDOW + 1 :]
        arrays = layer.adapter.checkpoint_arrays(state)
        assert len(arrays) == sum(a is not None for a in state[1:])
        waiting = at % layer.ratio
        assert numbers(state[2]) == text[at - waiting :] and len(numbers(state[3])) == waiting
        layer.feed(50)
        layer.adapter.restore_checkpoint(state, at)  # near: what is ahead stays
        layer.text = [*text]
        layer.check()
        assert layer.adapter.high() == at + 1
        for _ in range(2):
            for token in (50, 57, 64, 71):
                layer.feed(*range(token, token + 7))
            with pytest.raises(StateError, match=f"taken at `{at}` cannot restore"):
                layer.adapter.restore_checkpoint(state, at + 1)
            assert layer.adapter.restores(state)
            layer.adapter.restore_checkpoint(state, at)
            layer.text = [*text]
            layer.check()
            assert layer.adapter.high() == at and layer.adapter.low() <= at
            layer.feed(40)
            layer.back(at)
            layer.adapter.forget_redo()
            layer.feed(41, 42)


def test_a_checkpoint_whose_groups_were_given_up_is_refused():
    """Closed groups are not in it: the layer would stand there with fewer than it counts."""
    layer = Layer(2)
    layer.feed(*range(1, 11))
    state = layer.adapter.checkpoint()
    layer.back(8)
    assert layer.adapter.restores(state)
    layer.feed(50)
    assert not layer.adapter.restores(state)
    with pytest.raises(StateError, match="`10` is past the compressed rows held"):
        layer.adapter.restore_checkpoint(state, 10)
    layer.check()


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_saved_layer_goes_on_and_goes_back(ratio):
    for at in (0, 1, 2, 3, 20):
        layer, other = Layer(ratio), Layer(ratio)
        if at:
            layer.feed(*range(1, at + 1))
        arrays, facts = layer.adapter.state_dict()
        assert facts == {"pos": at} and all(a.shape[1] for a in arrays.values())
        held = {"window": at} | ({"compress_kv": at // ratio} if ratio else {})
        held |= {"index_k": held.get("compress_kv", 0)}
        held |= {name: at if ratio > 1 else 0 for name in ("log_kv", "log_gate")}
        most = {"window": WINDOW + SLACK, "log_kv": SLACK + ratio, "log_gate": SLACK + ratio}
        want = {name: min(n, most.get(name, n)) for name, n in held.items() if n}
        assert {name: a.shape[1] for name, a in arrays.items()} == want
        other.feed(9, 9, 9)
        other.adapter.load_state(arrays, facts)
        other.text = [*layer.text]
        other.check()
        assert (other.adapter.low(), other.adapter.high()) == (layer.adapter.low(), at)
        other.back(other.adapter.low())
        other.feed(70, 71)


def test_branches_write_apart():
    layer = Layer(3)
    layer.feed(*range(1, 9))
    layer.back(7)
    twin = Layer(3)
    twin.adapter, twin.text = layer.adapter.fork(), [*layer.text]
    twin.cache = twin.adapter.cache
    assert twin.adapter.high() == 7 and layer.adapter.high() == 8
    twin.feed(50, 51)
    layer.adapter.seek(8)
    layer.text += [8]
    layer.check()
    layer.feed(9)
    twin.back(6)


def test_only_caches_with_slack_are_shown_what_is_pooled():
    """The stock model that checks compare with shares the layer."""
    decoder = Decoder(3)
    cache = compressed.with_slack(decoder, WINDOW, SLACK)
    assert type(decoder.self_attn.compressor) is compressed.RecordingCompressor
    assert (cache.window_size, cache.context, cache.slack) == (WINDOW + SLACK, WINDOW - 1, SLACK)
    stock = deepseek.LayerCache(WINDOW)
    decoder(range(1, 6), stock)
    assert numbers(stock.pending_kv) == [4, 5] and not hasattr(stock, "log_kv")
    decoder(range(1, 6), cache)
    assert numbers(cache.log_kv) == [1, 2, 3, 4, 5]
    assert numbers(cache.log_gate) == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert cache.log_kv.dtype == mx.float32 and deepseek._append is compressed.joined


def test_what_a_layer_says_of_itself():
    layer = Layer(3)
    adapter = layer.adapter
    assert (adapter.kind, adapter.row_axis, adapter.keeps_every_row) == ("compressed", 1, False)
    assert adapter.seekable and adapter.splits_long_calls
    assert adapter.bytes_per_token() == 0 and adapter.arrays() == []
    assert f"the last {SLACK} positions" in adapter.describe()
    layer.feed(1, 2)
    assert adapter.bytes_per_token() == 0, "no group is closed"
    layer.feed(*range(3, 11))
    assert adapter.bytes_per_token() == 2 * DIM * 4 // 3
    assert sum(a.shape[1] for a in adapter.arrays()) == 9 + 2 * 3 + 2 * 8 + 2 * 1
