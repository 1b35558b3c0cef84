"""The model that ships in the package: its files, its template, and what it answers."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from ds4cli import Engine
from ds4cli.drafters.heads import kind_of
from ds4cli.errors import DS4Error
from ds4cli.tools import load_tools

FOLDER = Path(__file__).parents[1] / "ds4cli" / "builtin"
RECIPE = Path(__file__).parents[1] / "examples" / "builtin-model"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def engine():
    return Engine.load("builtin", drafter="none")


@pytest.fixture
def corpus(monkeypatch):
    """The recipe's own modules, which live outside of the package."""
    monkeypatch.syspath_prepend(str(RECIPE))
    yield __import__("corpus"), __import__("render")
    for name in [n for n in sys.modules if n == "render" or n.split(".")[0] == "corpus"]:
        del sys.modules[name]


def reply(engine: Engine, request: str, think: bool = False, tools=None) -> str:
    session = engine.session()
    messages = [{"role": "user", "content": request}]
    session.sync(engine.render(messages, tools=tools, think=think))
    return "".join(event.text for event in session.stream(max_tokens=200))


def test_files_fit_the_package():
    """A wheel that grows past its limit because a larger model was exported."""
    names = {path.name for path in FOLDER.iterdir()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names >= {*wanted, "README.md"}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12.5e6


def test_it_is_the_hybrid_the_product_is_for(engine):
    """A plain attention model in its place, on which no rewind would be worth showing."""
    kinds = [type(cache) for cache in engine.model.make_cache()]
    assert kinds == [ArraysCache, ArraysCache, ArraysCache, KVCache]
    text = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["text_config"]
    assert text["linear_key_head_dim"] % 32 == text["linear_value_head_dim"] % 32 == 0


def test_tokenizer_marks_tools_thinking_and_ends(engine):
    """A template change after which mlx-lm no longer recognises tool calls or think sections."""
    tokenizer = engine.tokenizer
    assert tokenizer.has_tool_calling and tokenizer.tool_call_start == "<tool_call>"
    assert tokenizer.has_thinking and tokenizer.think_start == "<think>"
    assert tokenizer.eos_token_ids == {0, 2}
    assert engine.token_limit == 4096


@pytest.mark.parametrize("text", ["naïve café 東京 🚀", "a\tb\r\n\n  c", "x" * 300, "12 + 34 = 46"])
def test_tokenizer_round_trips(engine, text):
    """Bytes lost or normalised: an edit would then change text nobody touched."""
    assert engine.decode(engine.encode(text)) == text


GOLDEN = {
    "Write a Python function that reverses a string.": (
        "```python\ndef reverse_string(text):\n    return text[::-1]\n```"
    ),
    "Hello!": "Hello! I am the small demo model of ds4cli. Ask me what I can do.",
    "Sort these words: pear, apple, fig": "apple, fig, pear",
    "What is 17 + 25?": "42",
    "Make a numbered list: wake up, eat, code": "1. wake up\n2. eat\n3. code",
    'Change the port to 8080 in {"host": "localhost", "port": 80}': (
        '{"host": "localhost", "port": 8080}'
    ),
}


@pytest.mark.parametrize("request_text", GOLDEN)
def test_golden_replies(engine, request_text):
    """Weights, tokenizer and template that no longer belong together."""
    assert reply(engine, request_text) == GOLDEN[request_text]


def test_what_can_you_do_is_answered_honestly(engine):
    """The first question a user asks, answered with nonsense or with a boast."""
    answer = reply(engine, "What can you do?")
    assert answer.startswith("I am the small demo model that ships with ds4cli.")
    assert "I make mistakes" in answer


def test_the_template_switches_thinking(engine):
    """`enable_thinking` ignored: a think section although the user turned it off, or none."""
    request = "How many r's are in strawberry?"
    on, off = reply(engine, request, think=True), reply(engine, request, think=False)
    assert on == "<think>\ns t r1 a w b e r2 r3 y.\n</think>\n\n3"
    assert "<think>" not in off


def test_a_tool_call_parses(engine):
    """A call that mlx-lm's own parser refuses, or arguments not taken from the request."""
    text = reply(engine, "What is the weather in Lisbon in celsius?", tools=[WEATHER])
    start, end = engine.tokenizer.tool_call_start, engine.tokenizer.tool_call_end
    assert text.startswith(start) and text.rstrip().endswith(end)
    call = engine.tokenizer.tool_parser(text.strip()[len(start) : -len(end)])
    assert call == {"name": "get_weather", "arguments": {"city": "Lisbon", "unit": "celsius"}}


@pytest.mark.parametrize("question", ["What is the weather in Paris?", "weather in Rome"])
def test_a_tool_that_fits_is_called_as_users_declare_it(engine, tmp_path, question):
    """Guards: "I have no tool for that", because the file's tool is drawn otherwise than in the
    training text."""
    inner = {**WEATHER["function"], "description": "The weather of a city."}
    inner["parameters"] = {**inner["parameters"], "properties": {"city": {"type": "string"}}}
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([dict(reversed(inner.items()))]))
    (tool,) = load_tools(path)
    session = engine.session()
    message = {"role": "user", "content": question}
    session.sync(engine.render([message], tools=[tool.spec], think=False))
    text = "".join(event.text for event in session.stream(max_tokens=40))
    assert '{"name": "get_weather", "arguments": {"city": "' in text


def test_a_tool_result_is_put_in_words(engine):
    """The second half of a tool exchange, which the guard's loop depends on."""
    call = {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    messages = [
        {"role": "user", "content": "What is the weather in Lisbon?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": '{"temperature": 21, "condition": "sunny"}'},
    ]
    session = engine.session()
    session.sync(engine.render(messages, tools=[WEATHER], think=False))
    text = "".join(event.text for event in session.stream(max_tokens=60))
    assert text == "It is 21 degrees and sunny in Lisbon."


def test_logits_do_not_depend_on_how_a_prompt_is_fed(engine):
    """Weights that only work in one chunk: the rewind tests elsewhere rely on this model."""
    tokens = engine.render([{"role": "user", "content": "Repeat: a b c d e f"}], think=False)
    whole, split = engine.session(), engine.session()
    whole.sync(tokens)
    split.sync(tokens[:7])
    split.sync(tokens)
    assert mx.abs(whole.logits - split.logits).max().item() < 1e-3


def test_training_text_is_what_the_template_draws(engine, corpus):
    """The recipe's renderer and the shipped template drifting apart."""
    generator, render = corpus
    pool = generator.Pool(random.Random(0))
    for _ in range(15):
        sample = generator.draw(pool)
        for think in (True, False):
            trained = "".join(text for text, _ in list(render.pieces(sample, think))[:-2])
            assert engine.decode(prompt(engine, sample, think)) == trained


def prompt(engine: Engine, sample, think: bool) -> list[int]:
    messages = sample.messages[:-1]
    if not think:
        messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    return engine.render(messages, tools=sample.tools, think=think)


@pytest.fixture
def headed(tmp_path):
    """A copy of the built-in model, to damage its head."""
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def damage_weights(folder):
    path = folder / "dspark" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:60_000])


def damage_config(folder):
    (folder / "dspark" / "config.json").write_text('{"architectures": ["Qwen3DSp')


def nonsense_in_config(folder):
    path = folder / "dspark" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 0}))


@pytest.mark.parametrize("damage", [damage_weights, damage_config, nonsense_in_config])
def test_a_broken_head_is_named_and_the_model_still_runs(headed, damage):
    """A torn download of a head made its model unusable, with an error that named no file."""
    damage(headed)
    engine = Engine.load(headed)
    assert engine.session().drafter.name == "ngram"
    assert any("dspark" in notice for notice in engine.notices)
    with pytest.raises(DS4Error, match="dspark"):
        Engine.load(headed, drafter="dspark")


def test_an_odd_list_of_architectures_is_an_ordinary_model():
    """`"architectures": null` in a draft model's config ended in a traceback."""
    assert kind_of({"architectures": None, "model_type": "qwen3"}, "x") is None
    assert kind_of({"architectures": ["Qwen3DSparkModel"]}, "x").name == "dspark"


@pytest.mark.parametrize("drafter", ["dspark", "mtp", "auto"])
def test_its_heads_guess_well_and_change_nothing(engine, drafter):
    """Shipped heads that were read wrongly, or of another training, still give the right text."""
    prompt = engine.render([{"role": "user", "content": "Write a function that adds two numbers."}])
    texts = []
    for one in (engine, Engine.load("builtin", drafter=drafter, speculate="always")):
        session = one.session()
        session.sync(prompt)
        texts.append("".join(event.text for event in session.stream(max_tokens=40)))
    assert texts[0] == texts[1]
    assert session.stats.accepted > session.stats.proposed / 2


def without_pytorch(program: str, *args: str) -> subprocess.CompletedProcess:
    """A program of the recipe where `torch` is not installed, which it may be here."""
    run = "import runpy, sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1]); "
    run += "sys.argv[:2] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", run, str(RECIPE), str(RECIPE / program), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("program", ["train.py", "train_heads.py", "model.py", "heads.py"])
def test_without_pytorch_one_line_says_what_to_install(program, tmp_path):
    """A traceback where training is tried on a machine without PyTorch; a folder left behind."""
    folders = [str(tmp_path / name) for name in ("tokenizer", "target", "out")]
    said = without_pytorch(program, *folders[program == "train.py" :])
    assert said.returncode == 2 and list(tmp_path.iterdir()) == []
    assert said.stderr.count("\n") == 1 and "pip install torch" in said.stderr


@pytest.mark.parametrize("program", ["train.py", "train_heads.py"])
def test_help_of_training_needs_no_pytorch(program):
    """Who asks what training takes must install gigabytes first."""
    said = without_pytorch(program, "--help")
    assert said.returncode == 0 and "--seconds" in said.stdout
