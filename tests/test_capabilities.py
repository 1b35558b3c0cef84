"""What an engine says of itself is what a session then does."""

import pytest
from oracle import FAMILIES, engine, prompt
from tiny import build

from ds4cli.caches.build import UnsupportedCache
from ds4cli.errors import UsageError
from ds4cli.tape.check import Verdict


@pytest.mark.parametrize("name", FAMILIES)
def test_the_free_rewind_that_is_promised_is_free(name):
    """An overstated max_rollback would turn into model calls, or into corruption."""
    eng = engine(name, horizon_tokens=24)
    promised = eng.capabilities.max_rollback
    session = eng.session()
    session.sync(prompt(20))
    list(session.stream(max_tokens=40))
    end = session.pos
    for depth in range(1, (promised or 24) + 1):
        assert session.plan(end - depth).forwards == 0


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_a_small_budget_is_admitted(name):
    """With no memory for going back, nothing may be promised."""
    eng = engine(name, rewind_mb=0)
    assert eng.capabilities.max_rollback == 0


def test_every_layer_kind_is_named_with_its_cost():
    """A front end decides by these lines: kinds, how they go back, bytes a token."""
    text = str(engine("qwen3_next").capabilities)
    assert "3 x recurrent: " in text
    assert "1 x kv: any depth" in text
    assert text.count("bytes a token") == 2
    assert "gated delta" in text
    assert "the last 256 tokens" in text
    assert "any depth" in str(engine("llama").capabilities)


def test_a_refused_replay_is_admitted(monkeypatch):
    """A replay that differs from the model is not promised, and a notice says by how much."""
    monkeypatch.setattr("ds4cli.engine.engine.self_check", lambda *args: Verdict(3.5))
    eng = engine("qwen3_next")
    assert "fed again (replay is refused" in str(eng.capabilities)
    assert eng.capabilities.max_rollback == 0
    assert "differs from this model by 3.5 times" in eng.refusal
    assert eng.refusal in str(eng.capabilities)


def test_an_unknown_cache_is_refused_by_name():
    """A cache that cannot be rewound exactly must not be rewound approximately."""

    class StrangeCache: ...

    model = build("llama")
    model.make_cache = lambda: [StrangeCache()]
    with pytest.raises(UnsupportedCache, match="StrangeCache"):
        engine("llama", model=model)


def test_quantised_kv_is_refused_where_mlx_lm_cannot():
    """kv_bits on a windowed model must be refused before a session exists."""
    with pytest.raises(UsageError):
        engine("gemma3_text", kv_bits=8, kv_group_size=32)
