"""What calls cost: measured once, kept in a file, corrected while running."""

import pytest
from oracle import engine, plain, prompt
from tiny import build

from ds4cli.drafters import costs as costs_module
from ds4cli.drafters.costs import SIZES, CallCosts, DraftTimes, PriceList, measure
from ds4cli.engine.session import Session

LIST = {0: 0.01, 1: 0.012, 2: 0.015, 4: 0.02, 8: 0.02, 16: 0.03, 32: 0.05}


def costs(**options):
    known = CallCosts()
    known.use(LIST, **options)
    known.observe_plain(0.01)
    return known


# --- the list ---------------------------------------------------------------------------------


def test_a_list_is_kept_for_its_key_alone(tmp_path, monkeypatch):
    """A list of another model or version would be believed, one that is not found measured anew."""
    monkeypatch.setattr(costs_module, "measure", lambda *_: dict(LIST))
    prices = PriceList.kept(tmp_path / "new", {"model": "a"})
    assert prices.seconds == {}
    e = engine("llama", model=build("llama"))
    prices.measure(e.scratch_timeline(), e.session().sampler, prompt(8))
    assert {0, 1, 2, 4} <= prices.seconds.keys() and "measured" in prices.notice
    assert PriceList.kept(tmp_path / "new", {"model": "a"}).seconds == prices.seconds
    assert PriceList.kept(tmp_path / "new", {"model": "b"}).seconds == {}


def test_what_batches_saw_is_kept_beside_what_was_measured(tmp_path):
    """A batch's prices took the place of those of calls, or the other way round; one that is no
    time was believed."""
    PriceList.kept(tmp_path, {}).remember({4: 0.5})
    kept = PriceList.kept(tmp_path, {})
    assert kept.rounds == {4: 0.5} and kept.seconds == {}
    kept.seconds = {0: 0.1, 1: 0.1}
    kept.remember({8: 0.75})
    kept.remember({})
    again = PriceList.kept(tmp_path, {})
    assert again.rounds == {4: 0.5, 8: 0.75} and again.seconds == {0: 0.1, 1: 0.1}
    for wrong in ('{"rounds": {"4": -1}}', '{"rounds": 3}', "[]", '{"rounds": {"4": NaN}}'):
        kept.path.write_text(wrong)
        assert PriceList.kept(tmp_path, {}).rounds == {}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1, 2]", "null", '{"1": "x"}', '{"1": 0.1}', '{"0": -1, "1": 0.1}',
        '{"0": 0.01, "1": 0.012, "2": 0.406}', '{"0": 0.01, "1": 0.012, "2": 0.03, "4": 0.019}',
    ],
)  # fmt: skip
def test_a_torn_file_is_measured_anew(tmp_path, text):
    """A file cut by a full disk must not end the run, nor give prices of zero; nor may one that was
    measured on a busy machine, where two rows cost more than four, park guesses for ever."""
    path = PriceList.kept(tmp_path, {}).path
    path.write_text(text, encoding="utf-8")
    assert PriceList.kept(tmp_path, {}).seconds == {}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    """A home that is read-only is common in containers."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    prices = PriceList.kept(tmp_path / "file" / "below", {})
    e = engine("llama", model=build("llama"))
    prices.measure(e.scratch_timeline(), e.session().sampler, prompt(8))
    assert prices.seconds


def timed(monkeypatch, call_s, first_s=0.0, again_s=0.0):
    """What is measured of a model whose calls take `call_s`, `first_s` more the first time that
    they have so many rows, and `again_s` more when the call before had another number; and how long
    that took."""
    e, now, seen = engine("llama", model=build("llama")), [0.0], [0]
    timeline = e.scratch_timeline()
    feed = timeline.feed

    def slow(tokens, **how):
        rows = len(tokens)
        now[0] += call_s + first_s * (rows not in seen) + again_s * (rows != seen[-1])
        seen.append(rows)
        return feed(tokens, **how)

    monkeypatch.setattr(timeline, "feed", slow)
    seconds = measure(timeline, e.session().sampler, prompt(8), 2.0, lambda: now[0])
    return seconds, now[0]


def test_a_machine_that_is_busy_for_a_while_makes_no_size_dear(monkeypatch):
    """One size was measured while another program ran, and guesses of it never tried again."""
    e, now, calls = engine("llama", model=build("llama")), [0.0], [0]
    timeline = e.scratch_timeline()
    feed = timeline.feed

    def slow(tokens, **how):
        calls[0] += 1
        is_busy = 40 < calls[0] < 90  # all of a turn, and a part of another
        now[0] += 0.001 * (1 + 0.1 * len(tokens)) * (9 if is_busy else 1)
        return feed(tokens, **how)

    monkeypatch.setattr(timeline, "feed", slow)
    seconds = measure(timeline, e.session().sampler, prompt(8), 2.0, lambda: now[0])
    assert seconds.keys() == {0, *SIZES} and costs_module.is_sound(seconds)


def test_a_size_that_always_seems_dear_is_left_out(monkeypatch):
    """A list with calls of 3 rows that took three times those of 4 was measured anew, for a second,
    by each process."""
    e, now = engine("llama", model=build("llama")), [0.0]
    timeline = e.scratch_timeline()
    feed = timeline.feed

    def slow(tokens, **how):
        now[0] += 0.001 * (1 + 0.1 * len(tokens)) * (3 if len(tokens) in (3, 10) else 1)
        return feed(tokens, **how)

    monkeypatch.setattr(timeline, "feed", slow)
    seconds = measure(timeline, e.session().sampler, prompt(8), 2.0, lambda: now[0])
    assert seconds.keys() == {0, *SIZES} - {3, 10} and list(seconds) == sorted(seconds)
    assert costs_module.is_sound(seconds)
    lone = {0: 0.1, 1: 0.9, 2: 0.2}
    assert costs_module._undisturbed(lone) == lone, "what every list has"


def test_a_list_that_plain_tokens_contradict_is_stale(tmp_path):
    """A list of a busy machine, believed for ever on a quiet one."""
    prices = PriceList(seconds=dict(LIST))
    plain = costs_module.Mean(0.95)
    for _ in range(40):
        plain.add(0.0125)
    assert not prices.is_stale(plain, 100)
    for _ in range(99):
        plain.add(0.0075)
    assert not prices.is_stale(plain, 100), "a process differs from the next by so much"
    for _ in range(99):
        plain.add(0.004)
    assert prices.is_stale(plain, 100)
    assert not prices.is_stale(plain, 9000)  # a long context is another thing to time
    prices.took_s = 1.0
    assert not prices.is_stale(plain, 100)


def test_a_slow_model_is_given_fewer_sizes(monkeypatch):
    """Measuring must not take longer than the reply that it is to speed up."""
    seconds, took_s = timed(monkeypatch, 0.06)
    assert {0, 1, 2} <= seconds.keys() and len(seconds) < len(SIZES) and took_s < 3


def test_compiling_leaves_a_fast_model_all_its_sizes(monkeypatch):
    """On CUDA the first call of a size takes seconds: one size was measured, and kept for ever."""
    seconds, _ = timed(monkeypatch, 0.001, first_s=1.5)
    assert seconds.keys() == {0, *SIZES} and max(seconds.values()) < 0.01


def test_prices_are_those_of_warm_calls(monkeypatch):
    """On an H200 a call of 8 rows, which took 13.7 ms, took 20 to 45 in the list: what the first
    calls of a size are planned with, and those behind calls of other sizes, was in most of it."""
    seconds, _ = timed(monkeypatch, 0.01, first_s=0.5, again_s=0.03)
    assert seconds.keys() == {0, *SIZES}
    assert list(seconds.values()) == pytest.approx([0.01] * len(seconds))


def test_compiling_ends_some_time(monkeypatch):
    """Ten sizes that take half a minute each would be a program that hangs."""
    _, took_s = timed(monkeypatch, 0.001, first_s=20)
    assert took_s < 100


def test_calls_are_timed_at_length_where_that_is_read_fast(monkeypatch):
    """What attention costs by the row does not show after 64 tokens; and reading a thousand on a
    slow model takes longer than all of the measuring."""
    e, now, read = engine("llama", model=build("llama")), [0.0], []
    for token_s in (0.0, 0.002, 0.1):
        timeline = e.scratch_timeline()
        feed, begin = timeline.feed, now[0]

        def slow(tokens, feed=feed, token_s=token_s, **how):
            now[0] += token_s * len(tokens)
            return feed(tokens, **how)

        monkeypatch.setattr(timeline, "feed", slow)
        costs_module._read_context(timeline, (prompt(8) * 200)[:1024], lambda: now[0])
        read.append((timeline.pos, now[0] - begin))
    assert [pos for pos, _ in read[:2]] == [1024, 378] and read[1][1] < 1
    assert read[2][0] == 133


def test_a_gpu_is_known_by_its_name_not_by_the_hosts(monkeypatch):
    """A laptop that gets another host name in every network measured its prices again each time."""
    e = engine("llama", model=build("llama"))
    key = e._price_key()
    monkeypatch.setattr("platform.node", lambda: "another.local")
    assert e._price_key() == key
    monkeypatch.setattr("mlx.core.device_info", lambda device: {"device_name": "Apple M9"})
    assert "Apple M9" in e._price_key()["device"]


# --- prices while running ---------------------------------------------------------------------


def test_prices_follow_the_list_and_what_is_seen():
    """A kink must be seen where it is; a machine that differs from its list must be believed."""
    known = costs()
    assert known.price(2) == pytest.approx(1.5) and known.price(4) == known.price(8)
    assert 2.0 < known.price(12) < known.price(16) == pytest.approx(3.0)
    for _ in range(12):
        known.observe(5, 3, 0.04)
    assert known.price(5) == pytest.approx(4.0, rel=0.1) and known.price(4) < 4.0
    assert known.price(6) > 3.5


def test_a_size_that_is_planned_anew_now_and_then_costs_what_it_takes_warm():
    """On CUDA a call of five rows took three times as long whenever calls of other sizes had come
    between, and passed for one that does not pay."""
    known = costs()
    for _ in range(6):
        known.observe(5, 3, 0.09)  # the first, and what was planned since was forgotten
        for _ in range(4):
            known.observe(5, 3, 0.03)
    assert 2.9 < known.price(5) < 3.4


def test_prices_never_fall_with_rows():
    """Noise that makes more rows cheaper would draft without end."""
    known = costs()
    for rows, seconds in ((5, 0.02), (3, 0.025), (9, 0.019)) * 4:
        known.observe(rows, 1, seconds)
    prices = [known.price(rows) for rows in range(1, 33)]
    assert prices == sorted(prices)


def test_prices_are_relative_to_plain_decoding_at_the_depth_of_the_context():
    """A long context makes all calls slower: none of them got dearer by that."""
    known = costs()
    for _ in range(100):
        known.observe_plain(0.03)
    assert known.price(8) == pytest.approx(2.0, rel=0.05)


def test_what_a_run_ahead_waits_for_at_first_it_saves_at_last():
    """The first token's wait passed for the price of beginning anew: guesses that pay were not
    worth the interruption."""
    known = costs()
    for _ in range(30):
        known.observe_plain(0.02, first=True)
        for _ in range(5):
            known.observe_plain(0.01)
        known.observe_plain(0.002, last=True)
    assert known.plain.value == pytest.approx(0.01, rel=0.01)
    assert known.price(1) == pytest.approx(1.2, rel=0.03)


def test_without_running_ahead_a_plain_token_is_a_call():
    """With penalties the next call waits for the token: drafts compare with that."""
    assert costs(runs_ahead=False).price(2) == pytest.approx(1.25)


def test_drafting_times_are_a_line():
    """A drafter that guesses token by token costs by the token, a block drafter by the block."""
    by_token, by_block = DraftTimes(), DraftTimes()
    for n in (9, 2, 4, 8, 3) * 4:
        by_token.observe(n, 0.01 * n)
        by_block.observe(n, 0.05)
    assert by_token.seconds(12) == pytest.approx(0.12, rel=0.1)
    assert by_block.seconds(12) == pytest.approx(0.05, rel=0.2)


@pytest.mark.parametrize("compiling", [1, 2, 5])
def test_drafts_that_compiled_are_not_what_drafts_cost(compiling):
    """Guards: a drafter that is 40 times too dear for ever, because its first drafts compiled
    kernels for seconds and it was not asked again."""
    times = DraftTimes()
    for _ in range(compiling):
        times.observe(4, 1.0)
    for n in (4, 2, 6):
        times.observe(n, 0.01 * n)
    assert times.seconds(4) == pytest.approx(0.04, rel=0.3)


def test_what_a_trial_reads_is_its_own_price():
    """A draft model that is tried after 60 tokens reads them first: that passed for what each guess
    of it costs, or, before enough was timed, for nothing, and it was tried too often."""
    times = DraftTimes()
    assert times.trial(0.1, 1) == pytest.approx(0.3)
    times.tried(0.25)
    assert times.trial(0.1, 1) == pytest.approx(2.5) and times.prices(0.1) == (0.0, 0.3)
    times.tried(9.0)  # a prompt, or what compiles
    assert times.trial(0.1, 1) == 4.0
    times.tried(0.02)
    assert times.trial(0.1, 1) == pytest.approx(0.3), "nothing is known yet of guesses"
    for _ in range(3):
        times.observe(1, 0.02)
    assert times.trial(0.1, 1) == pytest.approx(0.2)


# --- in a session -----------------------------------------------------------------------------


def loop(n):
    return (prompt(7) * n)[:n]


def test_measured_once_when_there_is_something_to_decide(monkeypatch):
    """A short reply, or one without guesses, must not wait for it, and nobody twice."""
    monkeypatch.setattr("ds4cli.drafters.policy.MEASURED_AFTER", 12)
    calls, true = [], PriceList.measure
    monkeypatch.setattr(PriceList, "measure", lambda *args: (calls.append(1), true(*args)))
    model = build("qwen3_next", scale=2.0)
    for settings in ({"drafter": "none"}, {"num_draft_tokens": 3}, {"speculate": "never"}):
        e = engine("qwen3_next", model=model, **{"drafter": "ngram", **settings})
        run(e.session(), loop(20), 30)
    assert not calls
    e = engine("qwen3_next", model=model, drafter="ngram")
    for length in (6, 40, 40):
        session = e.session()
        assert run(session, loop(20), length) == plain(model, loop(20), length)
        assert len(calls) == (length > 12)
    assert sum("measured" in notice for notice in e.notices) == 1


def run(session, tokens, length):
    session.sync(tokens)
    return [t for event in session.stream(max_tokens=length) for t in event.tokens]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_plain_tokens_run_ahead_beside_a_drafter(name, monkeypatch):
    """With a drafter at hand each token waited for the one before; a change of mind lost a call."""
    model = build(name, scale=2.0)
    e = engine(name, model=model, drafter="ngram")
    session, ahead = e.session(), []
    true = Session._run_ahead
    monkeypatch.setattr(Session, "_run_ahead", lambda *args: (ahead.append(1), true(*args))[1])
    wishes = iter([i % 5 == 4 for i in range(200)])
    drafts = iter([[], [1, 2]] * 100)
    monkeypatch.setattr(session.policy, "wants", lambda *args: next(wishes))
    monkeypatch.setattr(session.policy, "choose", lambda *args: "whose guesses")
    monkeypatch.setattr(session.policy, "give", lambda *args: next(drafts))
    assert run(session, prompt(10), 60) == plain(model, prompt(10), 60)
    blocks = session.stats.blocks
    assert len(ahead) > 30 and session.stats.proposed > 10
    assert blocks <= session.stats.forwards <= blocks + 1  # at most the one at the end
