"""What a machine does with a model, as data to send."""

import json

import pytest
from oracle import engine
from typer.testing import CliRunner

from ds4cli.bench import doctor
from ds4cli.cli import app
from ds4cli.tape.tape import Tape


@pytest.fixture(scope="module")
def hybrid():
    return engine("qwen3_next")


def test_the_report_is_data_and_every_part_is_there(hybrid, monkeypatch):
    """Guards: a report that cannot be written, or that one failing part takes with it."""
    monkeypatch.setattr(doctor, "PROMPTS", 1)
    monkeypatch.setattr(doctor, "ROWS", (1, 2, 5))
    monkeypatch.setattr(doctor, "REPEATS", 1)
    monkeypatch.setitem(doctor.PARTS, "divergence", lambda e: doctor.divergence(e, 1, 8))
    monkeypatch.setitem(doctor.PARTS, "call_seconds", lambda e: doctor.call_seconds(e, (16,)))
    monkeypatch.setitem(doctor.PARTS, "noise", lambda e: 1 / 0)
    monkeypatch.setitem(doctor.PARTS, "families", lambda e: {})
    found = json.loads(json.dumps(doctor.report(hybrid)))
    assert list(found) == list(doctor.PARTS)
    failed = {name for name, part in found.items() if isinstance(part, dict) and "failed" in part}
    assert failed == {"noise"} and "ZeroDivisionError" in found["noise"]["failed"]
    assert found["replay"]["difference"] < 0.1 and found["replay"]["families"] == ["gated delta"]
    assert found["replay"]["A_log"] and not found["replay"]["problem"]
    assert set(found["call_seconds"]) == {"16"} and min(found["sync_seconds"].values()) > 0
    assert set(found["divergence"][0]) == {"again", *(f"block {n}" for n in doctor.BLOCKS)}
    assert found["memory_bytes"]["counted"] > 0


def test_the_replay_is_measured_without_leaving_a_trace(hybrid, monkeypatch):
    """Guards: a model armed twice, whose rows are recorded twice; an exception that is not told."""
    before = [type(m) for m in hybrid.model.modules()]
    doctor.replay(hybrid)
    assert [type(m) for m in hybrid.model.modules()] == before

    def fail(*args):
        raise TypeError("no such argument")

    monkeypatch.setattr(Tape, "replay", fail)
    assert doctor.replay(hybrid)["problem"] == "TypeError: no such argument"


def test_a_text_that_parts_is_found_where_it_parts(hybrid, monkeypatch):
    """Guards: a comparison that sees nothing (negative control), or sees what is not there."""
    assert all(part is None for part in doctor.divergence(hybrid, 1, 12)[0].values())
    picks = doctor._picks_in_blocks
    monkeypatch.setattr(
        doctor,
        "_picks_in_blocks",
        lambda *args: [p + (i == 7) for i, p in enumerate(picks(*args))],
    )
    parted = doctor.divergence(hybrid, 1, 12)[0]
    assert parted["again"] is None and parted["block 2"]["token"] == 7
    assert parted["block 2"]["gap"] > 0


def test_rows_alone_and_in_blocks_are_compared():
    """Guards: a row that is compared with itself."""
    found = doctor.row_invariance(128)
    assert set(found) == {"float32", "bfloat16", "4 bit", "attention"}
    assert all(part[1] == 0 for part in found.values())
    assert all(0 <= x < 0.05 for part in found.values() for x in part.values())


def test_noise_is_named_by_position():
    """Guards: machines whose texts at a temperature differ, and nobody sees why."""
    found = doctor.noise_hashes(50)
    assert found == doctor.noise_hashes(50) and len(set(found.values())) == len(found)


def test_lists_of_costs_without_a_folder_for_them(monkeypatch):
    """Guards: a crash where nobody knows a folder for what is kept between runs."""
    from ds4cli import doctor

    monkeypatch.setattr(doctor, "cache_folder", lambda: None)
    assert doctor._reset() == 0


def test_families_are_measured_on_tiny_models(monkeypatch):
    """Guards: a family that is passed over, or one whose failure takes the others with it."""
    monkeypatch.setattr(doctor, "_recurrent", lambda: ["mamba2", "lfm2", "no such"])
    found = doctor.families((5, 8))
    assert set(found["mamba2"]) == {"float32", "bfloat16", "4 bit"}
    for name in ("mamba2", "lfm2"):
        errors = [e for kind in found[name].values() for e in kind.values()]
        assert len(errors) == 6 and all(error < 0.1 for error in errors)
    assert "problem" in found["no such"]["float32"]


def test_a_family_is_measured_if_it_has_a_recurrence():
    """Guards: a family that a Mac user's report says nothing of."""
    assert doctor._replayed("mamba2") and doctor._replayed("lfm2")
    assert not doctor._replayed("llama")


def test_the_command_writes_the_report(model_folder, tmp_path, monkeypatch):
    """Guards: minutes of measuring, and then a file that cannot be written."""
    monkeypatch.setattr(doctor, "PARTS", {"system": doctor.system, "bad": lambda engine: 1 / 0})
    path = tmp_path / "report.json"
    words = ["doctor", "-m", str(model_folder), "--report"]
    done = CliRunner().invoke(app, [*words, str(path)])
    assert done.exit_code == 1 and "failed: bad" in done.stderr.replace("\n", " ")
    assert json.loads(path.read_text())["system"]["model"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "no" / "report.json")])
    assert done.exit_code == 2 and "measuring" not in done.stderr
