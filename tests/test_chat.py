"""The chat's commands on a tiny random hybrid: what is said, what is read, what is kept."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import talk
from folder import TEMPLATE, save_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from talk import check, check_replies, check_reply

from ds4cli.chat import commands, editor, journal, prompt, shelf
from ds4cli.chat import request as asked
from ds4cli.chat.conversation import Conversation
from ds4cli.chat.request import ChatRequest
from ds4cli.chat.transcript import Turn
from ds4cli.engine.engine import Engine
from ds4cli.errors import StateError, UsageError
from ds4cli.rewind import storage
from ds4cli.tokens import common_prefix
from ds4cli.tools import Tool
from ds4cli.tools.formats import FORMATS


@pytest.fixture(scope="module")
def engine(hybrid_folder):
    return talk.load(hybrid_folder)


@pytest.fixture
def said(engine):
    """A chat of two exchanges."""
    return talk.chat(engine, "the first", "the second")


def editing(monkeypatch, body: str) -> None:
    """Make the user's editor a Python script; `text` and `path` are at hand in `body`."""
    code = f"import sys; path = sys.argv[1]; text = open(path).read(); {body}"
    monkeypatch.setenv("VISUAL", f"{sys.executable} -c {json.dumps(code)}")


def texts(chat) -> list[str]:
    return [turn.content for turn in chat.line.turns]


# -- what is read --------------------------------------------------------------------------------


def test_a_turn_reads_only_its_own_tokens(engine):
    """Guards: the conversation being read again at every turn."""
    chat = talk.chat(engine, "the first message of this chat", "the second")
    fed = chat.counters.fed_tokens
    chat.take("a third one")
    asked, answered = chat.line.turns[-2:]
    calls = chat.counters.fed_tokens - fed
    assert len(asked.tokens) + len(answered.tokens) <= calls
    assert chat.session.stats.prompt_tokens == 0  # counted into the totals
    stats = chat.totals
    assert stats["replayed_tokens"] == 0
    check_replies(chat, engine)


def test_undo_reads_nothing_and_the_next_message_only_itself(said):
    """Guards: /undo on a hybrid costing more than a block of replay."""
    fed = said.counters.fed_tokens
    said.take("/undo")
    assert said.counters.fed_tokens == fed
    line = said.conversation.scribe.ask(said.line, Turn("user", "another"))
    new = len(line.tokens) - len(said.line.tokens)
    said.conversation.ask(Turn("user", "another"), watch=talk.Watch())
    assert said.counters.fed_tokens - fed <= new + 32


def test_retry_reads_nothing_before_the_first_new_token(said):
    """Guards: a retry that reads the prompt again, or one token of it to get its logits."""
    fed = said.counters.fed_tokens
    watch = talk.Watch()
    report, attempt = said.conversation.retry(len(said.line.turns), watch)
    assert (report.replayed, report.prefilled, report.forwards) == (0, 0, 0)
    assert said.session.logits is not None and attempt == 1
    said.conversation.catch_up(watch)
    assert said.counters.fed_tokens == fed


def test_clear_keeps_the_system_text_and_reads_nothing(engine):
    """Guards: the system text being read again after /clear."""
    chat = talk.chat(engine, "/system You are a very brief and careful helper.", "hi", "ho")
    fed = chat.counters.fed_tokens
    chat.take("/clear")
    assert chat.counters.fed_tokens == fed and chat.line.turns == ()
    assert chat.line.system.startswith("You are")
    chat.take("/redo")
    assert len(chat.line.turns) == 4
    check(chat)


def test_switching_back_reads_what_differs(said, engine):
    """Guards: a branch being read from its beginning."""
    said.take("/branch idea")
    said.take("over there")
    shared = len(said.line.upto(4).tokens)
    fed = said.counters.fed_tokens
    said.take("/switch main")
    assert said.counters.fed_tokens - fed <= 32 and len(said.line.tokens) == shared
    said.take("/switch idea")
    check(said)
    check_replies(said, engine)


def test_dropped_reasoning_reads_only_what_the_template_draws_anew(hybrid_folder):
    """Guards: a template that takes reasoning out of history making everything be read again."""
    engine = talk.load(hybrid_folder, think=False)
    chat = talk.chat(engine, "x" * 400, "short", drop_reasoning=True)
    before, fed = chat.line, chat.counters.fed_tokens
    chat.take("third")
    cue, new = before.turns[2].cue, chat.line.turns[4].tokens
    answers = len(before.turns[3].tokens) + len(chat.line.turns[5].tokens)
    assert "<think>" not in chat.engine_text(chat.line.upto(4))
    assert chat.counters.fed_tokens - fed <= cue + answers + len(new) + 64
    check(chat)


@pytest.mark.slow
def test_an_edit_in_a_long_chat_reads_what_was_edited(tmp_path_factory):
    """Guards: /edit of the last message at 4,096 tokens costing more than a tenth of a prefill."""
    folder = save_folder(
        tmp_path_factory.mktemp("long") / "model",
        "qwen3_next",
        hidden_size=256,
        intermediate_size=512,
        max_position_embeddings=8192,
    )
    engine = talk.load(folder, max_tokens=1)
    chat = talk.chat(engine)
    chat.take("x" * 4000)
    chat.take("a short question")
    fed = chat.counters.fed_tokens
    chat.take("/edit 3 another short question")
    assert chat.counters.fed_tokens - fed <= len(chat.line.turns[2].tokens) + 32 < 400


# -- going back ----------------------------------------------------------------------------------


def test_undo_redo(said, capsys):
    """Guards: redo bringing other turns back, or a report that does not say what happened."""
    before = said.line
    said.take("/undo 2")
    assert said.line.turns == () and "dropped" in capsys.readouterr().err
    said.take("/redo")
    assert said.line == before
    check(said)


def test_retry_draws_anew_and_keeps_the_old_reply(engine):
    """Guards: a retry with the same noise, or one that loses the reply it replaces."""
    chat = talk.chat(engine, settings=replace(engine.settings, temp=1.0))
    chat.take("say something")
    old = chat.line
    chat.take("/retry")
    assert chat.line.turns[1].attempt == 1 and chat.line.turns[1].tokens != old.turns[1].tokens
    chat.take("/retry")
    assert chat.line.turns[1].attempt == 2
    chat.take("/switch ~1")
    assert chat.line == old
    check(chat)
    check_replies(chat, engine)


def test_a_retry_that_is_the_same_again_says_so(engine, capsys):
    """Guards: a user who takes a model that is sure of its text for a /retry that does not work."""
    sure = {**talk.LETTERS_ONLY, talk.END: -1000.0, talk._LETTERS[0]: 1000.0}
    chat = talk.chat(engine, settings=replace(engine.settings, temp=0.7, logit_bias=sure))
    chat.take("say something")
    capsys.readouterr()
    chat.take("/retry")
    assert "the same text again" in capsys.readouterr().err
    chat.conversation.use(replace(chat.settings, temp=1.0, logit_bias=talk.LETTERS_ONLY))
    chat.take("/retry")
    assert "the same text" not in capsys.readouterr().err


def test_retry_at_temperature_zero_says_so(said, capsys):
    """Guards: a user waiting for another reply that cannot come."""
    before = said.line
    said.take("/retry")
    assert "same" in capsys.readouterr().err
    assert said.line.turns[-1].tokens == before.turns[-1].tokens


def test_retry_of_an_earlier_reply_drops_later_turns(said, engine):
    """Guards: /retry 2 answering the wrong message."""
    old = said.line
    said.take("/retry 2")
    assert len(said.line.turns) == 2 and said.line.turns[0] == old.turns[0]
    assert said.conversation.transcript.branches()["~1"] == old
    check_replies(said, engine)


def test_rewind_to_a_reply_and_to_a_message(said):
    """Guards: a rewound message being lost instead of coming back into the input line."""
    said.take("/rewind 2")
    assert len(said.line.turns) == 2 and said.draft == ""
    said.take("/redo")
    said.take("/rewind 3")
    assert len(said.line.turns) == 2 and said.draft == "the second"
    check(said)


def test_nothing_typed_is_lost(said):
    """Guards: turns that no command brings back."""
    everything = said.line
    for text in ("/undo", "x", "/rewind 2", "y", "/clear", "z", "/edit 1 w"):
        said.take(text)
    kept = " ".join(t for line in said.conversation.transcript.branches().values() for t in
                    [turn.content for turn in line.turns])  # fmt: skip
    assert all(word in kept.split() for word in ("x", "y", "z", "w"))
    assert everything in said.conversation.transcript.branches().values()
    check(said)


# -- editing -------------------------------------------------------------------------------------


def test_edit_a_message(said, engine, monkeypatch):
    """Guards: an edited message being added instead of replacing the old one."""
    editing(monkeypatch, "open(path, 'w').write(text.replace('first', 'changed'))")
    said.take("/edit 1")
    assert texts(said)[0] == "the changed" and len(said.line.turns) == 2
    check_replies(said, engine)


def test_edit_without_a_number_is_the_last_message(said, monkeypatch):
    """Guards: /edit opening the reply or the first message."""
    editing(monkeypatch, "open(path, 'w').write('new')")
    said.take("/edit")
    assert texts(said)[0] == "the first" and texts(said)[2] == "new"


@pytest.mark.parametrize(
    "body", ["pass", "open(path, 'w').write('')", "open(path, 'w').write(' ')"]
)
def test_cancelled_edits_change_nothing(said, monkeypatch, body):
    """Guards: closing the editor removing the message (seen in other tools)."""
    editing(monkeypatch, body)
    before, fed = said.line, said.counters.fed_tokens
    for turn in ("", "0", "1", "4"):
        said.take(f"/edit {turn}")
    assert said.line == before and said.counters.fed_tokens == fed
    assert said.conversation.transcript.redo == []


@pytest.mark.parametrize("command", ["no-such-editor", "false", "'unclosed"])
def test_a_broken_editor_changes_nothing(said, monkeypatch, capsys, command):
    """Guards: a traceback, or an empty message, because the editor cannot be run."""
    monkeypatch.setenv("VISUAL", command)
    before = said.line
    said.take("/edit 1")
    assert said.line == before and "error:" in capsys.readouterr().err


def test_edit_a_reply_keeps_its_other_ids(said, engine, monkeypatch):
    """Guards: an edited reply being tokenised anew, and later turns staying behind it."""
    editing(monkeypatch, "open(path, 'w').write(text[:5] + 'INSERTED' + text[5:])")
    old = said.line.turns[1]
    fed = said.counters.fed_tokens
    said.take("/edit 2")
    new = said.line.turns[1]
    assert new.tokens[:5] == old.tokens[:5] and new.tokens[-4:] == old.tokens[-4:]
    assert new.content == old.content[:5] + "INSERTED" + old.content[5:]
    assert len(said.line.turns) == 2 and new.is_cut
    assert said.counters.fed_tokens - fed <= len(new.tokens)
    check(said)
    said.take("/continue")
    session = engine.session()
    session.sync(said.line.tokens[: said.line.span(2)[0] + len(new.tokens)])
    list(session.stream(max_tokens=12))
    assert session.tokens == said.line.tokens


@pytest.mark.parametrize("thought", ["<think>\nwhy\n</think>\n\n", ""])
def test_the_text_behind_a_replys_number_is_its_answer(engine, thought):
    """Guards: `/edit 2 text` taken for reasoning, or a reply that loses its reasoning."""
    chat = talk.chat(engine, "why?")
    last = replace(chat.line.turns[-1], tokens=tuple(engine.encode(f"{thought}old")), content="old")
    chat.conversation.transcript.say(chat.line.upto(1).plus(last))
    chat.take("/edit 2 new words")
    edited = chat.line.turns[-1]
    assert edited.content == "new words"
    assert chat.conversation.raw_text(edited) == f"{thought}new words"
    check(chat)


def test_an_answer_ends_reasoning_that_was_cut(engine):
    """Guards: the text of `/edit 2 text` put into reasoning that nobody closed."""
    chat = talk.chat(engine, "why?")
    last = replace(chat.line.turns[-1], tokens=tuple(engine.encode("<think>\nwhy")), content="")
    chat.conversation.transcript.say(chat.line.upto(1).plus(last))
    chat.take("/edit 2 new words")
    assert chat.line.turns[-1].content == "new words"


def test_edit_the_system_text(said, monkeypatch):
    """Guards: /edit 0 doing nothing where there is no system text yet."""
    editing(monkeypatch, "open(path, 'w').write('Be brief.')")
    replies = said.line.turns[1].tokens
    said.take("/edit 0")
    assert said.line.system == "Be brief." and said.line.turns[1].tokens == replies
    check(said)


def test_the_editors_file_is_private_and_goes_away(monkeypatch, tmp_path):
    """Guards: a conversation left readable in /tmp."""
    seen = tmp_path / "seen"
    editing(
        monkeypatch,
        f"import os; open({str(seen)!r}, 'w').write(f'{{path}} {{os.stat(path).st_mode & 0o777}}')",
    )
    assert editor.edit("secret") is None
    path, mode = seen.read_text().split()
    assert int(mode) == 0o600 and not (tmp_path / path).exists()


def test_line_ends_at_the_end_of_a_file(monkeypatch):
    """Guards: an editor's final newline counting as a change."""
    editing(monkeypatch, "open(path, 'w').write(text + '')")
    assert editor.edit("no newline") is None
    assert editor.edit("one newline\n") is None
    editing(monkeypatch, "open(path, 'w').write('a\\n')")
    assert editor.edit("b") == "a"


# -- interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", range(8))
def test_interrupts_leave_chat_and_state_agreeing(engine, looks):
    """Guards: a torn state, a lost message, or a reply that differs after an interrupt."""
    chat = talk.chat(engine, "the first", settings=replace(engine.settings, max_tokens=6))
    chat.stopped_after(looks, "the second")
    check(chat)
    answered = len(chat.line.turns) == 4
    assert chat.draft == ("" if answered else "the second")
    if answered and chat.line.turns[-1].is_cut:
        chat.take("/continue")
    else:
        chat.take(chat.draft or "more")
    check(chat)
    check_replies(chat, engine)


@pytest.mark.parametrize("looks", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "text", ["/undo", "/clear", "/edit 1 changed", "/retry", "/system Be brief."]
)
def test_interrupted_commands(engine, looks, text):
    """Guards: a command stopped half way leaving the chat in a place of its own."""
    chat = talk.chat(engine, "/system Long enough to be a mark of its own.", "the first", "and")
    chat.stopped_after(looks, text)
    check(chat)
    chat.take("after it")
    check(chat)
    check_reply(chat, engine, len(chat.line.turns))


def test_a_cut_reply_goes_on_without_reading(engine):
    """Guards: /continue reading anything, or continuing with another text than an uncut reply."""
    whole = talk.chat(engine, "tell me", settings=replace(engine.settings, max_tokens=20))
    chat = talk.chat(engine, "tell me", settings=replace(engine.settings, max_tokens=5))
    assert chat.line.turns[1].finish_reason == "length"
    chat.take("/set max_tokens 15")
    fed = chat.counters.fed_tokens
    report = chat.conversation.catch_up(talk.Watch())
    assert chat.counters.fed_tokens == fed and report.forwards == 0
    chat.take("/continue")
    assert chat.line.turns[1].tokens == whole.line.turns[1].tokens
    assert chat.line.turns[1].content == whole.line.turns[1].content


def test_a_stopped_retry_keeps_the_reply(said):
    """Guards: Ctrl-C right after /retry leaving a message without any reply."""
    before = said.line
    said.stopped_after(0, "/retry")
    assert said.line == before and said.draft == ""
    check(said)
    said.take("more")
    check(said)


def test_a_stopped_edit_keeps_the_conversation(said):
    """Guards: Ctrl-C while an edited message is read removing the old message and what follows."""
    before = said.line
    said.stopped_after(0, "/edit 1 changed")
    assert said.line == before and said.draft == "changed"


# -- settings, system text, files ----------------------------------------------------------------


def test_set(said, capsys):
    """Guards: /set without effect, with a bad value, or for a setting that is fixed."""
    said.take("/set temp 0.7")
    assert said.settings.temp == 0.7
    said.take("/set temp")
    assert "temp = 0.7" in capsys.readouterr().err
    for text in ("/set temp hot", "/set model x", "/set tmp 1", "/set top_p 2"):
        said.take(text)
        assert "error:" in capsys.readouterr().err
    said.take("/set")
    assert "max_tokens" in capsys.readouterr().err
    assert said.settings.temp == 0.7


def test_sampling_settings_take_effect(engine):
    """Guards: a new temperature or seed that only the display knows of."""
    chat = talk.chat(engine, "say", "/undo", "/set temp 1.5", "/set seed 3", "say")
    fresh = talk.chat(engine, "say", settings=replace(engine.settings, temp=1.5, seed=3))
    assert chat.line.turns[1].tokens == fresh.line.turns[1].tokens


def test_system_text_is_what_a_new_chat_would_have(said, engine):
    """Guards: a changed system text that stands somewhere else than at the top."""
    said.take("/system Be brief.")
    said.take("/undo 2")
    said.take("hello")
    fresh = talk.chat(engine, settings=replace(engine.settings, system="Be brief."))
    fresh.take("hello")
    assert said.line.tokens == fresh.line.tokens


def test_files_go_with_the_next_message(said, tmp_path, capsys):
    """Guards: a file sent twice, or not at all, or a binary one sent as noise."""
    (tmp_path / "a.txt").write_text("file text\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    said.take("/file a.txt")
    said.take("what is it?")
    assert texts(said)[-2] == "file text\n\nwhat is it?"
    said.take("and?")
    assert texts(said)[-2] == "and?"
    for name in ("b.bin", "none", "."):
        said.take(f"/file {name}")
        assert "error:" in capsys.readouterr().err


def test_a_file_that_does_not_fit_is_not_attached(said, engine, tmp_path, capsys, monkeypatch):
    """Guards: a file that blocks every message from then on, even behind /clear."""
    (tmp_path / "big.txt").write_text("x" * 900)
    (tmp_path / "small.txt").write_text("y")
    monkeypatch.setattr(engine, "context_tokens", len(said.line.tokens) + 400)
    for name in ("big.txt", "*.txt"):
        said.take(f"/file {name}")
        assert "has room for `400`" in capsys.readouterr().err and not said.attached.files
    said.take("/file small.txt")
    said.take("/file big.txt")
    assert [file.name for file in said.attached.files] == ["small.txt"]
    said.take("/clear")
    assert not said.attached.files


def test_files_are_listed_dropped_and_found_by_patterns(said, tmp_path, capsys):
    """Guards: what is attached that nobody sees or can take back; a pattern taken for a name."""
    for name in ("b.py", "a.py", "[x].py", "c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "d.py").mkdir()
    said.take("/file ?.py")
    said.take("/file [x].py")
    said.take("/file")
    assert "attached: `a.py` (4 tokens), `b.py` (4 tokens), `[x].py`" in capsys.readouterr().err
    said.take("/file -a.py")
    said.take("/file -c.txt")
    assert "`c.txt` is not attached" in capsys.readouterr().err
    said.take("/file *.md")
    assert "no file matches `*.md`" in capsys.readouterr().err
    assert said.attached.before("t") == "b.py\n\n[x].py\n\nt"
    said.take("/file -")
    assert not said.attached.files


def test_counters_cover_the_reply_they_stand_under(said, capsys):
    """Guards: tokens that /undo took back counted again under the next reply."""
    said.take("/undo")
    assert "tokens dropped" in capsys.readouterr().err
    said.take("another")
    line = capsys.readouterr().err.splitlines()[-1]
    assert "tok/s" in line and "back" not in line
    said.take("/edit 3 other words")
    assert re.search(r" · back \d+ tokens in \d+ ms", capsys.readouterr().err)


def test_a_full_context_is_said_before_the_reply(hybrid_folder, capsys):
    """Guards: silently dropped turns, or a crash, when the context is full."""
    engine = talk.load(hybrid_folder)
    engine.context_tokens = 70
    talk.chat(engine).take("x" * 100)
    assert "hint: shorten it" in capsys.readouterr().err, "there is nothing to undo"
    chat = talk.chat(engine, "hello there")
    chat.take("x" * 100)
    message = capsys.readouterr().err
    assert "context is full" in message and "/undo" in message
    assert chat.draft == "x" * 100 and len(chat.line.turns) == 2
    chat.take("more")
    assert "nearly full" in capsys.readouterr().err
    assert chat.session.pos <= 70
    check(chat)


# -- tools ---------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}


@pytest.fixture
def calling(engine, monkeypatch):
    """A chat whose last reply called two tools."""
    tools = [Tool("clock", "", {"type": "object"}, ("cat",))]
    chat = talk.chat(engine, "what time is it?")
    chat.conversation.tools = tools
    monkeypatch.setattr(chat.conversation, "guard", lambda line, begun: None)
    last = replace(chat.line.turns[-1], finish_reason="tool", calls=(CALL, CALL))
    chat.conversation.transcript.say(chat.line.upto(1).plus(last))
    return chat


def test_typed_text_is_the_result_of_a_call(calling, engine):
    """Guards: a result sent as the user's words, or the model going on before all are there."""
    calling.take("it is noon")
    assert len(calling.line.turns) == 2
    calling.take("it is one")
    assert [turn.role for turn in calling.line.turns[2:]] == ["tool", "tool", "assistant"]
    assert [turn.content for turn in calling.line.turns[2:4]] == ["it is noon", "it is one"]
    check(calling)
    check_replies(calling, engine)


def test_calls_run_only_when_the_user_says_so(calling, capsys):
    """Guards: a command of the tools file run by itself, or /run without effect."""
    calling.take("/run")
    assert '{"a": 1}' in capsys.readouterr().err
    calling.take("/skip")
    assert [turn.content for turn in calling.line.turns[2:4]] == [
        '{"a": 1}',
        "The user skipped this call.",
    ]
    calling.take("/run")
    assert "no tool" in capsys.readouterr().err


def test_a_call_can_be_taken_back(calling):
    """Guards: a chat stuck waiting for a result after /undo."""
    calling.take("it is noon")
    calling.take("/undo")
    assert calling.line.turns == ()
    calling.take("hello")
    assert [turn.role for turn in calling.line.turns] == ["user", "assistant"]


def call_for_ever(chat, monkeypatch) -> None:
    """Make every further reply of the chat end with a call of `clock`."""
    answer = chat.conversation.answer

    def calling_answer(watch, attempt=0):
        yield from answer(watch, attempt)
        line = chat.line
        last = replace(line.turns[-1], finish_reason="tool", calls=(CALL,))
        chat.conversation.transcript.say(line.upto(len(line.turns) - 1).plus(last))

    monkeypatch.setattr(chat.conversation, "answer", calling_answer)


def test_nothing_runs_unasked_by_default(calling, monkeypatch):
    """Guards: the command of a tools file run because a model asked for it."""
    call_for_ever(calling, monkeypatch)
    monkeypatch.setattr("ds4cli.tools.run_tool", lambda *_: pytest.fail("was run"))
    calling.take("/undo")
    calling.take("what time is it now?")
    assert calling.conversation.open_calls == (CALL,)


def test_named_tools_run_unasked_but_not_for_ever(calling, monkeypatch, capsys):
    """Guards: `--yes-tools` without effect, or a model that calls a tool in a loop without end."""
    call_for_ever(calling, monkeypatch)
    monkeypatch.setattr("ds4cli.chat.calls.MAX_UNASKED", 3)
    calling.request = replace(calling.request, yes_tools=("clock",), quiet=True)
    calling.take("/undo")
    assert not calling.line.turns
    calling.take("what time is it now?")
    results = [turn.content for turn in calling.line.turns if turn.role == "tool"]
    assert results == ['{"a": 1}'] * 3
    shown = capsys.readouterr().err
    assert shown.count("ran clock: 8 characters") == 3 and "3 runs in a row" in shown
    assert calling.conversation.open_calls == (CALL,)
    check(calling)


def test_a_stored_call_does_not_run_when_it_comes_back(calling, monkeypatch):
    """Guards: a call run because the user went back to it."""
    calling.request = replace(calling.request, yes_tools=("clock",))
    monkeypatch.setattr("ds4cli.tools.run_tool", lambda *_: pytest.fail("was run"))
    calling.take("/undo")
    calling.take("/redo")
    assert calling.conversation.open_calls == (CALL, CALL)


def test_only_declared_tools_with_a_command_may_run_unasked():
    """Guards: a name that was mistyped being noticed only when its tool is called."""
    tools = [Tool("clock", "", {}, ("date",)), Tool("search", "", {})]
    assert asked.unasked(["clock, clock"], tools) == ("clock", "clock")
    with pytest.raises(UsageError, match="no tool `clok`") as caught:
        asked.unasked(["clok"], tools)
    assert caught.value.hint == "did you mean `clock`?"
    with pytest.raises(UsageError, match="`search` has no command"):
        asked.unasked(["clock,search"], tools)


def test_abort_drops_the_call_and_keeps_it_as_a_branch(calling, capsys):
    """Guards: /abort losing the message or the reply that it takes back."""
    dropped = calling.line
    calling.take("/abort")
    assert calling.line.turns == () and calling.draft == "what time is it?"
    assert "the call is dropped: change your message" in capsys.readouterr().err
    check(calling)
    calling.take("/redo")
    assert calling.line == dropped and calling.conversation.open_calls == (CALL, CALL)
    calling.take("/abort")
    calling.take("something else")
    assert dropped in calling.conversation.transcript.branches().values()


@pytest.mark.parametrize("unasked", [False, True], ids=["run", "unasked"])
def test_a_stopped_command_leaves_its_call_waiting(calling, monkeypatch, capsys, unasked):
    """Guards: Ctrl-C that waits for a tool, ends the chat, or sends half a result."""
    command = ("sh", "-c", "echo half; sleep 30")
    calling.conversation.tools = [Tool("clock", "", {"type": "object"}, command)]
    line = calling.line
    if unasked:
        calling.request = replace(calling.request, yes_tools=("clock",), quiet=True)
        monkeypatch.setattr(commands, "run", lambda chat, _: setattr(chat.calls, "is_new", True))
    calling.stopped_after(3, "/run")
    assert "stopped clock after" in capsys.readouterr().err
    assert calling.line == line and not calling.calls.results
    calling.request = replace(calling.request, yes_tools=())
    calling.take("noon")
    calling.take("one")
    assert [turn.content for turn in calling.line.turns[2:4]] == ["noon", "one"]
    check(calling)


@pytest.mark.parametrize("printed", ["'word ' * 100_000", "'\\0' * 100_000"])
def test_a_tool_that_prints_too_much(hybrid_folder, monkeypatch, capfd, printed):
    """Guards: ten megabytes that fill the context or the input line, or a call that is lost."""
    engine = talk.load(hybrid_folder, max_tokens=4)
    chat = talk.chat(engine, "what time is it?")
    engine.context_tokens = len(chat.line.tokens) + 400
    command = (sys.executable, "-c", f"print({printed})")
    chat.conversation.tools = [Tool("clock", "", {"type": "object"}, command)]
    monkeypatch.setattr(chat.conversation, "guard", lambda line, begun: None)
    last = replace(chat.line.turns[-1], finish_reason="tool", calls=(CALL,))
    chat.conversation.transcript.say(chat.line.upto(1).plus(last))
    chat.take("/run")
    shown = capfd.readouterr().err
    assert "Token indices" not in shown and not chat.draft
    if not chat.conversation.open_calls:
        assert "[output cut]" in chat.line.turns[2].content
    else:
        assert "context is full" in shown and "type a shorter result" in shown
        chat.take("/skip")
        assert not chat.conversation.open_calls
    check(chat)


@pytest.fixture
def hermes(monkeypatch):
    """Tool calls as Hermes writes them, whatever the template says."""
    found = FORMATS["json_tools"]
    monkeypatch.setattr("ds4cli.tools.guard.require_format", lambda _: found)


def test_edited_arguments_are_the_calls(engine, hermes):
    """Guards: a call run with the arguments it had before it was edited, or its other tokens
    encoded again."""
    chat = talk.chat(engine, "what time is it?")
    chat.conversation.tools = [Tool("clock", "", {"type": "object"}, ("cat",))]
    text = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
    last = replace(chat.line.turns[-1], tokens=tuple(engine.encode(text)), calls=(CALL,))
    chat.conversation.transcript.say(chat.line.upto(1).plus(replace(last, finish_reason="tool")))
    chat.take("/edit 2 " + text.replace("1", "23"))
    edited = chat.line.turns[-1]
    assert [call["function"]["arguments"] for call in edited.calls] == ['{"a": 23}']
    assert (edited.finish_reason, edited.content.strip()) == ("tool", "")
    same = common_prefix(edited.tokens, last.tokens)
    assert len(edited.tokens) == len(last.tokens) + 1
    assert edited.tokens[same + 2 :] == last.tokens[same + 1 :]
    check(chat)


def test_a_call_that_fits_no_more_goes_on_with_a_note(engine, hermes, capsys):
    """Guards: a reply that nobody watches any more, without a word."""
    chat = talk.chat(engine, "what time is it?")
    chat.conversation.tools = [Tool("clock", "", {"type": "object"})]
    chat.take('/edit 2 <tool_call>\n{"name": "nothing", "arguments": {')
    assert chat.conversation.open_calls == ()
    chat.take("/continue")
    assert "it goes on unwatched" in capsys.readouterr().err


def test_stored_calls_still_wait(calling, engine):
    """Guards: a call forgotten when the session is opened again."""
    calling.take("/save waiting")
    calling.end()
    again = talk.chat(engine, name="waiting")
    assert again.conversation.open_calls == (CALL, CALL)
    again.end()


def test_a_result_whose_reading_was_stopped_comes_back(calling):
    """Guards: a long result typed and lost."""
    calling.take("noon")
    calling.stopped_after(0, "one")
    assert calling.draft == "one" and len(calling.line.turns) == 2
    calling.take("two")
    assert [turn.content for turn in calling.line.turns[2:4]] == ["noon", "two"]


def test_going_back_to_a_call(calling):
    """Guards: a line that ends in the middle of a call's results."""
    for text in ("noon", "one"):
        calling.take(text)
    calling.take("/edit 3 other")
    assert len(calling.line.turns) == 5
    calling.take("/rewind 4")
    assert len(calling.line.turns) == 2 and calling.conversation.open_calls
    check(calling)


def test_results_are_stored(calling):
    """Guards: a stored result that no longer says which call it answers."""
    calling.take("/save results")
    for text in ("noon", "one"):
        calling.take(text)
    calling.end()
    stored = journal.read(shelf.path_of("results")).transcript.line
    assert stored == calling.line and stored.turns[2].calls == (CALL,)


# -- failures ------------------------------------------------------------------------------------


def test_a_failing_model_leaves_the_chat_as_it_was(said, monkeypatch, capsys):
    """Guards: a chat lost, or a message without its reply, because the device ran out of memory."""
    before = said.line

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(said.session, "next_token", fail)
        said.take("more")
    assert "out of memory" in capsys.readouterr().err
    assert said.line == before and said.draft == "more"
    said.take("more")
    assert len(said.line.turns) == 6
    check(said)


def test_a_session_has_one_name_however_it_is_typed():
    """Guards: `café` typed on a Mac, as five characters, refused, or another session than four."""
    assert shelf.path_of("cafe\u0301") == shelf.path_of("caf\u00e9")
    path = shelf.path_of("caf\u00e9")
    path.with_name("e\u0301t.jsonl".replace(".jsonl", journal.SUFFIX)).write_text("", "utf-8")
    assert shelf.names() == ["\u00e9t"]


def test_a_full_disk_does_not_stop_the_chat(said, monkeypatch, capsys):
    """Guards: a reply lost, or a torn file, when the session cannot be written."""
    said.take("/save full")
    path = shelf.path_of("full")
    size = path.stat().st_size

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        said.take("more")
    assert "no space left" in capsys.readouterr().err and path.stat().st_size == size
    said.take("and more")
    assert journal.read(path).transcript.line == said.line
    said.end()


def test_branches_survive_an_unanswered_message(engine):
    """Guards: named branches lost when a killed session is opened."""
    chat = talk.chat(engine, "the first", "/branch idea", name="killed")
    chat.conversation.ask(Turn("user", "the second"), watch=talk.Watch())
    chat.conversation.close()
    again = talk.chat(engine, name="killed")
    assert sorted(again.conversation.transcript.branches()) == ["idea", "main"]
    again.end()


# -- commands ------------------------------------------------------------------------------------

WRONG = (
    "/undo x", "/undo 9", "/undo 0", "/undo -1", "/redo", "/redo 1", "/retry 9", "/retry x",
    "/edit 9", "/edit x", "/rewind", "/rewind 9", "/rewind x", "/continue", "/continue 1",
    "/branch a b", "/branch main", "/branch ~1", "/branches x", "/switch", "/switch nowhere",
    "/turns 9", "/turns x", "/clear x", "/stats x", "/raw x", "/set nothing", "/file nothing",
    "/load", "/load nothing", "/load ../x", "/save ../x", "/save a/b", "/sessions x", "/help x",
    "/exit x", "/", "/unknown", "/UNDO",
)  # fmt: skip


def test_wrong_arguments_change_nothing(said, capsys):
    """Guards: a mistyped command that does something else, or a traceback."""
    said.conversation.transcript.line = finished(said.line)
    before = said.conversation.transcript.copy()
    for text in WRONG:
        said.take(text)
        assert "error:" in capsys.readouterr().err, text
        assert said.conversation.transcript == before and not said.is_over, text
    check(said)


def finished(line):
    """The line with its last reply complete: nothing to continue."""
    return line.upto(len(line.turns) - 1).plus(replace(line.turns[-1], finish_reason="stop"))


@pytest.mark.parametrize("name", sorted(commands.COMMANDS))
def test_every_command_runs_in_an_empty_chat(engine, monkeypatch, name):
    """Guards: a traceback for a command that is given too early."""
    monkeypatch.setenv("VISUAL", "true")
    chat = talk.chat(engine, f"/{name}")
    check(chat)
    assert chat.line.turns == ()


def test_unknown_commands_name_the_nearest(said, capsys):
    """Guards: a typo being sent to the model."""
    said.take("/udno")
    error = capsys.readouterr().err
    assert "`/undo`" in error and "//" in error and len(said.line.turns) == 4


def test_a_message_may_begin_with_a_slash(said):
    """Guards: text about paths or commands that cannot be sent."""
    said.take("//etc/passwd is a file")
    assert texts(said)[-2] == "/etc/passwd is a file"
    said.take("/usr/bin/x: line 1\nerror")
    assert texts(said)[-2] == "/usr/bin/x: line 1\nerror"


def test_looking_changes_nothing(said, capsys):
    """Guards: a listing that moves the session or writes to stdout, where only replies go."""
    before, pos = said.line, said.session.pos
    capsys.readouterr()
    for text in ("/turns", "/turns 1", "/turns 0", "/branches", "/stats", "/help", "/help undo",
                 "/sessions", "/set", "/system", "/?"):  # fmt: skip
        said.take(text)
    shown = capsys.readouterr()
    assert shown.out == "" and "the first" in shown.err and "/undo" in shown.err
    assert said.line == before and said.session.pos == pos


def test_raw_prints_the_last_reply(said, capsys):
    """Guards: a rendered or shortened reply where the exact text was asked for."""
    capsys.readouterr()
    said.take("/raw")
    assert capsys.readouterr().out == texts(said)[-1] + "\n"


def test_help_names_every_command(said, capsys):
    """Guards: a command that nobody can find."""
    said.take("/help")
    shown = capsys.readouterr().err
    assert all(f"/{name}" in shown for name in commands.COMMANDS)


def test_the_readme_lists_every_command():
    """Guards: a command that only its author knows."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    chapter = readme.split("## Chat\n")[1].split("\n## ")[0]
    missing = [name for name in commands.COMMANDS if f"`/{name}" not in chapter]
    assert missing == ["help", "exit"]


def test_completion(said, tmp_path):
    """Guards: Tab offering nothing, or completing inside a message."""
    (tmp_path / "notes.md").write_text("x")
    assert commands.complete(said, "/und") == (["/undo"], 4)
    assert commands.complete(said, "/rewind ")[0] == ["1", "2", "3", "4"]
    assert commands.complete(said, "/switch m") == (["main"], 1)
    assert commands.complete(said, "/file no") == (["notes.md"], 2)
    assert "temp" in commands.complete(said, "/set ")[0]
    assert commands.complete(said, "hello /und") == ([], 0)


# -- sessions on disk ----------------------------------------------------------------------------


def test_a_session_goes_on_where_it_was(engine):
    """Guards: turns, branches or ids lost between two runs."""
    chat = talk.chat(engine, "the first", "/branch idea", "the second", name="work")
    line, named = chat.line, chat.conversation.transcript.named
    chat.end()
    again = talk.chat(engine, name="work")
    assert again.line == line and again.conversation.transcript.named == named
    again.take("the third")
    check_replies(again, engine)
    again.end()
    assert len(journal.read(shelf.path_of("work")).transcript.line.turns) == 6


@pytest.mark.parametrize("bad", [-1, 10**9])
def test_a_session_with_ids_that_are_no_tokens_is_refused(engine, bad):
    """An id in a session file that the model has no row for: the process died of it."""
    talk.chat(engine, "one", name="bad").end()
    path = shelf.path_of("bad")
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r'("tokens": ?\[)\d+', rf"\g<1>{bad}", text), encoding="utf-8")
    with pytest.raises(StateError, match=f"holds what are no tokens: token id `{bad}`"):
        talk.chat(engine, name="bad")


def test_continue_takes_the_latest(engine):
    """Guards: -c opening another session than the one written last, or a new one."""
    talk.chat(engine, "one", name="a").end()
    talk.chat(engine, "two", name="b").end()
    again = talk.chat(engine, resume=True)
    assert again.name == "b" and texts(again)[0] == "two"
    again.end()


def test_continue_passes_over_what_is_no_session(engine):
    """Guards: one foreign or torn file in the sessions folder, and nothing can be continued."""
    talk.chat(engine, "one", name="a").end()
    folder = shelf.private_folder("sessions")
    for name, text in (("notes", "my notes\n"), ("torn", '{"format": 1, "mod')):
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "empty.jsonl").touch()
    assert shelf.latest().stem == "a"
    talk.chat(engine, "two", name="torn").end()
    assert len(journal.read(shelf.path_of("torn")).transcript.line.turns) == 2


def test_nothing_to_continue(engine):
    """Guards: a traceback for -c on a fresh machine."""
    with pytest.raises(UsageError):
        talk.chat(engine, resume=True)
    with pytest.raises(UsageError):
        talk.chat(engine, resume=True, name="nothing")


def test_with_cache_nothing_is_read_again(engine):
    """Guards: a session file that holds the texts only, so that everything is read again."""
    chat = talk.chat(engine, "the first", "the second", name="warm", with_cache=True)
    line = chat.line
    chat.end()
    again = talk.chat(engine, name="warm")
    assert again.session.tokens == line.tokens and again.counters.fed_tokens == 0
    again.take("/undo")
    assert again.counters.fed_tokens <= 32
    again.take("more")
    check_replies(again, engine)
    again.end()


@pytest.mark.parametrize("kind", ["bytes", "tree"])
def test_a_broken_cache_is_ignored_with_a_note(engine, capsys, kind):
    """Guards: a damaged state file, or a whole one with another tree, making the chat unusable."""
    talk.chat(engine, "the first", name="torn", with_cache=True).end()
    cache = shelf.cache_of(shelf.path_of("torn"))
    if kind == "bytes":
        cache.write_bytes(b"broken")
    else:
        storage.write(cache, {"kv": "whole", "layers": []}, engine.fingerprint)
    again = talk.chat(engine, name="torn")
    assert capsys.readouterr().err.count("not used") == 1
    again.take("more")
    check_replies(again, engine)
    again.end()


def test_a_chat_that_ranks_kept_goes_on_without_them(engine, monkeypatch, capsys):
    """Guards: a cut reply lost, and "read again", for the same model on another number of ranks."""
    with monkeypatch.context() as ranks:
        ranks.setattr(engine, "held_fingerprint", "of two ranks")
        talk.chat(engine, "the first", name="ours").end()
    again = talk.chat(engine, name="ours")
    assert "read again" not in capsys.readouterr().err
    check_replies(again, engine)
    again.end()


def test_a_chat_of_another_model_is_read_as_text(engine, capsys):
    """Guards: foreign token ids being fed to a model."""
    talk.chat(engine, "the first", name="old").end()
    path = shelf.path_of("old")
    path.write_text(path.read_text().replace(engine.fingerprint, "another"))
    again = talk.chat(engine, name="old")
    assert "read again" in capsys.readouterr().err and texts(again)[0] == "the first"
    again.end()
    talk.chat(engine, name="old").end()
    assert "read again" not in capsys.readouterr().err


def test_a_message_without_its_reply_comes_back(engine, capsys):
    """Guards: a kill while the model wrote losing the message, or blocking the session."""
    chat = talk.chat(engine, "the first", name="killed")
    chat.conversation.ask(Turn("user", "the second"), watch=talk.Watch())
    chat.conversation.close()  # as a kill would
    again = talk.chat(engine, name="killed")
    assert again.draft == "the second" and len(again.line.turns) == 2
    again.take(again.draft)
    check_replies(again, engine)
    again.end()


def test_save_renames_a_chat_without_a_name(engine):
    """Guards: every saved chat lying around twice."""
    chat = talk.chat(engine, "one", "/save mine", "two", "/save copy", "three")
    chat.end()
    assert sorted(shelf.names()) == ["copy", "mine"]
    assert len(journal.read(shelf.path_of("mine")).transcript.line.turns) == 4
    assert len(journal.read(shelf.path_of("copy")).transcript.line.turns) == 6


def test_save_renames_a_chat_that_was_taken_up_again(engine):
    """Guards: /save after `-c` leaving the chat under its time as well, and its state there."""
    talk.chat(engine, "one", with_cache=True, name="2026-01-02-030405").end()
    chat = talk.chat(engine, "two", "/save mine", resume=True)
    chat.end()
    assert shelf.names() == ["mine"]
    assert [path.stem for path in shelf.private_folder("sessions").glob("*.safetensors")] == [
        "mine"
    ]


def test_nothing_is_no_copy():
    """Guards: "copied 0 characters" over what the clipboard held, behind a reply that was cut while
    it was reasoning."""
    empty = SimpleNamespace(last=lambda role: 2, turn=lambda number: Turn("assistant", ""))
    with pytest.raises(UsageError, match="the last reply has no text"):
        commands.copy(SimpleNamespace(line=empty), "")


def test_turns_show_calls(calling, capsys):
    """Guards: a reply that is nothing but a call standing there empty."""
    calling.take("/turns")
    assert 'clock {"a": 1}' in capsys.readouterr().err


def test_load_leaves_the_present_chat_in_its_file(engine):
    """Guards: /load overwriting either chat."""
    talk.chat(engine, "one", name="a").end()
    chat = talk.chat(engine, "two", "/save b", "/load a", "three")
    chat.end()
    contents = {n: journal.read(shelf.path_of(n)).transcript.line.turns for n in ("a", "b")}
    assert [t.content for t in contents["b"] if t.role == "user"] == ["two"]
    assert [t.content for t in contents["a"] if t.role == "user"] == ["one", "three"]


def test_no_file_for_an_empty_chat(engine):
    """Guards: a list of sessions full of chats in which nothing was said."""
    talk.chat(engine, "/help").end()
    assert shelf.names() == []


def test_no_save(engine):
    """Guards: a chat being kept against the user's wish."""
    talk.chat(engine, "one", save=False).end()
    assert shelf.names() == []


def test_the_stored_model_is_the_default(engine):
    """Guards: -c loading the built-in model for a chat with another."""
    talk.chat(engine, "one", name="a").end()
    request = ChatRequest(resume=True)
    other = replace(engine.settings, model="other")
    assert asked.settings_for(request, other, False).model == engine.settings.model
    assert asked.settings_for(request, other, True).model == "other"


# -- any order of commands -----------------------------------------------------------------------

MOVES = st.sampled_from(
    ["hi", "tell me more", "/undo", "/undo 2", "/redo", "/retry", "/retry 2", "/edit 1 changed",
     "/edit 2 other words", "/rewind 2", "/rewind 1", "/continue", "/clear", "/branch",
     "/switch main", "/switch ~1", "/system Be brief.", "/system Be long and careful, always."]
)  # fmt: skip


COURSES = st.lists(st.tuples(MOVES, st.none() | st.integers(0, 6)), max_size=12)
ONE_ENGINE = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@given(COURSES)
@settings(max_examples=12, **ONE_ENGINE)
def test_any_course_of_commands(engine, moves):
    """Guards: an order of commands and interrupts after which state and transcript differ."""
    go(engine, moves)


@pytest.mark.slow
@given(COURSES)
@settings(max_examples=100, **ONE_ENGINE)
def test_many_courses_of_commands(engine, moves):
    """The long run of the same."""
    go(engine, moves)


def go(engine, moves):
    chat = talk.chat(engine, settings=replace(engine.settings, max_tokens=6), save=False)
    for text, looks in moves:
        if looks is None:
            chat.take(text)
        else:
            chat.stopped_after(looks, text)
        check(chat)
    chat.take("and now?")
    check(chat)
    check_reply(chat, engine, len(chat.line.turns))


# -- input ---------------------------------------------------------------------------------------


class Stream:
    """A pipe with bytes in it."""

    def __init__(self, data: bytes):
        import io

        self.buffer = io.BytesIO(data)


def read_all(data: bytes, single: bool = False) -> list[str]:
    reader, found = prompt.PipeReader(Stream(data), single), []
    while True:
        try:
            found.append(reader.read())
        except EOFError:
            return found


def test_a_pipe_is_one_message_a_line():
    """Guards: lost last lines, carriage returns, fences and continued lines in scripts."""
    assert read_all(b"a\nb\r\n\nc") == ["a", "b", "", "c"]
    assert read_all(b"a\\\nb\nc\n") == ["a\nb", "c"]
    assert read_all(b'"""a\nb"""\nc\n') == ["a\nb", "c"]
    assert read_all(b'"""a\nb') == ['"""a\nb']
    assert read_all(b"\xef\xbb\xbfa\n") == ["a"]
    assert read_all(b"a\nb\n", single=True) == ["a\nb"]
    assert read_all(b"C:\\\\\nb\n") == ["C:\\\\", "b"]


def test_a_pipe_that_is_no_text():
    """Guards: a traceback for a binary file on standard input."""
    with pytest.raises(UsageError):
        read_all(b"\xff\xfe\n")


def test_quotes_inside_a_message_stay():
    """Guards: fences taken off text that only mentions them."""
    assert prompt.message_of('say """ twice') == 'say """ twice'
    assert prompt.message_of('"""\nx\n"""') == "x"
    assert prompt.message_of('"""') == '"""'
    code = '"""Doc."""\nx = """y"""'
    assert prompt.message_of(code) == code and not prompt.is_open(code)
    assert not prompt.is_open('"""Doc."""\nx = 1') and prompt.is_open('"""Doc.\nmore')
    assert prompt.message_of("a\\\nb") == "a\\\nb"


def test_history(tmp_path):
    """Guards: multi-line entries torn apart, a file others can read, a bad line losing the rest."""
    file = prompt.HistoryFile(tmp_path / "h.jsonl")
    assert file.load() == []
    file.append("one")
    file.append("two\nlines 🙂")
    with file.path.open("ab") as raw:
        raw.write(b"broken\n[1]\n")
    file.append("three")
    assert file.load() == ["one", "two\nlines 🙂", "three"]
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_history_is_bounded(tmp_path):
    """Guards: a history file that grows for ever."""
    file = prompt.HistoryFile(tmp_path / "h.jsonl")
    file.path.write_text("".join(f'"{i}"\n' for i in range(2500)))
    assert len(file.load()) == 1000 and file.load()[-1] == "2499"
    assert len(file.path.read_text().splitlines()) == 1000


def test_a_setting_that_the_template_refuses_changes_nothing(tmp_path):
    """Guards: `/set think true` fails for want of such a switch, and is half in force."""
    template = TEMPLATE.replace("enable_thinking", "other")
    engine = Engine.load(save_folder(tmp_path / "m", template=template))
    conversation = Conversation(engine, engine.settings)
    before = conversation.settings, conversation.scribe, conversation.session.sampler
    with pytest.raises(UsageError, match="no switch"):
        conversation.use(replace(engine.settings, think=True))
    after = conversation.settings, conversation.scribe, conversation.session.sampler
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_folder_that_is_read_only(engine, monkeypatch, capsys):
    """Guards: an error below each reply; a model loaded for a named chat that cannot be kept."""
    monkeypatch.setattr(shelf.os, "access", lambda path, mode: False)
    chat = talk.chat(engine, "hello")
    assert chat.line.turns[1].is_reply and chat.conversation.journal is None and not chat.failures
    said = capsys.readouterr().err.replace("\n", "")
    assert said.count("read-only") == 1 and "not kept" in said
    for request in (ChatRequest(name="a"), ChatRequest(name="a", save=False)):
        with pytest.raises(UsageError, match="read-only"):
            asked.settings_for(request, engine.settings, False)
    monkeypatch.undo()
    talk.chat(engine, "hello", name="a")
    monkeypatch.setattr(shelf.os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="read-only"):
        asked.settings_for(ChatRequest(resume=True), engine.settings, False)


def test_two_chats_that_begin_in_one_second(engine, monkeypatch):
    """Guards: a chat that is not kept because another one took its name first."""
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-01-000000")
    first, second, third = (talk.chat(engine) for _ in range(3))
    for chat in (first, second):
        chat.take("hello")
    first.end()
    third.take("hello")
    names = [chat.name for chat in (first, second, third)]
    assert names == ["2026-01-01-000000", "2026-01-01-000000-2", "2026-01-01-000000-3"]
    assert all(chat.conversation.unsaved is None for chat in (first, second, third))
    for name in names:
        assert len(journal.read(shelf.path_of(name)).transcript.line.turns) == 2


def test_a_clock_that_jumps(engine, monkeypatch):
    """Guards: a reply or a file that hangs on the time of day: it may be set while a chat runs."""
    days = itertools.cycle([0.0, 4e9, 1e9, 2e9, 5.0])
    monkeypatch.setattr(time, "time", lambda: next(days))
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-01-000000")  # an hour that repeats
    first = talk.chat(engine, "hello", "/retry", "/save one")
    other = talk.chat(engine, "hello")
    assert other.line.turns[1].content and other.name != "one"
    other.end()
    third = talk.chat(engine, "again")
    assert third.name == "2026-01-01-000000-2" and len(shelf.names()) == 3
    for chat in (first, third):
        check(chat)
        check_replies(chat, engine)
