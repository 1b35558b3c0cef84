"""Recording and replaying recurrences.

A recurrent state cannot be cut, but what moved it can be kept: a *tape* holds, for every recurrent
cache of a model, the inputs of the recurrence for each fed token. Replaying the first n of them
from the state before gives the state after n tokens without a model call.

    recorder = Recorder.arm(model)
    with recorder.recording(caches) as tape:
        logits = model(tokens, cache=...)
    mx.eval(logits)
    slots = tape.replay(starts, rows)

A call on a batch of lanes leaves one tape for all, `Tape.whole` of each lane's: its `replay_each`
gives the slots of all lanes, each after its own number of rows, in one graph.

`families/` has one file per recurrence; a new one is added there, and listed in `recorder.py`.
"""
