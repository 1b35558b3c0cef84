"""The corpus: text of other sessions to guess from, bounded, and on disk only where asked."""

import json
import random
import stat

import pytest
from oracle import engine, plain, prompt
from tiny import build

from ds4cli import Engine
from ds4cli.drafters import corpus as corpora
from ds4cli.drafters.corpus import Corpus
from ds4cli.drafters.ngram import NgramDrafter
from ds4cli.errors import UsageError


def noise(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(1000, 9000) for _ in range(n)]


def taught(*texts):
    corpus = Corpus()
    for text in texts:
        corpus.add(text)
    return corpus


def test_what_another_session_said_is_continued():
    """Guards: an answer given before, in another conversation, that is guessed anew by the word."""
    corpus, answer = Corpus(), noise(60)
    first = NgramDrafter(corpus)
    first.propose([*noise(30, 1), *answer, 7], 4)
    first.rewind(10)  # another prompt
    second = NgramDrafter(corpus)
    assert second.propose([*noise(30, 2), *answer[:6]], 20) == answer[6:26]
    assert second.confidence == 6


def test_the_own_text_wins_where_it_matches_as_far():
    """Guards: old texts of others hiding what this conversation just said."""
    start = noise(8)
    drafter = NgramDrafter(taught([*start, 1, 1, 1]))
    assert drafter.propose([*start, 2, 2, 2, *noise(9, 3), *start], 3) == [2, 2, 2]
    longer = NgramDrafter(taught([5, *start, 1, 1, 1]))
    assert longer.propose([*start, 2, 2, 2, 5, *start], 3) == [1, 1, 1]


def test_the_usual_continuation_is_taken_and_cut_where_texts_part():
    """Guards: a guess as long as one old text goes on, whatever the others say."""
    start = noise(6)
    corpus = taught(*[[*start, 1, 2, n, n] for n in range(10, 20)], [*start, 3, 3, 3])
    ends, length = corpus.match(start)
    assert length == 6 and corpus.continued(ends, 8, 0.3) == [1, 2]


@pytest.mark.parametrize(
    ("row_price", "taken"),
    [(0.95, []), (0.8, [1]), (0.6, [1, 2]), (0.3, [1, 2]), (0.2, [1, 2, 7]), (0.0, [1, 2, 7, 8])],
)
def test_a_continuation_ends_where_it_is_less_likely_than_a_row_costs(row_price, taken):
    """Guards: rows fed for guesses that cannot pay, and guesses left out where rows are cheap: the
    shares here are 9 of 10, 7 of 9, 2 of 7, 1 of 2, and only their product counts."""
    texts = [[1, 2, 7, 8], [1, 2, 7, 9], [1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 6], [1, 2]]
    texts += [[1, 0], [1, 0], [0]]
    tokens, ends = [], []
    for text in texts:
        ends.append(len(tokens))
        tokens += [*text, corpora.BETWEEN]
    assert corpora.continuation(tokens, ends, 9, row_price) == taken
    assert corpora.continuation(tokens, ends, 1, row_price) == taken[:1]


def test_texts_do_not_run_into_each_other():
    """Guards: a guess that goes on with the beginning of an unrelated text."""
    start = noise(6)
    corpus = taught([*start, 1, 2], noise(30, 4))
    ends, _ = corpus.match(start)
    assert corpus.continued(ends, 9, 0.3) == [1, 2]
    assert corpus.match([*start[3:], 1]) == ([7], 4)


def test_it_is_bounded_and_keeps_the_newest(monkeypatch):
    """Guards: a batch of a million lines held in memory for good."""
    monkeypatch.setattr(corpora, "MOST_TOKENS", 400)
    corpus = Corpus()
    for seed in range(40):
        corpus.add(noise(50, seed))
    [(_, _, previous)] = corpus._links._chains
    assert len(corpus) <= 400 and len(previous) == len(corpus)
    ends, _ = corpus.match(noise(50, 39)[:8])
    assert corpus.continued(ends, 10, 0.3) == noise(50, 39)[8:18]
    assert corpus.match(noise(50, 0)[:8]) == ([], 0)


def test_nothing_is_on_disk_unless_a_file_is_named(tmp_path, monkeypatch):
    """Guards: conversations that are kept without anybody asking, or that others can read."""
    monkeypatch.chdir(tmp_path)
    taught(noise(50)).finish()
    assert not list(tmp_path.iterdir())
    path, text = tmp_path / "c", noise(40)
    corpus = Corpus.kept(path, "model")
    drafter = NgramDrafter(corpus)
    drafter.propose([*text, 1], 4)
    corpus.finish()  # as at the end of the process
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ends, _ = Corpus.kept(path, "model").match(text[:8])
    assert corpus.continued(ends, 5, 0.3) == text[8:13]


def test_a_line_that_was_cut_off_costs_that_line(tmp_path):
    """Guards: a crash in the middle of a line that makes the file useless."""
    path = tmp_path / "c"
    Corpus.kept(path, "m").add(noise(20))
    with path.open("a", encoding="utf-8") as file:
        file.write("[1, 2, 3")
    assert len(Corpus.kept(path, "m")) == 21
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) == noise(20)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello\n", "line 1"),
        ('{"format": "ds4cli corpus 1", "model": "other"}\n', "another model"),
        ('{"format": "ds4cli corpus 1", "model": "m"}\n[1, -5]\n', "line 2"),
        ('{"format": "ds4cli corpus 1", "model": "m"}\n[1\n[2]\n', "line 2"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path, text, says):
    """Guards: a file of the user's that is overwritten, or ids of another vocabulary."""
    path = tmp_path / "c"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=says):
        Corpus.kept(path, "m")
    assert path.read_text(encoding="utf-8") == text


def test_a_file_that_cannot_be_written_is_said_once(tmp_path):
    """Guards: a full disk that ends a reply, or is passed over."""
    corpus = Corpus.kept(tmp_path / "c", "m")
    (tmp_path / "c").unlink()
    corpus.add(noise(20))
    corpus.add(noise(20, 1))
    assert len(corpus.notices) == 1 and len(corpus) == 42


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_sessions_of_an_engine_share_it_and_texts_stay(name):
    """Guards: a text that depends on what other sessions said."""
    model = build(name, scale=2.0)
    e = engine(name, model=model, drafter="ngram", speculate="always")
    calls = []
    for tokens in (prompt(9), prompt(9, seed=2), prompt(9)):
        session = e.session()
        session.sync(tokens)
        said = [t for event in session.stream(max_tokens=40) for t in event.tokens]
        assert said == plain(model, tokens, 40)
        calls.append(session.stats.blocks)
        session.rewind(0)
    assert calls[2] < calls[0]


def test_what_is_to_be_the_same_again_guesses_from_no_other_text(model_folder, tmp_path):
    """What others said decides how many tokens a call is fed, and so the kernels on a GPU."""
    path = tmp_path / "corpus.jsonl"
    settings = dict(drafter="ngram", reproducible=True, corpus=str(path))
    engine = Engine.load(model_folder, **settings)
    assert engine.session().drafter.parts[0]._corpus is None and not path.exists()
    assert any("`--corpus` is left alone" in line for line in engine.warnings)
