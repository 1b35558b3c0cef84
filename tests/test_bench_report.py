"""The arithmetic of measurements, the formats of reports, and what the user may write wrong."""

from __future__ import annotations

import builtins
import csv
import io
import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import tomli

from ds4cli.bench import machine, matrix, measure, plot, report, summary, trace
from ds4cli.bench.check import Finding, smallest
from ds4cli.bench.measure import Row, Sample, compare, doubts, mad, ratio, timed
from ds4cli.errors import UsageError

ROOT = Path(__file__).parents[1]


def row(*samples, way="reuse", case="back 8", **fields):
    fields = {"scenario": "rewind", "context_tokens": 100, "distance_tokens": 8, **fields}
    return Row(case=case, way=way, samples=tuple(map(float, samples)), **fields)


# --- arithmetic -----------------------------------------------------------------------------------


def test_median_and_deviation_ignore_one_outlier():
    """Guards: one slow sample moves what is reported."""
    r = row(10, 12, 11, 500, 9)
    assert (r.median, r.mad, mad([1, 1, 4])) == (11, 1, 0)


def test_samples_become_milliseconds_with_their_largest_counts():
    """Guards: seconds printed as ms; a sample that took more calls hides behind the others."""
    samples = [Sample(0.5, 0, 0, "block"), Sample(0.25, 2, 9, "frontier")]
    r = timed(samples, "rewind", "back 1", "reuse")
    assert r.samples == (500, 250) and (r.forwards, r.fed_tokens, r.source) == (2, 9, "frontier")


def test_a_ratio_carries_both_spreads_and_survives_zero():
    """Guards: a division by zero, or a spread that leaves one side out."""
    found = ratio(row(20, 22, 18), row(10, 10, 10))
    assert (found.value, found.spread) == (2, pytest.approx(0.2))
    assert ratio(row(0), row(0)).value == 1 and ratio(row(1), row(0)).value == float("inf")


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        ([10, 10, 10], False),
        ([10.9, 10.9, 10.9], False),
        ([11.2, 11.2, 11.2], True),
        ([11.2, 14, 7], False),
        ([5, 5, 5], False),
    ],
)
def test_worse_is_past_the_tolerance_and_past_the_spread(now, worse):
    """Guards: noise fails a comparison, or a slower program passes it."""
    (change,) = compare([row(10, 10, 10)], [row(*now)], tolerance=0.1)
    assert change.is_worse is worse


def test_a_lost_match_is_worse_however_fast():
    """Guards: a faster, wrong program passes a comparison."""
    (change,) = compare([row(10, match=True)], [row(1, match=False)], tolerance=0.1)
    assert change.is_worse


def test_rows_are_paired_by_what_they_are():
    """Guards: a comparison of other contexts, ways or cases; rows that vanish silently."""
    old = [row(1), row(1, way="rebuild"), row(1, context_tokens=7)]
    assert [c.row.key for c in compare(old, [row(2), row(2, case="other")], 0.1)] == [old[0].key]
    assert measure.missing(old, [row(2)]) == old[1:]


def test_doubtful_samples_are_named():
    """Guards: a cold first sample or a noisy machine goes unnoticed; a growing session is noise."""
    words = doubts([row(50, 10, 11, 10), row(10, 20, 5, 9), row(1, 1, 1)])
    assert len(words) == 2 and words[0].startswith("first sample slow")
    assert words[1].startswith("noisy")
    assert doubts([row(1, 50, 100, are_repeats=False)]) == []


def test_the_smallest_failure_is_the_one_with_the_shortest_context():
    """Guards: the user is sent to repeat a long case where a short one fails too."""
    good, long, short = (
        Finding("row:16:1:1", 0.0, 1.0),
        Finding("row:96:1:1", 2.0, 1.0),
        Finding("depth:16:5", 0.0, 1.0, is_same=False),
    )
    assert smallest([good, long, short]) is short and smallest([good]) is None


# --- formats --------------------------------------------------------------------------------------


@pytest.fixture
def whole():
    """A report with a pair of rows, a row without a partner, and a row of bytes."""
    rows = [
        row(1, 2, 3, against="rebuild", match=True, forwards=0, fed_tokens=0, source="block"),
        row(2000, 2000, 2300, way="rebuild", forwards=2, fed_tokens=92),
        row(12_206_080, way="checkpoints", case="kept", scenario="memory", unit="bytes"),
    ]
    return report.Report({"chip": "C", "cores": 2}, {"block": 5}, rows, warnings=["busy"])


def test_all_formats_say_the_same(whole):
    """Guards: a format that drops rows or samples, or rounds them."""
    data = json.loads(report.as_json(whole))
    lines = [json.loads(line) for line in report.as_jsonl(whole).splitlines()]
    cells = list(csv.DictReader(io.StringIO(report.as_csv(whole))))
    for found, line, cell, r in zip(data["rows"], lines, cells, whole.rows, strict=True):
        assert found["samples"] == line["samples"] == list(r.samples)
        assert [float(x) for x in cell["samples"].split()] == list(r.samples)
        assert found["median"] == line["median"] == float(cell["median"]) == r.median
        assert line["environment"] == data["environment"] == whole.environment
    assert data["warnings"] == ["busy"] and data["matrix"] == {"block": 5}


def test_a_json_report_is_read_back(whole, tmp_path):
    """Guards: `--compare` cannot read what the program wrote, or changes it."""
    path = tmp_path / "old.json"
    path.write_text(report.as_json(whole))
    assert report.read(path).rows == whole.rows
    for text in ("{}", "[1]", "no json", '{"environment": {}, "rows": [{"scenario": "x"}]}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="not a report"):
            report.read(path)
    with pytest.raises(UsageError, match="cannot read"):
        report.read(tmp_path / "missing.json")


def test_markdown_puts_a_row_beside_its_partner(whole):
    """Guards: units that mislead, counts of one way only, a mismatch that is not shouted."""
    text = report.markdown(whole)
    assert "| case | reuse | rebuild | faster by | how | model calls | tokens fed |" in text
    assert "| back 8 | 2 ± 1 ms | 2 ± 0 s | 1,000x | block | 0 / 2 | 0 / 92 | yes |" in text
    assert "| kept | checkpoints | 12.2 MB |" in text and "warning: busy" in text
    assert report.yes_no(False) == "**no**"


def in_words(rows=(), findings=()):
    return summary.sentences(rows, findings, lambda ms: report.amount(ms, "ms"))


def test_the_result_stands_first_in_a_sentence(whole):
    """Guards: a reader who has to find what going back costs in a table of twenty rows."""
    rows = [
        row(35, case="back 64", distance_tokens=64, against="rebuild", match=True),
        row(4300, case="back 64", distance_tokens=64, way="rebuild"),
        row(50, case="one token decoded", way="decode", distance_tokens=0),
        row(100.2, 200.4, scenario="control", case="c", way="recording", against="not recording"),
        row(100, 200, scenario="control", case="c", way="not recording"),
    ]
    assert in_words(rows) == (
        "Going back 64 tokens takes 0.7 of a decoded token (35 ms) instead of 4.30 s; recording "
        "costs 0.2 %. The text afterwards was the same every time."
    )
    text = report.markdown(report.Report({"chip": "C"}, rows=rows))
    assert text.startswith("Going back 64 tokens") and text.endswith("Measured on C\n")
    assert "- rebuild: reading everything" in text and "- horizon:" not in text


def test_a_result_that_is_bad_or_noise_is_called_so():
    """Guards: a negative cost, or a mismatch behind good numbers."""
    noisy = [
        row(90, 120, scenario="control", way="recording", against="not recording"),
        row(100, 100, scenario="control", way="not recording"),
    ]
    assert in_words(noisy) == "Recording costs less than can be told here (± 15.0 %)."
    assert "After 1 of 1 measurements" in in_words([row(1, match=False)])
    good, bad = Finding("row:16:1:1", 0.0, 1.0), Finding("row:16:1:2", 2.0, 1.0)
    assert in_words(findings=[good]) == "All 1 cases hold: going back changed nothing."
    assert in_words(findings=[good, bad]).startswith("1 of 2 cases do not hold")
    assert in_words() == ""


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4204, "ms", "420 µs"),
        (41.23, "ms", "41.2 ms"),
        (9740, "ms", "9.74 s"),
        (68, "%", "68 %"),
        (660, "bytes", "660 B"),
        (0, "bytes", "0 B"),
        (1.5e9, "bytes", "1.50 GB"),
    ],
)
def test_amounts_have_three_digits_and_a_unit(value, unit, text):
    """Guards: 0.00 ms for a fast rewind; digits that no clock has."""
    assert report.amount(value, unit) == text


def test_findings_survive_json_without_infinities():
    """Guards: `Infinity` in the output, which JSON readers refuse."""
    found = report.Report({}, findings=[Finding("row:16:1:1", float("inf"), 1.0)])
    (finding,) = json.loads(report.as_json(found))["findings"]
    assert finding["worst"] is None and finding["is_ok"] is False
    assert "**no**" in report.markdown(found)
    assert "row:16:1:1" in report.as_csv(found)


def test_differing_environments_are_named():
    """Guards: numbers of two machines or models are compared without a word."""
    assert report.unlike({"chip": "A", "cores": 2}, {"chip": "B", "cores": 2}) == [
        "chip was `A`, is `B`"
    ]


# --- pictures -------------------------------------------------------------------------------------


def picture_rows():
    ways = {"reuse": 1, "rebuild": 100}
    return [
        row(t * d, way=way, distance_tokens=d, context_tokens=c)
        for way, t in ways.items()
        for d in (1, 8)
        for c in (100, 200)
    ]


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_a_picture_is_drawn(tmp_path, suffix):
    """Guards: `--plot` fails, or draws an empty file."""
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x{suffix}"
    assert plot.write(picture_rows(), path, "title") and path.stat().st_size > 5000
    assert plot.write([row(1)], path, "one context")


def test_without_matplotlib_there_are_bars(tmp_path, monkeypatch):
    """Guards: a missing extra ends in a traceback."""
    imported = builtins.__import__

    def refuse(name, *rest, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert not plot.write(picture_rows(), tmp_path / "x.svg", "title")
    bars = [line.count("█") for line in plot.chart(picture_rows()).splitlines()[1:]]
    assert min(bars) == 1 and max(bars) == plot.BAR and len(bars) == 8
    assert "nothing to draw" in plot.chart([])


# --- what is measured -----------------------------------------------------------------------------


def test_the_config_file_equals_the_defaults():
    """Guards: copying the template changes what is measured."""
    text = (ROOT / "configs" / "rewind-bench.toml").read_text(encoding="utf-8")
    defaults = {
        k: list(v) if isinstance(v, tuple) else v for k, v in asdict(matrix.Matrix()).items()
    }
    assert tomli.loads(text) == defaults


def test_flags_overrule_the_file_and_the_file_the_defaults(tmp_path):
    """Guards: a flag without effect."""
    path = tmp_path / "m.toml"
    path.write_text("contexts = [64, 128]\nblock = 3\n")
    found = matrix.read(path, quick=True, given={"contexts": (7,), "scale": None})
    assert (found.contexts, found.block, found.num_trials) == ((7,), 3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contexs = [1]", "unknown key `contexs`"),
        ("contexts = []", "`contexts` cannot be"),
        ("num_trials = 0", "`num_trials` cannot be `0`"),
        ("block = 1", "`block` cannot be `1`"),
        ("scale = -1", "`scale` cannot be `-1`"),
        ("contexts = ['a']", "`contexts` cannot be `a`"),
        ("contexts = [", "not valid TOML"),
    ],
)
def test_a_bad_matrix_is_refused(tmp_path, text, message):
    """Guards: hours of measuring the wrong thing, or a traceback in the middle of them."""
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        matrix.read(path, quick=False, given={})


def test_lists_of_numbers():
    """Guards: a mistyped list is taken for something else."""
    assert matrix.numbers("8,64", "distances") == (8, 64)
    assert matrix.numbers(None, "distances") is None
    with pytest.raises(UsageError, match="--depth"):
        matrix.numbers("8;64", "distances")


def test_the_agents_trace_has_the_sizes_that_users_report():
    """Guards: the example shrinks, or has no boundaries to repair."""
    messages = trace.read()
    start = trace.length(messages[:2])
    assert 7_500 < start < 8_700 and 53_000 < trace.length(messages) < 55_000
    assert sum(m.redrawn > 0 for m in messages) == 25
    small = trace.scaled(messages, 0.01)
    assert all(m.tokens >= 1 and m.redrawn <= m.tokens for m in small)


@pytest.mark.parametrize(
    "line",
    [
        '{"role": "poet", "tokens": 1}',
        '{"role": "user"}',
        "[]",
        "x",
        '{"role": "user", "tokens": 0}',
    ],
)
def test_a_bad_trace_is_refused(tmp_path, line):
    """Guards: a traceback for a typing mistake in a trace."""
    path = tmp_path / "t.jsonl"
    path.write_text(line)
    with pytest.raises(UsageError, match="line 1"):
        trace.read(path)


def test_the_machine_is_described_without_a_model():
    """Guards: an exception where a system does not say what it is."""
    assert machine.chip() and all(isinstance(doubt, str) for doubt in machine.doubts())
    assert machine._lines("/does/not/exist") == [] and machine._output("/does/not/exist") == ""


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            200000.
Pages inactive:                           30000.
Pages speculative:                         1000.
Pages throttled:                              0.
Pages wired down:                        100000.
"""
MAC = {
    ("vm_stat",): VM_STAT,
    ("sysctl", "-n", "vm.swapusage"): "total = 2048.00M  used = 1021.25M  free = 1026.75M",
    ("sysctl", "-n", "machdep.cpu.brand_string"): "Apple M9",
    ("pmset", "-g"): " standby              1\n lowpowermode         1\n",
    ("pmset", "-g", "therm"): "CPU Power notify\n\tCPU_Speed_Limit \t= 62\n",
    ("pmset", "-g", "batt"): "Now drawing from 'Battery Power'",
}


def test_a_mac_is_asked_in_its_own_words(monkeypatch):
    """Guards: `/proc` looked for on a Mac, where swap, low power and heat went unseen."""
    said = dict(MAC)
    monkeypatch.setattr(machine, "is_mac", lambda: True)
    monkeypatch.setattr(machine, "_output", lambda *command: said.get(command, ""))
    monkeypatch.setattr(machine, "memory_bytes", lambda: 16 << 30)
    assert machine.chip() == "Apple M9"
    assert machine.available_bytes() == 41000 * 16384
    assert machine.swap_bytes() == int(1021.25 * (1 << 20))
    doubts = " | ".join(machine.doubts())
    for words in ("memory is short: 0.7 GB", "swap is in use: 1.1 GB", "battery", "low power"):
        assert words in doubts, doubts
    said["pmset", "-g"] = " lowpowermode         0\n"
    assert "held to 62 %" in " | ".join(machine.doubts())
    said.clear()
    assert machine.available_bytes() is None and machine.swap_bytes() == 0
    assert not any("memory" in doubt or "hot" in doubt for doubt in machine.doubts())


def test_every_field_of_the_matrix_is_explained():
    """Guards: a size that nobody can look up."""
    assert all(field.name in matrix.Matrix.__doc__ for field in fields(matrix.Matrix))
