"""Lanes of a batch that keep unlike numbers of rows: each state is what that lane's own replay
gives."""

from __future__ import annotations

import io

import mlx.core as mx
import pytest
import tiny
from mlx_lm.models.cache import make_prompt_cache
from test_delta import inputs
from test_tape import RECURRENT, error

from ds4cli.hooks import delta
from ds4cli.tape.families.delta_rule import DeltaRows
from ds4cli.tape.kept import Kept, UnlikeSlots
from ds4cli.tape.recorder import Recorder, arrays_caches

LANES = 3
KEPT = {1: [(1, 1, 1)], 2: [(1, 2, 1), (2, 2, 2)], 5: [(1, 5, 3), (2, 2, 2), (4, 1, 5)]}


@pytest.fixture(scope="module", params=RECURRENT)
def armed(request):
    model = tiny.build(request.param, scale=1.5)
    return request.param, model, Recorder.arm(model)


def fed(model, rows, seed, lanes=LANES):
    """Caches after a call on so many rows of each lane."""
    caches = make_prompt_cache(model)
    if rows:
        model(feed(lanes, rows, seed), cache=caches)
        mx.eval(slots(caches))
    return caches


def feed(lanes, rows, seed):
    return tiny.ids(lanes * rows, seed).reshape(lanes, rows)


def slots(caches):
    return [list(cache.cache) for cache in arrays_caches(caches)]


def recorded(model, recorder, caches, rows, lanes=LANES):
    """The tapes of the lanes of a call, with what they start from."""
    starts = slots(caches)
    with recorder.recording_batch(arrays_caches(caches), lanes, rows) as tapes:
        logits = model(feed(lanes, rows, 2), cache=caches)
    mx.eval(logits, tapes[0].whole.arrays())
    return tapes, starts


def alone(tapes, starts, rows):
    """What each lane's own replay gives, as a batch."""
    own = [
        tape.replay([[x if x is None else x[i : i + 1] for x in layer] for layer in starts], n)
        for i, (tape, n) in enumerate(zip(tapes, rows, strict=True))
    ]
    return [
        [mx.concatenate([*x]) for x in zip(*layer, strict=True)] for layer in zip(*own, strict=True)
    ]


@pytest.mark.parametrize("prompt", [7, 0])
def test_each_lane_keeps_its_own_rows(armed, prompt):
    """Guards: a row that was not kept in a state, a lane's number given to another, or rows of a
    slot that a new cache has not."""
    name, model, recorder = armed
    for k, splits in KEPT.items():
        tapes, starts = recorded(model, recorder, fed(model, prompt, 1), k)
        for rows in splits:
            if name == "longcat_flash_ngram" and not prompt and len({*rows}) > 1:
                with pytest.raises(UnlikeSlots):  # ids of tokens, of which there are few yet
                    tapes[0].whole.replay_each(starts, rows)
                continue
            got = tapes[0].whole.replay_each(starts, rows)
            assert error(got, alone(tapes, starts, rows)) < 1e-5


def test_nothing_is_done_lane_by_lane(armed):
    """Guards: a replay of thousands of operations, and another graph for each split."""
    _, model, recorder = armed
    counts = set()
    for lanes, rows in ((3, (1, 4, 2)), (3, (4, 4, 1)), (5, (2, 3, 1, 4, 4))):
        tapes, starts = recorded(model, recorder, fed(model, 7, 1, lanes), 4, lanes)
        counts.add(nodes(tapes[0].whole.replay_each(starts, rows)))
    assert len(counts) == 1


def nodes(slots):
    """Operations that `slots` are computed by."""
    with io.StringIO() as text:
        mx.export_to_dot(text, slots)
        return text.getvalue().count("shape=rectangle")


@pytest.mark.parametrize("channel", [False, True])
def test_rows_that_are_no_numbers_and_not_kept_leave_no_trace(channel):
    """A guess whose rows overflow, beside rows that are kept."""
    _, k, v, g, beta, state = inputs(6, channel=channel, batch=2)
    data = [mx.array(x) for x in (k, v, g, beta)]
    want = delta.final_state(*(x[:, :4] for x in data), state)
    for x in data:
        x[:, 4:] = mx.nan
    (got,) = DeltaRows.replay_each([DeltaRows((*data,))], [state], Kept([4, 4], 6))
    assert mx.allclose(got, want, atol=1e-5)
