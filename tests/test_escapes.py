"""What a terminal is shown: nothing that a model, a file, a name or a message says can steer it."""

from __future__ import annotations

import base64
import io
import re
import shutil
import sys
import unicodedata
from types import SimpleNamespace

import pytest
import talk
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from ds4cli import terminal
from ds4cli.chat import clipboard
from ds4cli.chat.commands import COMMANDS
from ds4cli.chat.markdown import MarkdownWriter
from ds4cli.chat.prompt import visible_input
from ds4cli.cli import app
from ds4cli.escapes import visible

# A clipboard, a cleared screen, one-byte controls, an overwritten line, markup that makes a link,
# markup that ends what nobody began, reversed text, line ends that are none, invisible letters.
HOSTILE = (
    "a\x1b]52;c;aGk=\x07b\x1b[2Jc\x9b31md\re\x08[link=x]f[/link][/x]"
    "\u202eg\u2066h\u2028i\u2029j\U000e0041k\x7f"
)
# What Rich itself sends to a terminal: colours, the cursor, lines taken back.
OURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r?(\x1b\[\d+A)*\x1b\[(J|2K)|\x1b\[1A\r?")


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def __init__(self):
        super().__init__(io.BytesIO(), "utf-8", newline="\n")

    def isatty(self):
        return True

    @property
    def text(self):
        self.flush()
        return self.buffer.getvalue().decode("utf-8")


def screens_for(monkeypatch):
    """stdout and stderr as terminals, on which Rich styles and draws. Made inside a test: pytest
    puts its own streams in place before it begins."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    made = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", made[0])
    monkeypatch.setattr(sys, "stderr", made[1])
    return made


def hidden_in(shown: str) -> set[str]:
    """The characters in what was shown that no screen must get."""
    kinds = ("Cc", "Zl", "Zp", "Cf", "Cs")
    rest = OURS.sub("", shown)
    return {c for c in rest if unicodedata.category(c) in kinds and c not in "\n\t"}


def check(screens) -> str:
    """All that was shown; none of it steers."""
    shown = "".join(screen.text for screen in screens)
    assert hidden_in(shown) == set()
    assert "\x1b]" not in shown and "\x1b[2J" not in shown
    return OURS.sub("", shown)


def test_what_hides_becomes_an_escape():
    """A class of characters that is forgotten, or letters and emoji that are taken for one."""
    assert hidden_in(HOSTILE) and not hidden_in(visible(HOSTILE))
    assert visible("\x1b\u202e\U000e0041\ud800\r") == r"\x1b\u202e\U000e0041\ud800\x0d"
    for fine in ("a\r\nb\tc\n", "é漢字", "👩\u200d👩", "\u200cم", ""):
        assert visible(fine) == fine
    assert visible(visible(HOSTILE)) == visible(HOSTILE)


@pytest.mark.parametrize("console", ["out", "err"])
def test_the_consoles_escape_whatever_they_are_given(monkeypatch, console):
    """An output that forgets to escape: the consoles do it, for text and for Rich's own objects."""
    screens = screens_for(monkeypatch)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    for thing in (HOSTILE, Text(HOSTILE), table):
        getattr(terminal, console)().print(thing, style="dim")
    shown = check(screens)
    assert shown.count("[link=x]f[/link][/x]") == 5 and r"\x1b]52;c;aGk=\x07" in shown


def test_lines_of_our_own_escape(monkeypatch):
    """Errors, hints, notes, the spinner and reasoning are ways to a terminal too."""
    screens = screens_for(monkeypatch)
    terminal.fail(HOSTILE, HOSTILE)
    terminal.note(HOSTILE)
    terminal.show(HOSTILE)
    with terminal.status(HOSTILE) as spinner:
        terminal.err().print(spinner.renderable)
    writer = terminal.ReplyWriter(show_reasoning=True)
    writer.reasoning(HOSTILE)
    writer.answer(HOSTILE)
    writer.end()
    assert check(screens).count("[/x]") >= 7


def test_a_pipe_gets_the_reply_byte_for_byte(monkeypatch):
    """Escapes in what a script reads."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    terminal.ReplyWriter(show_reasoning=False).answer(HOSTILE)
    assert sys.stdout.getvalue() == HOSTILE


TEXTS = HOSTILE, f"# {HOSTILE}\n\n", f"```\n{HOSTILE}\n```\n", "&#8238;x", "&#13;&#x9b;\n\n"


@pytest.mark.parametrize("text", TEXTS)
def test_rendered_markdown_does_not_steer(monkeypatch, text):
    """A reply's control characters, or those that Markdown makes of entities."""
    screens = screens_for(monkeypatch)
    writer = MarkdownWriter(show_reasoning=False)
    writer.prime(HOSTILE)
    writer.answer(text)
    writer.end()
    check(screens)


def test_a_link_shows_its_target(monkeypatch):
    """A link that says one address and leads to another."""
    screens = screens_for(monkeypatch)
    writer = MarkdownWriter(show_reasoning=False)
    writer.answer("[https://good.example](https://bad.example/x)\n\n")
    writer.end()
    assert "[https://good.example](https://bad.example/x)" in check(screens)


def test_the_input_line_shows_what_hides_in_a_draft():
    """A message that comes back to be edited reverses the line; the cursor stands elsewhere."""
    given = SimpleNamespace(fragments=[("", "a\u202e"), ("bold", "b\x1bc")])
    shown = visible_input().apply_transformation(given)
    assert shown.fragments == [("", "a\\u202e"), ("bold", "b\\x1bc")]
    assert [shown.source_to_display(i) for i in range(7)] == [0, 1, 7, 8, 12, 13, 14]
    assert [shown.display_to_source(i) for i in (0, 1, 7, 8, 12, 13)] == [0, 1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def hostile_engine(model_folder, tmp_path_factory):
    """A model in a folder whose name is hostile (but for brackets, which mlx-lm cannot read)."""
    folder = tmp_path_factory.mktemp("models") / HOSTILE.translate(str.maketrans("[]", "()"))
    shutil.copytree(model_folder, folder)
    return talk.load(folder, max_tokens=3)


def test_a_copy_is_nothing_but_base64(monkeypatch):
    """A reply that steers the terminal through /copy; a copy that is cut or doubled."""
    screens = screens_for(monkeypatch)
    monkeypatch.setattr(clipboard, "PROGRAMS", ())
    assert clipboard.copy(HOSTILE) == ["the terminal"]
    start, end = "\x1b]52;c;", "\x07"
    shown = screens[0].text
    assert shown.startswith(start) and shown.endswith(end)
    inside = shown.removeprefix(start).removesuffix(end)
    assert base64.b64decode(inside, validate=True).decode() == HOSTILE
    monkeypatch.setattr(clipboard, "PROGRAMS", (("cat",),))
    assert clipboard.copy("x" * 80_000) == ["cat"]


def test_no_command_of_a_chat_steers(monkeypatch, hostile_engine):
    """Branch names, session lists, system texts, file names, messages and errors reach a terminal
    through the commands; markup in a branch name ended the chat."""
    screens = screens_for(monkeypatch)
    monkeypatch.setattr(clipboard, "copy", lambda text: ["the terminal"])  # see above
    monkeypatch.setenv("EDITOR", "true")
    chat = talk.chat(hostile_engine, f"/branch {HOSTILE}", f"/system {HOSTILE}", HOSTILE)
    chat.take("/save here")
    for argument in ("", HOSTILE, "1", f"1 {HOSTILE}", f"stop {HOSTILE}", "on"):
        for name in COMMANDS:
            chat.take(f"/{name} {argument}")
        chat.take(f"{HOSTILE} {argument}")
    chat.take(f"/{HOSTILE}")
    chat.end()
    shown = check(screens)
    assert "[link=x]f[/link][/x]" in shown and "here" in shown


ERRORS = (
    ["generate", "-m", HOSTILE, "x"],
    ["generate", "--model", f"o/{HOSTILE.replace('/', '')}", "--offline", "x"],
    ["generate", "-f", HOSTILE],
    ["generate", f"--{HOSTILE}", "x"],
    ["generate", "--temp", HOSTILE, "x"],
    ["generate", "--config", HOSTILE, "x"],
    ["generate", "--tools", HOSTILE, "x"],
    ["generate", "--batch", HOSTILE],
    ["generate", "--debug", "-m", HOSTILE, "x"],
    ["chat", "--session", HOSTILE],
    ["chat", "--yes-tools", HOSTILE],
    ["rewind-bench", HOSTILE],
    [HOSTILE],
)


@pytest.mark.parametrize("args", ERRORS)
def test_no_error_of_the_command_steers(args):
    """An error message, a hint or a traceback repeats what it was given."""
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 and done.stderr and not hidden_in(done.stdout + done.stderr)
