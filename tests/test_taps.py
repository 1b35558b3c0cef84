"""Taps: what a drafter reads of the target is what the target's own layers returned."""

from __future__ import annotations

import mlx.core as mx
import pytest
import tiny

from ds4cli.caches.build import build_caches
from ds4cli.drafters.target import Target
from ds4cli.errors import ModelError
from ds4cli.hooks.taps import Taps


def call(model, ids, taps):
    with taps.noting() as noted:
        logits = model(mx.array(ids)[None], cache=build_caches(model, 0))
    return logits[0], noted


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5", "lfm2", "nemotron_h"])
def test_the_last_tap_makes_the_logits(family):
    """Guards: a tap that reads another layer, or the stream before the layer's own addition."""
    model = tiny.build(family)
    target = Target(model)
    target.prove()
    logits, noted = call(model, [5, 6, 7], Taps.arm(model, [0, target.num_layers - 1]))
    assert [x.shape for x in noted] == [(3, target.hidden_size)] * 2
    assert mx.allclose(target.output(target.norm(noted[1])), logits, atol=1e-4)
    assert not mx.allclose(noted[0], noted[1], atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_the_layer_before_the_first_is_what_goes_into_it(family):
    """Guards: heads that read the embeddings, which is valid, and models that scale them."""
    model = tiny.build(family)
    _, noted = call(model, [5, 6, 7], Taps.arm(model, [-1, 0]))
    embedded = Target(model).embed(mx.array([5, 6, 7]))
    scale = embedded.shape[-1] ** 0.5 if family == "gemma3_text" else 1
    assert mx.allclose(noted[0], embedded * scale, atol=1e-5)
    assert not mx.allclose(noted[0], noted[1], atol=1e-2)


def test_listening_changes_nothing_and_is_local():
    """Guards: a model that computes otherwise while it is heard, or notes when nobody asks."""
    model = tiny.build("qwen3_5")
    ids = mx.array([[5, 6, 7]])
    before = model(ids, cache=build_caches(model, 0))
    taps = Taps.arm(model, [1])
    Taps.arm(model, [1])  # a second engine on the same model
    with taps.noting() as noted:
        heard = model(ids, cache=build_caches(model, 0))
    model(ids, cache=build_caches(model, 0))
    assert mx.array_equal(before, heard)
    assert len(noted) == 1


def test_what_cannot_be_read_is_refused_by_name():
    """Guards: a drafter that runs on a layer that is not there, or on parts that do not make the
    model's logits."""
    with pytest.raises(ModelError, match="layer `99`"):
        Taps.arm(tiny.build("llama"), [99])
    with pytest.raises(ModelError, match="cohere2"):
        Target(tiny.build("cohere2")).prove()
    model = tiny.build("deepseek_v41")
    with pytest.raises(ModelError, match="DecoderLayer"):
        call(model, [5], Taps.arm(model, [0]))
