"""A chat on disk: read back, torn, odd and foreign files, one writer. No model."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transcript import chat, reply, scribe, user

from ds4cli.chat import journal
from ds4cli.chat.journal import Journal
from ds4cli.chat.transcript import Scribe, Transcript
from ds4cli.errors import StateError, UsageError

HEADER = {"model": "m", "fingerprint": "f"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.jsonl"


def stored_chat(path, *texts: str) -> Transcript:
    """A chat written to `path` and closed."""
    _, transcript = chat(*texts)
    with Journal.create(path, HEADER) as book:
        for number in range(len(texts) + 1):
            book.record(replace(transcript, line=transcript.line.upto(number)))
    return transcript


def test_a_file_gives_the_transcript_back(path):
    """Guards: anything a session holds missing from its file."""
    writer, transcript = chat("a", "b")
    with Journal.create(path, HEADER) as book:
        book.record(transcript)
        transcript.say(writer.ask(transcript.line, user("ünï 🙂")))
        book.record(transcript)
        call = {"function": {"name": "f", "arguments": "{}"}}
        cut = replace(reply("cut", attempt=2), finish_reason="cancelled", calls=(call,))
        transcript.say(transcript.line.plus(cut))
        book.record(transcript)
    stored = journal.read(path)
    assert stored.header["model"] == "m" and stored.notice is None
    assert stored.transcript.line == transcript.line


def test_each_turn_is_one_appended_line(path):
    """Guards: rewriting the file, which a kill in the middle would tear."""
    writer, transcript = chat("a", "b")
    with Journal.create(path, HEADER) as book:
        book.record(transcript)
        before = path.read_bytes()
        transcript.say(writer.ask(transcript.line, user("x")))
        book.record(transcript)
        added = path.read_bytes()[len(before) :]
        assert path.read_bytes().startswith(before) and added.count(b"\n") == 1
        assert json.loads(added)["role"] == "user"
        book.record(transcript)
        assert path.read_bytes() == before + added


def test_the_file_is_private(path):
    """Guards: other users reading a conversation."""
    stored_chat(path, "a", "b")
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_existing_session_is_not_overwritten(path):
    """Guards: /save over another conversation."""
    stored_chat(path, "a", "b")
    before = path.read_bytes()
    with pytest.raises(UsageError):
        Journal.create(path, HEADER)
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_left_out(path, cut):
    """Guards: a kill during a write making the session, or the line after it, unreadable."""
    stored_chat(path, "a", "b", "c", "d")
    path.write_bytes(path.read_bytes()[:-cut])
    stored = journal.read(path)
    assert "torn" in stored.notice and len(stored.transcript.line.turns) == 3
    with Journal.resume(path, stored) as book:
        stored.transcript.say(stored.transcript.line.plus(reply("other")))
        book.record(stored.transcript)
    again = journal.read(path)
    assert again.notice is None and again.transcript.line.turns[-1].content == "other"


def test_a_last_line_of_other_bytes_is_torn(path):
    """A power cut leaves zeros, or half a line with a line end behind it."""
    stored_chat(path, "a", "b")
    whole = path.read_bytes()
    for torn in (b"\0\0\0\n", b'{"role": "us\n'):
        path.write_bytes(whole + torn)
        stored = journal.read(path)
        assert f"({len(torn)} bytes)" in stored.notice and stored.nbytes == len(whole)
        assert [turn.content for turn in stored.transcript.line.turns] == ["a", "b"]
    path.write_bytes(whole.split(b"\n")[0] + b"\n")
    assert journal.read(path).notice is None and not journal.read(path).transcript.line.turns


def test_a_change_is_written_whole_or_not_at_all(path):
    """Guards: a kill inside a new branch or a new model's tokens shortens or spoils the chat."""
    writer, transcript = chat("a", "b", "c", "d")
    with Journal.create(path, HEADER) as book:
        book.record(transcript)
        before, told = path.read_bytes(), journal.read(path).transcript
        transcript.branch("other")
        transcript.say(writer.ask(transcript.line, user("x")).plus(reply("y")))
        book.retitle({"fingerprint": "g"})
        book.record(transcript)
    data = path.read_bytes()
    for size in range(len(before), len(data), 5):
        path.write_bytes(data[:size])
        stored = journal.read(path)
        assert (stored.transcript, stored.header["fingerprint"]) == (told, "f")
    path.write_bytes(data)
    stored = journal.read(path)
    assert stored.transcript.line == transcript.line and stored.header["fingerprint"] == "g"


def test_a_new_model_is_told_with_its_first_tokens(path, monkeypatch):
    """Guards: a full disk loses the line that says whose tokens the next ones are."""
    writer, transcript = chat("a", "b")
    with Journal.create(path, HEADER) as book:
        book.record(transcript)
        real = {"write": os.write, "ftruncate": os.ftruncate}

        def failing_at_second(name):
            def call(fd, what):
                if name not in real:
                    raise OSError(28, "No space left on device")
                return real.pop(name)(fd, what[:5] if name == "write" else what)

            monkeypatch.setattr(os, name, call)

        for name in ("write", "ftruncate"):
            failing_at_second(name)
        book.retitle({"fingerprint": "g"})
        with pytest.raises(StateError, match="no space left"):
            book.record(transcript)
        monkeypatch.undo()
        transcript.say(writer.ask(transcript.line, user("x")))
        book.record(transcript)
    stored = journal.read(path)
    assert stored.header["fingerprint"] == "g" and stored.transcript.line == transcript.line


@pytest.mark.parametrize("size", [0, 1, 12, 30])
def test_a_torn_header_is_no_session(path, monkeypatch, size):
    """Guards: a chat that was killed at its beginning takes the name for good, or is the latest."""
    stored_chat(path, "a", "b")
    path.write_bytes(path.read_bytes()[:size])
    assert journal.is_unbegun(path) and not journal.is_session(path)
    path.unlink()
    stored_chat(path, "a", "b")
    assert journal.is_session(path) and not journal.is_unbegun(path)


TURN = {"branch": "main", "at": 0, "role": "user", "content": "x", "tokens": [1]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"at": None}, "`at`"), ({"at": -1}, "`at`"), ({"at": True}, "`at`"), ({"at": 5}, "turn 6"),
        ({"branch": 3}, "`branch`"), ({"role": []}, "`role`"), ({"content": None}, "`content`"),
        ({"content": "\ud800"}, "surrogate pair stands alone in `content`"),
        ({"tokens": "12"}, "`tokens`"), ({"tokens": [1.5]}, "`tokens`"), ({"cue": "1"}, "`cue`"),
        ({"finish_reason": 1}, "`finish_reason`"), ({"attempt": {}}, "`attempt`"),
        ({"calls": {}}, "`calls`"), ({"calls": [{"function": {"name": "f"}}]}, "`calls`"),
    ],
)  # fmt: skip
def test_fields_of_odd_types_are_named(path, change, field):
    """Guards: a traceback, at once or at a later turn, for a file that others have written."""
    header = json.dumps({"format": 1, **HEADER})
    path.write_text("\n".join([header, json.dumps({**TURN, **change}), json.dumps(TURN), ""]))
    with pytest.raises(StateError, match=rf"line 2 of session .*{field}"):
        journal.read(path)


@pytest.mark.parametrize("line", ["7", "[[]]", "[" * 100_000, "null", '"x"', '{"branch": "m"'])
def test_lines_that_are_no_changes(path, line):
    """Guards: a traceback for what is JSON but no object, or nested without end."""
    header = json.dumps({"format": 1, **HEADER})
    path.write_text("\n".join([header, line, json.dumps(TURN), ""]))
    with pytest.raises(StateError, match="line 2 of session"):
        journal.read(path)


def test_pipes_and_folders_are_no_sessions(tmp_path):
    """Guards: a chat that waits for ever to read a pipe that lies among the sessions."""
    os.mkfifo(tmp_path / "p.jsonl")
    (tmp_path / "d.jsonl").mkdir()
    for name in ("p.jsonl", "d.jsonl"):
        assert not journal.is_session(tmp_path / name)
        with pytest.raises(StateError, match="not a session file"):
            journal.read(tmp_path / name)


@pytest.mark.parametrize(
    "text", ["", "x\n", "[]\n", '{"a": 1}\n', '{"format": 99}\n', '{"format": 1}\nx\n{}\n']
)
def test_other_files_are_refused(path, text):
    """Guards: a traceback, or an overwritten file, for something that is no session."""
    path.write_text(text)
    with pytest.raises(StateError):
        journal.read(path)
    assert path.read_text() == text


def test_a_missing_session_is_an_error(path):
    """Guards: a traceback for a mistyped session name."""
    with pytest.raises(StateError):
        journal.read(path)


def test_one_chat_at_a_time(path):
    """Guards: two chats appending to one file, each over the other's turns."""
    _, transcript = chat("a", "b")
    with Journal.create(path, HEADER) as book:
        book.record(transcript)
        with pytest.raises(StateError):
            Journal.resume(path, journal.read(path))
    Journal.resume(path, journal.read(path)).close()


OPERATIONS = "say", "undo", "redo", "branch", "switch", "system", "edit", "reload"


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5)), max_size=25))
@settings(max_examples=60, deadline=None)
def test_any_course_of_a_chat_is_read_back(tmp_path_factory, operations):
    """Guards: an order of commands after which the file tells another story than the chat."""
    path = tmp_path_factory.mktemp("j") / "s.jsonl"
    writer = scribe("chatml")
    transcript = Transcript(writer.begin(None))
    book = Journal.create(path, HEADER)
    for operation, n in operations:
        if operation == "reload":
            book.close()
            book = Journal.resume(path, journal.read(path))
        else:
            _carry_out(operation, n, writer, transcript)
        book.record(transcript)
        stored = journal.read(path).transcript
        assert (stored.name, stored.line) == (transcript.name, transcript.line)
        assert stored.named == transcript.named
    book.close()


def _carry_out(operation: str, n: int, writer: Scribe, transcript: Transcript) -> None:
    line = transcript.line
    if operation == "say":
        transcript.say(writer.ask(line, user(f"q{n}")).plus(reply(f"r{n}")))
    elif operation == "undo":
        transcript.go_back(line.upto(max(0, len(line.turns) - 2 * n)))
    elif operation == "redo" and transcript.redo:
        transcript.redo_last()
    elif operation == "branch":
        transcript.branch()
    elif operation == "switch":
        names = sorted(transcript.branches())
        transcript.switch(names[n % len(names)])
    elif operation == "system":
        transcript.go_back(writer.with_system(line, f"system {n}"))
    elif operation == "edit" and line.turns:
        edited = replace(line.turns[-1], content=f"edited {n}")
        transcript.go_back(line.upto(len(line.turns) - 1).plus(edited))
