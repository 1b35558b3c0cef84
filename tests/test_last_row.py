"""Some logits rows of a call in place of all: the same numbers, and a model that is as it was."""

import threading

import mlx.core as mx
import pytest
import tiny

from ds4cli.caches.build import build_caches
from ds4cli.hooks.last_row import Projections
from ds4cli.models import parts


def read(model):
    return model(tiny.ids(7)[None], cache=build_caches(model, 0))


def classes(model):
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])  # the embedding, and a module of its own
def test_the_rows_that_are_wanted(name):
    """A checkpoint with another row's logits; all rows computed where nobody looks at them."""
    model = tiny.build(name)
    assert (parts.output(model) is None) == (name == "llama")
    projections, own, whole = Projections(model), classes(model), read(model)
    with projections.only():
        assert mx.allclose(read(model), whole[:, -1:], atol=1e-5)
    with projections.only([4, 2]):
        assert mx.allclose(read(model), whole[:, [4, 2]], atol=1e-5)
    assert classes(model) == own and mx.array_equal(read(model), whole)


def test_a_call_that_fails_leaves_the_model_as_it_was():
    """Every step from then on went through the hook."""
    model = tiny.build("qwen3_next")
    projections, own = Projections(model), classes(model)
    with pytest.raises(ValueError), projections.only():
        assert classes(model) != own
        raise ValueError
    assert classes(model) == own


def test_another_thread_gets_all_rows():
    """A step of one session that returned the one row which the prompt of another wanted; the class
    that one thread found there was taken for the model's own."""
    model = tiny.build("qwen3_next")
    projections, own, found = Projections(model), classes(model), []
    begun, done = threading.Event(), threading.Event()

    def reads():
        with projections.only():
            begun.set()
            done.wait(10)
            found.append(own != classes(model))

    other = threading.Thread(target=reads)
    other.start()
    assert begun.wait(10)
    assert read(model).shape[1] == 7
    with projections.only():
        done.set()
        other.join(60)
    assert classes(model) == own and found == [True]
