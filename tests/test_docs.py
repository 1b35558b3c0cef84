"""README, configs and examples say what the code does."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import tomli
import typer

from ds4cli import commands, errors, options
from ds4cli.settings import OPTIONS, Settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "ds4cli").glob("*/README.md"))


def section(title: str, page: str = README) -> str:
    """The text of a page, else README, under `## title`."""
    return re.split(rf"^## {title}$", page, flags=re.M)[1].split("\n## ")[0]


def tree() -> dict[str, str]:
    """Path -> description, from the file tree beside the code. Folders end with a slash."""
    page = (ROOT / "ds4cli" / "README.md").read_text(encoding="utf-8")
    block = section("Files", page).split("```")[1].strip("\n")
    found, folders = {}, []
    for line in block.splitlines():
        name, _, words = line.strip().partition("  ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        found["".join(folders) + name] = words.strip()
        if name.endswith("/"):
            folders.append(name)
    return found


def is_listed(path: str, listed: dict[str, str]) -> bool:
    """Listed itself, or inside a folder that is described as a whole; a subpackage's `__init__.py`
    is described by its folder."""
    folders = [path[: i + 1] for i, c in enumerate(path) if c == "/" and path[: i + 1] in listed]
    inside = [other for other in listed if folders and other.startswith(folders[-1])]
    return path in listed or len(inside) == 1 or path.endswith("/__init__.py")


def test_the_file_tree_is_true():
    """Guards: a reader looks for a file that is gone, or finds one that nobody explains."""
    listed = tree()
    folders = [ROOT / name for name in ("ds4cli", "configs", "examples", "tests")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    here = [path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts]
    missing = [path for path in here if not is_listed(path, listed)]
    gone = [path for path in listed if not (ROOT / path).exists()]
    assert (missing, gone) == ([], [])
    assert all(listed.values())


def table_rows(title: str) -> dict[str, list[str]]:
    return rows_of(section(title))


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the table in a text, by the first cell without backticks."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows[2:]}


def test_the_table_of_settings_is_true():
    """Guards: a flag or default in README that the program does not have."""
    rows = table_rows("Settings")
    assert list(rows) == list(OPTIONS)
    for name, (spellings, default, words) in rows.items():
        assert spellings == ", ".join(f"`{flag}`" for flag in options.flags(name, OPTIONS[name]))
        assert (default, words) == (options.default_words(name) or "-", OPTIONS[name].help)


def test_the_table_of_exit_codes_is_true():
    """Guards: a script relies on a code that no error has."""
    found = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}
    assert {int(code) for code in table_rows("Prompts, output, exit codes")} == found | {0}


def test_the_default_config_equals_the_defaults():
    """Guards: copying a line of the template changes a setting."""
    text = (ROOT / "configs" / "default.toml").read_text(encoding="utf-8")
    values = {name: asdict(Settings(**{name: v}))[name] for name, v in tomli.loads(text).items()}
    defaults = asdict(Settings())
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in defaults.items()}
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
    assert values == {name: value for name, value in given.items() if value is not None}
    assert all(re.search(rf"^(# )?{name} =", text, re.M) for name in OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_default_config_says_what_a_setting_takes(name):
    """Guards: a choice that nobody finds, or one that is gone."""
    text = (ROOT / "configs" / "default.toml").read_text(encoding="utf-8")
    option, said = OPTIONS[name], re.search(rf"((?:^# .*\n)+)(?:# )?{name} =", text, re.M)
    takes = {"One of: ": ", ".join(option.choices), "Wants ": option.wants}
    takes["Default: "] = option.unset
    words = [option.help, *(f"{begin}{rest}." for begin, rest in takes.items() if rest)]
    assert " ".join(line[2:] for line in said[1].splitlines()) == " ".join(words)


def test_commands_in_readme_exist():
    """Guards: an example with a flag that was renamed."""
    group = typer.main.get_command(commands.app)
    parameters = [p for command in group.commands.values() for p in command.params]
    flags = {flag for p in parameters for flag in (*p.opts, *p.secondary_opts)}
    pages = [README, *(path.read_text(encoding="utf-8") for path in PAGES)]
    ours = re.sub(
        r"`?python examples/[^`\n]*`?", "", "".join(pages)
    )  # scripts have flags of their own
    ours = re.sub(r"\(`examples/[^)]*\)", "", ours)
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))
    assert used <= flags


@pytest.mark.parametrize("name", ["settings.toml"])
def test_example_settings_are_read(name):
    """Guards: an example with a key that no longer exists."""
    from ds4cli.settings import read_config

    assert read_config(ROOT / "examples" / name).profiles


def test_the_python_example_runs(hybrid_folder):
    """Guards: the first program a reader copies fails."""
    script = str(ROOT / "examples" / "go_back.py")
    done = subprocess.run(
        [sys.executable, script, str(hybrid_folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "0 model calls" in done.stdout


@pytest.fixture
def example(monkeypatch, capsys):
    """Runs an example in this process, which has imported all that it needs; what it prints."""

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_cost_of_recording_is_measured(example, hybrid_folder):
    """Guards: the program behind a figure of the README fails."""
    said = example("recording_cost.py", hybrid_folder, "--context", 20, "--seconds", 0)
    assert "standard error" in said


def test_host_cost_is_counted(example, hybrid_folder):
    """Guards: the yardstick of what a token costs the host fails, or counts nothing."""
    said = example("host_cost.py", hybrid_folder, "--tokens", 2, "--nodes")
    counts = [[float(n) for n in line[24:].split()] for line in said.splitlines()[1:]]
    assert len(counts) == 3 and all(n > 0 for row in counts for n in row), said


def test_batches_are_timed_beside_mlx_lms(example, hybrid_folder):
    """Guards: the program behind the figures of batches fails, or compares no text."""
    few = ["--lanes", 1, 3, "--tokens", 4, "--prompt", 6, "--repeats", 1]
    said = example("batch_speed.py", hybrid_folder, *few)
    rows = [line.split() for line in said.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "3"]
    assert [row[4:7] for row in rows] == [["1", "of", "1"], ["3", "of", "3"]], said


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_say_how_they_are_called(path, monkeypatch, capsys):
    """Guards: `--help` taken for the name of a model."""
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage:")


def test_the_table_of_cache_kinds_is_whole():
    """Guards: a cache kind that nobody describes, or the description of one that is gone."""
    from ds4cli.caches.build import ADAPTERS

    page = (ROOT / "ds4cli" / "caches" / "README.md").read_text(encoding="utf-8")
    assert set(rows_of(section("The kinds", page))) == {a.__name__ for a in ADAPTERS.values()}


@pytest.mark.parametrize(
    "page", (ROOT / "ds4cli" / "README.md", *PAGES), ids=lambda p: p.parent.name
)
def test_the_call_lists_name_what_there_is(page):
    """Guards: a reader follows a step, a rewind or a repair to a function that is gone."""
    lists = page.read_text(encoding="utf-8").split("\n## Files\n")[0].splitlines()
    heads = [line.strip().partition("  ")[0] for line in lists if line.startswith("    ")]
    names = [name for head in heads for name in re.split(" -> |: ", head)]
    names = [name for name in names if re.fullmatch(r"[A-Za-z_.]+", name)]
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "ds4cli").rglob("*.py")]
    for owner, _, function in (name.rpartition(".") for name in names):
        homes = [text for text in files if re.search(rf"^class {owner}\b", text, re.M)] or files
        assert any(f"def {function}(" in text for text in homes), f"{owner}.{function}"
    assert len(names) > 20 or page.parent.name != "ds4cli"


def test_readme_is_a_page_and_its_links_lead_somewhere():
    """Guards: a page for users that nobody reads to its end, and links to what was moved."""
    assert len(README.splitlines()) <= 250
    for page in (ROOT / "README.md", *PAGES):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_the_examples_are_told():
    """Guards: a program that no page names."""
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "examples").iterdir() if path.is_file()]
    assert sorted(name for name in files if name not in page) == ["README.md", "agent-trace.jsonl"]
