"""Memory on Metal: how much is wired, for how long, and what arrays take."""

import gc

import mlx.core as mx
import pytest
from oracle import Letters, engine, prompt
from tiny import build

from ds4cli.backend import memory
from ds4cli.engine.engine import Engine
from ds4cli.settings import Settings

GB = 1 << 30
# Total memory and what macOS recommends for the GPU, as MLX reports it.
SIZES = {"8 GB": (8 * GB, 5.3 * GB), "16 GB": (16 * GB, 10.7 * GB), "64 GB": (64 * GB, 48 * GB)}


@pytest.mark.parametrize(
    ("machine", "weights", "more", "want"),
    [
        ("64 GB", 15 * GB, 1 * GB, 16 * GB),  # what is needed, not all that is allowed
        ("64 GB", 40 * GB, 20 * GB, 48 * GB),  # never more than recommended
        ("64 GB", 50 * GB, 1 * GB, 0),  # the weights do not fit
        ("16 GB", 9 * GB, 4 * GB, 10.7 * GB),
        ("16 GB", 11 * GB, 1 * GB, 0),
        ("8 GB", 3 * GB, 3 * GB, 4 * GB),  # the system is left its share
        ("8 GB", 4.5 * GB, 0, 0),
    ],
)
def test_what_is_needed_is_wired_where_there_is_room(machine, weights, more, want):
    """A model near the size of the memory paged out between tokens; or the whole machine wired, so
    that it stands still."""
    total, recommended = SIZES[machine]
    assert memory.wired_bytes(int(weights), int(more), int(recommended), total) == int(want)


@pytest.fixture
def limits(monkeypatch):
    """Metal with 64 GB; the wired limits that are set, 7 before anything was."""
    found = [7]

    def set_wired_limit(limit):
        found.append(limit)
        return found[-2]

    monkeypatch.setattr(memory, "on_metal", lambda: True)
    monkeypatch.setattr(memory, "_room", lambda: (48 * GB, 64 * GB))
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return found


class Owner:
    """Stands for an engine."""


def test_the_limit_is_the_sum_of_what_lives_and_is_put_back(limits):
    """An engine that ends takes away what another one still needs, or leaves the limit set."""
    wiring, first, second = memory.Wiring(), Owner(), Owner()
    assert wiring.ask(first, 10 * GB, GB) == [] and wiring.ask(second, 5 * GB, GB) == []
    assert limits == [7, 11 * GB, 17 * GB]
    del first
    assert limits[-1] == 6 * GB
    del second
    assert limits[-1] == 7
    third = Owner()
    assert wiring.ask(third, GB, 0) == [] and limits[-1] == GB
    said = wiring.ask(Owner(), 60 * GB, 0)
    assert "more than can be kept in the 68.7 GB" in said[0] and limits[-1] == GB


def test_an_engine_wires_its_weights_its_rows_and_what_going_back_keeps(limits):
    """An effect that nobody calls; or one that outlives the engine."""
    model = build("qwen3_next")
    e = Engine(model, Letters(), Settings(drafter="none", rewind_mb=3), context_tokens=100)
    e._wire()
    weights = sum(v.nbytes for v in _arrays(model.parameters()))
    rows = next(x for x in e.capabilities.layers if x.kind == "kv").bytes_per_token
    assert limits[1:] == [weights + 100 * rows + 3 * (1 << 20)] and not e.warnings
    del e
    gc.collect()
    assert limits[-1] == 7


def _arrays(tree):
    if isinstance(tree, mx.array):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    return [x for value in values for x in _arrays(value)]


def test_elsewhere_nothing_is_wired(monkeypatch):
    """A limit set on a machine that has none."""
    monkeypatch.setattr(mx, "set_wired_limit", None)
    engine("llama")._wire()


def test_whole_pages_are_counted_on_metal(monkeypatch):
    """A budget that is kept on paper: a row of 100 bytes in a buffer of its own takes a page."""
    page = 16384
    assert [memory.in_pages(n, page) for n in (0, 256, 257, page, page + 1)] == [
        0, 256, page, page, 2 * page,
    ]  # fmt: skip
    e = engine("qwen3_next", horizon_tokens=32)
    kept = []
    for pages in (1, page):
        monkeypatch.setattr(memory, "page_bytes", lambda pages=pages: pages)
        monkeypatch.setattr("ds4cli.rewind.horizon.page_bytes", lambda pages=pages: pages)
        session = e.session()
        session.sync(prompt(9))
        list(session.stream(max_tokens=90))
        kept.append(session.kept_bytes())
        promised = min(e.settings.horizon_tokens, session.pos - 1)
        assert session.plan(session.pos - promised).forwards == 0
    assert kept[1]["last_block"] > 2 * kept[0]["last_block"]
    assert kept[1]["checkpoints"] > kept[0]["checkpoints"]


def test_what_mlx_keeps_of_freed_arrays_is_given_back(monkeypatch):
    """Buffers of every size that a long prompt needed, held for the rest of the session."""
    cleared = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    session = engine("llama").session()
    session.sync(prompt(300))
    assert len(cleared) == 1
    list(session.stream(max_tokens=250))
    assert len(cleared) == 2
