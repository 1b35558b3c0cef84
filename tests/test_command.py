"""The command with real, tiny models: in this process where that is enough, else in its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import mlx.core as mx
import pexpect
import pytest
from folder import save_folder
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from typer.testing import CliRunner

from ds4cli.chat import journal, shelf
from ds4cli.cli import app

COMMAND = [sys.executable, "-m", "ds4cli", "generate"]
# Long enough that the reply cannot be complete when the test acts on it.
ENDLESS = ["-n", "-1", "--logit-bias", "258=-1000"]


def run(*args, stdin=""):
    return CliRunner().invoke(app, ["generate", *map(str, args)], input=stdin)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("temp", ["0", "0.8"])
def test_a_hybrid_speculates_and_nothing_changes(hybrid_folder, drafter, temp):
    """Guards: the command's text depends on the drafter, or its numbers do not add up."""
    args = ["-m", hybrid_folder, "-n", 40, "--seed", 3, "--temp", temp, "--json", "ab ab ab ab"]
    found = json.loads(run(*args, "--drafter", drafter).stdout)
    plain = json.loads(run(*args, "--speculate", "never").stdout)
    assert (found["text"], found["finish_reason"]) == (plain["text"], plain["finish_reason"])
    usage = found["usage"]
    assert usage == plain["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found["speculative"]["drafter"] == drafter
    assert found["timings"]["predicted_n"] == usage["completion_tokens"]


def test_streamed_and_whole_text_agree(model_folder):
    """Guards: streaming splits a character, or `--no-stream` prints another text."""
    args = ["-m", model_folder, "-n", 60, "--temp", "1", "Hello"]
    streamed = run(*args)
    assert streamed.exit_code == 0 and streamed.stdout.endswith("\n")
    assert streamed.stdout == run(*args, "--no-stream").stdout
    assert streamed.stdout[:-1] == json.loads(run(*args, "--json").stdout)["text"]


def test_a_draft_model_changes_nothing(model_folder, hybrid_folder):
    """Guards: a draft of another architecture is refused, or changes the text."""
    args = ["-m", hybrid_folder, "-n", 30, "--json", "Hello"]
    drafted = json.loads(run(*args, "--draft-model", model_folder).stdout)
    assert drafted["speculative"]["drafter"] == "ngram+model"
    assert drafted["text"] == json.loads(run(*args, "--drafter", "none").stdout)["text"]


def broken_folders(tmp_path, model_folder):
    """Folders that are almost models, by what is wrong with them."""
    places = {name: tmp_path / name for name in ("empty", "other", "alien", "weightless")}
    places["empty"].mkdir()
    for name in ("other", "alien", "weightless"):
        shutil.copytree(model_folder, places[name])
    (places["weightless"] / "model.safetensors").unlink()
    config = json.loads((places["alien"] / "config.json").read_text())
    (places["alien"] / "config.json").write_text(json.dumps({**config, "model_type": "alien"}))
    tokenizer = json.loads((places["other"] / "tokenizer.json").read_text())
    swap = tokenizer["model"]["vocab"]
    swap["a"], swap["b"] = swap["b"], swap["a"]
    (places["other"] / "tokenizer.json").write_text(json.dumps(tokenizer))
    return places


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-m", "{empty}"], "not a model folder"),
        (["-m", "{alien}"], "alien"),
        (["-m", "{weightless}"], "no weights"),
        (["-m", "{model}", "--draft-model", "{other}"], "another tokenizer"),
        (["-m", "./missing"], "no model folder `./missing`"),
        (["-m", "owner/name", "--offline"], "not on this machine"),
    ],
)
def test_models_that_cannot_be_used(tmp_path, model_folder, args, message):
    """Guards: a traceback of mlx-lm, or weights read before the mistake is found."""
    places = broken_folders(tmp_path, model_folder)
    words = [word.format(model=model_folder, **places) for word in args]
    result = run(*words, "hi")
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) <= 2


EVIL = "open({!r}, 'w').close()\n"


def evil_folder(folder, model_folder, table, **entries):
    """A model whose `table` (a JSON file) names code in its folder; the code would make a file."""
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / table).read_text())
    (folder / table).write_text(json.dumps({**config, **entries}))
    (folder / "evil.py").write_text(EVIL.format(str(folder / "was_run")))
    return folder


CODE = {
    "tokenizer": (
        "tokenizer_config.json",
        {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
    ),
    "config": (
        "config.json",
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}},
    ),
    "model_file": ("config.json", {"model_file": "evil.py"}),
}


@pytest.mark.parametrize("kind", CODE)
@pytest.mark.parametrize("flag", ["-m", "--draft-model"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_no_code_of_a_model_folder_is_run(tmp_path, model_folder, kind, flag, command):
    """transformers asks on standard input whether to run a folder's code: piped text said yes."""
    table, entries = CODE[kind]
    folder = evil_folder(tmp_path / kind, model_folder, table, **entries)
    own = [] if flag == "-m" else ["-m", str(model_folder)]
    args = [command, *own, flag, str(folder)]
    done = CliRunner().invoke(app, args, input="y\ny\nyes\n1\n")
    assert done.exit_code == 2 and done.stdout == "" and not (folder / "was_run").exists()
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ") and str(folder) in error and hint.startswith("hint: ")
    assert "y/N" not in done.stderr


def test_a_template_that_links_out_of_its_folder_is_refused(tmp_path, model_folder):
    """A downloaded archive could make any file of its user's part of a prompt, and of a reply."""
    (tmp_path / "secret").write_text("my secret")
    folder = shutil.copytree(model_folder, tmp_path / "archive")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    done = run("-m", folder, "hi")
    assert done.exit_code == 2 and done.stdout == "" and "outside its model's" in done.stderr


def test_the_links_of_the_hubs_cache_are_followed(tmp_path, model_folder):
    """Every file of a downloaded model is such a link."""
    folder = shutil.copytree(model_folder, tmp_path / "models--a--b" / "snapshots" / "1")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "0a").write_text("{{ messages[0].content }}")
    (folder / "chat_template.jinja").symlink_to(Path("..") / ".." / "blobs" / "0a")
    done = run("-m", folder, "-n", "2", "--json", "hi")
    assert done.exit_code == 0 and json.loads(done.stdout)["usage"]["prompt_tokens"] == 2


def test_code_that_is_not_needed_does_not_matter(tmp_path, model_folder):
    """Most models on the hub carry an `auto_map` for others: refusing those refuses them all."""
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    folder = evil_folder(tmp_path / "m", model_folder, "config.json", auto_map=names)
    done = run("-m", folder, "-n", "4", "hi", stdin="y\n")
    assert done.exit_code == 0 and not (folder / "was_run").exists(), done.stderr


@pytest.mark.parametrize("offline", [True, False])
def test_no_code_is_downloaded(tmp_path, model_folder, monkeypatch, offline):
    """mlx-lm fetches `*.py` of every repository."""
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options)
        return str(model_folder)

    monkeypatch.setattr("mlx_lm.utils.snapshot_download", snapshot_download)
    assert run("-m", "owner/name", "-n", "2", *["--offline"] * offline, "hi").exit_code == 0
    assert asked["local_files_only"] == offline
    assert not any(fnmatch("evil.py", pattern) for pattern in asked["allow_patterns"])
    assert any(fnmatch("tokenizer.json", pattern) for pattern in asked["allow_patterns"])


def test_a_prompt_longer_than_the_context(tmp_path):
    """Guards: a prompt that does not fit is cut, or the message says only one number."""
    folder = save_folder(tmp_path / "short", "llama", max_position_embeddings=64)
    result = run("-m", folder, "x" * 100)
    assert result.exit_code == 2 and "`64`" in result.stderr
    reply = json.loads(run("-m", folder, "-n", "-1", "--json", "x").stdout)
    assert reply["usage"]["total_tokens"] <= 64 and reply["finish_reason"] in ("length", "stop")


def test_a_model_without_a_template(tmp_path):
    """Guards: base models are refused."""
    folder = save_folder(tmp_path / "base", "llama", template=None)
    assert run("-m", folder, "-n", "4", "hi").exit_code == 0


# --- in a process of its own ----------------------------------------------------------------------


def start(folder, *args, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    command = [*COMMAND, "-m", str(folder), *ENDLESS, *args, "hi"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, text=False, **options)


def test_ctrl_c_stops_prints_and_exits_130(model_folder):
    """Guards: Ctrl-C ends in a traceback, loses the text, or does nothing while decoding."""
    process = start(model_folder)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert first + out and (first + out).endswith(b"\n")


def test_a_temporary_folder_that_is_missing(model_folder, monkeypatch):
    """Guards: TMPDIR of another machine, and MLX cannot compile anything."""
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    process = start(model_folder, "-n", "2", stdout=subprocess.PIPE)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "TMPDIR `/no/such/folder` is no folder" in err.decode()


def test_a_reader_that_leaves(model_folder):
    """Guards: `ds4cli ... | head` prints a traceback, or goes on generating for nobody."""
    process = start(model_folder)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk(model_folder):
    """Guards: a reply that was not written looks like success, or ends in a traceback."""
    with open("/dev/full", "wb") as full:
        process = start(model_folder, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.decode().startswith("error: cannot write the output: no space left")
    assert len(err.splitlines()) == 1


# A model call that takes long, inside which the second Ctrl-C must be seen.
STUCK = """
import time
from ds4cli.signals import Interrupts
with Interrupts() as interrupted:
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_second_ctrl_c_leaves_at_once():
    """Guards: a model call of a minute cannot be left."""
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    process.stdout.readline()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.wait(timeout=10) == 130
    process.stdout.close()


def test_on_a_terminal(model_folder):
    """Guards: nothing tells the user that a prompt is missing; the reply shows no control codes."""
    child = pexpect.spawn(COMMAND[0], [*COMMAND[1:], "-m", str(model_folder)], timeout=60)
    child.expect("no prompt")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2


def imported(*words):
    """The modules that a Python with these arguments imports."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_help_is_fast():
    """Guards: an import that makes every mistyped flag cost seconds; what costs them is counted."""
    modules = imported("-m", "ds4cli", "--help") - imported("-c", "pass")
    assert "ds4cli.cli" in modules and len(modules) < 160
    heavy = ("mlx.core", "mlx_lm", "transformers", "numpy", "llguidance", "rich.console", "tomli")
    assert not {*heavy, "prompt_toolkit", "ds4cli.backend.blas", "ds4cli.commands"} & modules


@pytest.mark.parametrize(
    "closed",
    [
        ">&-",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("<&- >&- 2>&-", "<&-", "2>&-")),
    ],
)
def test_closed_streams(model_folder, closed):
    """With stdin closed the weights could not be opened; with stdout closed an answer that nobody
    got looked like success."""
    command = f"{sys.executable} -m ds4cli generate -m {model_folder} -n 2 hi {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == closed.startswith(("<&- >", ">")), done.stderr
    if closed == ">&-":
        assert done.stderr == "error: cannot write the output: bad file descriptor\n"


def test_an_unknown_model_type_is_one_line(model_folder, tmp_path):
    """The tokenizer's library printed a paragraph before the error."""
    folder = shutil.copytree(model_folder, tmp_path / "unknown")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "frobnicate"}))
    command = [sys.executable, "-m", "ds4cli", "generate", "-m", str(folder), "hi"]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and [line[:5] for line in lines] == ["error", "hint:"]
    assert "frobnicate" in lines[0]


def test_a_script_goes_on_with_a_chat(model_folder):
    """Guards: a message that is lost, said twice, or answered as if nothing had been said."""
    args = ["-m", model_folder, "-n", 8]
    first = run(*args, "--session", "s", "--stats", "Hello")
    assert first.exit_code == 0 and "kept" not in first.stderr
    second = run(*args, "-c", "--json", "and more")
    found = json.loads(second.stdout)
    line = journal.read(shelf.path_of("s")).transcript.line
    assert [turn.content for turn in line.turns if not turn.is_reply] == ["Hello", "and more"]
    assert (line.turns[1].content + "\n", line.turns[3].content) == (first.stdout, found["text"])
    assert found["usage"]["prompt_tokens"] == line.span(4)[0]
    assert run(*args, "--session", "s", "--batch", "x").exit_code == 2


def test_a_prompt_cache_reads_what_is_new(hybrid_folder):
    """Guards: a long text read again for every question; a cache of another model believed; a file
    of the user's written over."""
    Path("text.txt").write_text("a long text " * 12)
    args = ["-m", hybrid_folder, "-f", "text.txt", "-n", 6, "--json"]

    def asked(question, *more):
        found = json.loads(run(*args, *more, question).stdout)
        return found["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    cache = "--prompt-cache", "kept"
    text, cached = asked("what is it?", *cache)
    assert cached == 0 and (text, 0) == asked("what is it?")
    again, cached = asked("what is it?", *cache)
    assert again == text and cached > 130
    other, cached = asked("who wrote all of that, and when?", *cache)
    assert other == asked("who wrote all of that, and when?")[0] and cached > 130
    Path("kept").write_text("my own notes")
    refused = run(*args, *cache, "x")
    assert refused.exit_code == 2 and Path("kept").read_text() == "my own notes"


def test_a_reply_begins_as_asked(model_folder):
    """Guards: a beginning that is not read, printed twice, or torn from what follows it."""
    args = ["-m", model_folder, "-n", 8, "--prefill-response", "Sure: "]
    found = json.loads(run(*args, "--json", "Hello").stdout)
    assert found["text"].startswith("Sure: ") and len(found["text"]) > len("Sure: ")
    assert run(*args, "Hello").stdout == found["text"] + "\n"
    plain = json.loads(run("-m", model_folder, "-n", 8, "--json", "Hello").stdout)
    more = found["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"]
    assert more == len("Sure: ")


def test_a_token_more_ends_a_reply(model_folder):
    """Guards: `--extra-eos-token` without effect, or a text of several tokens taken for one."""
    args = ["-m", model_folder, "-n", 60, "--temp", "2", "--json", "Hello"]
    text = json.loads(run(*args).stdout)["text"]
    letter = next(char for char in text[3:] if char.isascii() and char.isalnum())
    found = json.loads(run(*args, "--extra-eos-token", letter).stdout)
    assert found["finish_reason"] == "stop" and found["text"] == text[: text.index(letter)]
    assert run(*args, "--extra-eos-token", "two words").exit_code == 2


def test_the_system_text_from_a_file(model_folder):
    """Guards: a system file that is not read, or one of two system texts silently ignored."""
    Path("system.md").write_text("Be brief.\n")
    args = ["-m", model_folder, "-n", 4, "--json", "Hello"]
    given = json.loads(run(*args, "-s", "Be brief.").stdout)
    assert json.loads(run(*args, "--system-file", "system.md").stdout)["usage"] == given["usage"]
    assert run(*args, "--system-file", "system.md", "-s", "x").exit_code == 2
    assert run(*args, "--system-file", "none.md").exit_code == 2


def test_an_adapter_changes_the_model(model_folder, tmp_path):
    """Guards: an adapter that is not put on, or one of another model that ends in a traceback."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {
        "fine_tune_type": "lora", "num_layers": 1,
        "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0, "keys": ["mlp.down_proj"]},
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model, _ = load_model(Path(model_folder), lazy=True)
    linear_to_lora_layers(model, 1, config["lora_parameters"])
    weights = {
        name: mx.random.normal(value.shape, key=mx.random.key(3))
        for name, value in tree_flatten(model.trainable_parameters())
        if "lora" in name
    }
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    args = ["-m", model_folder, "-n", 20, "--json", "Hello"]
    ways = (), ("--adapter-path", adapter)
    plain, adapted = (json.loads(run(*args, *more).stdout) for more in ways)
    assert weights and plain["text"] != adapted["text"]
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {"other": mx.zeros(3)})
    wrong = run(*args, "--adapter-path", adapter)
    assert wrong.exit_code == 1 and "does not fit this model" in wrong.stderr
    assert run(*args, "--adapter-path", tmp_path / "none").exit_code == 2
