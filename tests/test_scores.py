"""Log-probabilities of a reply's tokens: the model's own, whoever guessed them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import pytest
from oracle import Letters, OracleDrafter, engine, prompt
from tiny import V, build
from typer.testing import CliRunner

from ds4cli.batch.requests import parse
from ds4cli.cli import app
from ds4cli.engine.scores import Score, Spelling
from ds4cli.errors import UsageError
from ds4cli.models.source import locate
from ds4cli.models.tokenizers import load_tokenizer
from ds4cli.text.tokenizer import Vocabulary

LENGTH = 12


def written(name, right=None, top=3, **settings):
    """A session that wrote LENGTH tokens, and their scores."""
    session = engine(name, speculate="always", **settings).session()
    session.sync(prompt(11))
    if right is not None:
        truth = written(name, **settings)[0].tokens
        session.drafter = OracleDrafter(truth, right)
    session.score(top)
    list(session.stream(max_tokens=LENGTH, stop=[]))
    return session, session.scores(11)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
@pytest.mark.parametrize("temp", [0.0, 0.9])
def test_scores_are_the_models_own_rows(name, temp):
    """Guards: a score of the row behind, of the filtered row, or another one where it was
    drafted."""
    session, plain = written(name, temp=temp, top_k=2, presence_penalty=0.5)
    rows = build(name, scale=2.0)(mx.array(session.tokens)[None])[0]
    for pos, score in enumerate(plain, 11):
        row = rows[pos - 1] - mx.logsumexp(rows[pos - 1])
        assert score.token == session.tokens[pos]
        assert score.logprob == pytest.approx(row[score.token].item(), abs=1e-4)
        best = mx.argsort(-row)[:3].tolist()
        assert [token for token, _ in score.top] == best
        assert score.top[0][1] == pytest.approx(row[best[0]].item(), abs=1e-4)
    again, drafted = written(name, right=0.7, temp=temp, top_k=2, presence_penalty=0.5)
    assert again.tokens == session.tokens and again.stats.accepted > 0
    for one, other in zip(plain, drafted, strict=True):
        assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_scores_follow_the_session():
    """Guards: scores of tokens that were taken back, or of a branch, in a reply."""
    session, _ = written("qwen3_next")
    twin = session.fork()
    session.rewind(15)
    session.step(drafts=[1, 2, 3])
    found = session.scores(11)
    assert [score.token for score in found] == session.tokens[11:]
    with pytest.raises(UsageError):
        twin.scores(11)
    session.score(None)
    list(session.stream(max_tokens=2))
    with pytest.raises(UsageError):
        session.scores(11)


def test_padding_has_no_probability():
    """Guards: ids that no tokenizer has among the likeliest, or in the sum."""
    session = engine("llama").session()
    session.engine.tokenizer.__class__ = type("Few", (Letters,), {"__len__": lambda self: 40})
    session.engine.__dict__.pop("token_limit", None)
    session.sync(prompt(11)[:1] * 11)
    session.score(V)
    list(session.stream(max_tokens=3))
    for score in session.scores(11):
        assert sum(math.exp(p) for _, p in score.top) == pytest.approx(1, abs=1e-4)


def test_a_part_of_a_character_has_its_bytes(model_folder):
    """Guards: U+FFFD in place of the bytes that a client puts together."""
    tokenizer = load_tokenizer(locate(str(model_folder)))
    vocabulary = Vocabulary(tokenizer)
    text = " é<|im_end|>"
    scores = [Score(token, 0.0) for token in vocabulary.encode_part(text)]
    found = Spelling(vocabulary.decode, tokenizer).openai(scores)
    assert b"".join(bytes(entry["bytes"]) for entry in found) == text.encode()
    assert found[0]["token"] == " " and found[1]["token"] == r"\xc3"


# --- as users see them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "top"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False}, None),
        ({"logprobs": 2}, 2),
        ({"logprobs": 2.0}, 2),
        ({}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
    ],
)
def test_what_a_line_asks_for(body, top):
    """Guards: clients' ways to ask for log-probabilities read as others."""
    item = parse(1, json.dumps({"prompt": "hi", **body}).encode())
    assert (item.error, item.top_logprobs, item.unknown) == ("", top, ())


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": "yes"},
        {"logprobs": True, "top_logprobs": True},
    ],
)
def test_what_no_line_may_ask_for(body):
    """Guards: a wrong number that is passed over in silence."""
    assert "logprobs" in parse(1, json.dumps({"prompt": "hi", **body}).encode()).error


def run(*args: object):
    return CliRunner().invoke(app, ["generate", *map(str, args)])


def test_json_and_batches_have_openais_form(model_folder, tmp_path):
    """Guards: fields that a client of OpenAI's does not find."""
    done = run("hi", "-m", model_folder, "--json", "--logprobs", 2, "-n", 5, "-q")
    content = json.loads(done.stdout)["logprobs"]["content"]
    assert len(content) == 5 and len(content[0]["top_logprobs"]) == 2
    entry = content[0]["top_logprobs"][0]
    assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]
    assert content[0]["logprob"] == entry["logprob"]
    lines = [
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
        {"custom_id": "t", "url": "/v1/completions", "body": {"prompt": "hi", "logprobs": 2}},
        {"prompt": "hi", "n": 2},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for lanes in (1, 3):
        out = tmp_path / f"out{lanes}"
        done = run("-m", model_folder, "--batch", path, "-o", out, "-np", lanes, "-n", 5, "-q")
        assert done.exit_code == 0, done.stderr
        chat, text, none = (
            json.loads(line)["response"]["body"]["choices"][0]
            for line in Path(out).read_text().splitlines()
        )
        for one, other in zip(chat["logprobs"]["content"], content, strict=True):
            assert one["token"] == other["token"]
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        found = text["logprobs"]
        assert found["text_offset"][0] == 0 and len(found["text_offset"]) == 5
        assert len(found["tokens"]) == len(found["token_logprobs"]) == 5
        assert all(len(others) == 2 for others in found["top_logprobs"])
        assert "logprobs" not in none


def test_without_json_there_is_no_place_for_them():
    """Guards: a flag that does nothing."""
    for more in ([], ["--json", "--session", "a"], ["--json", "--logprobs", 21]):
        assert run("hi", "--logprobs", 2, *more).exit_code == 2
