"""Through how many files and functions of ours one step, and one rewind, leads whoever reads them.

Counted by a profile on a tiny qwen3_next, drafter off, no guard: each function that is entered, and
the file it stands in; a comprehension or a lambda is a part of the function around it. Counts are
exact, so these bounds cannot flicker. `pytest -s tests/test_way.py` prints what was entered.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import Letters, prompt
from tiny import build

import ds4cli
from ds4cli.engine.engine import Engine
from ds4cli.settings import Settings

ROOT = Path(ds4cli.__file__).parent
INNER = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}
# The model's own sums, in the form that is fast here.
FORMS = {"hooks/convolutions.py", "hooks/delta.py"}
# What replays the recurrences of a rewind: the same sums as in a model call.
REPLAY = {"hooks/cuda/switch.py", "hooks/delta.py", "tape/families/delta_rule.py"}
REPLAY |= {"tape/tape.py", "tape/tracks.py"}


def entered(act: Callable[[], object]) -> dict[str, set[tuple[str, int]]]:
    """The functions, by name and line, that `act` enters, by their file."""
    found: dict[str, set[tuple[str, int]]] = {}

    def note(frame, event, _):
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and code.co_name not in INNER:
            name = path.relative_to(ROOT).as_posix()
            found.setdefault(name, set()).add((code.co_name, code.co_firstlineno))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    for name, functions in sorted(found.items()):
        print(f"{name}: {', '.join(sorted(function for function, _ in functions))}")
    return found


def functions(found: dict[str, set[tuple[str, int]]]) -> int:
    return sum(map(len, found.values()))


@pytest.fixture
def session():
    made = Engine(build("qwen3_next"), Letters(), Settings(drafter="none"))
    made.stop_ids = set()
    session = made.session()
    session.sync(prompt(40))
    for _ in range(4):  # what is counted once is counted
        session.step()
    return session


def test_a_step_is_short_to_read(session):
    """18 files and 112 functions: an engineer took two hours for one step. Counted beside the
    arithmetic of the model itself."""
    found = entered(session.step)
    ours = {name: found[name] for name in found if name not in FORMS}
    assert len(ours) <= 10 and functions(ours) <= 50
    assert len(found) <= 12 and functions(found) <= 53


def test_a_rewind_inside_the_block_is_short_to_read(session):
    """The same for going back: 10 and 56 beside the arithmetic of the replay itself."""
    twin = session.fork()
    told = [twin.step().tokens[0] for _ in range(5)]
    session.step(drafts=told[1:])
    start, end = session.timeline.last_block
    assert start < end - 2
    found = entered(lambda: session.rewind(end - 2))
    ours = {name: found[name] for name in found if name not in REPLAY}
    assert len(ours) <= 6 and functions(ours) <= 30
    assert len(found) <= 11 and functions(found) <= 59
