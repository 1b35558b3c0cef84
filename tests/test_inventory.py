"""`ds4cli models` on a made-up hub cache, and `ds4cli doctor`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from folder import save_folder
from typer.testing import CliRunner

from ds4cli import doctor
from ds4cli.cli import app
from ds4cli.settings import cache_folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A cache with a hybrid, a model that mlx-lm does not know, and a repository of something."""
    cache = tmp_path_factory.mktemp("hub")
    for name, files in {"tiny": None, "odd": {"config.json": '{"model_type": "none"}'}}.items():
        folder = cache / f"models--some--{name}" / "snapshots" / "0123abc"
        folder.parent.mkdir(parents=True)
        if files is None:
            save_folder(folder, "qwen3_next")
            continue
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
    return cache


def models(hub: Path, *more: str):
    return subprocess.run(
        [sys.executable, "-m", "ds4cli", "models", *more],
        env={**os.environ, "HF_HUB_CACHE": str(hub), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_models_are_listed_and_removed(hub):
    """Guards: a model that cannot run here without a word of why; one removed by mistake."""
    shown = models(hub).stdout.splitlines()
    tiny = next(line for line in shown if line.startswith("some/tiny"))
    assert "qwen3_next" in tiny and "can't be cut" in tiny
    assert any(line.startswith("some/odd") and "none" in line for line in shown)
    wrong = models(hub, "--remove", "some/tin")
    assert wrong.returncode == 2 and "did you mean `some/tiny`?" in wrong.stderr
    assert models(hub, "--remove", "some/odd").returncode == 0
    assert [path.name for path in hub.glob("models--*")] == ["models--some--tiny"]


def test_doctor_proves_and_forgets_prices(hybrid_folder, monkeypatch):
    """Guards: a proof that always holds; prices that nothing heals."""
    kept = cache_folder() / "call-costs" / "0.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    result = CliRunner().invoke(app, ["doctor", "-m", str(hybrid_folder)])
    assert result.exit_code == 0 and "change nothing" in result.stdout and kept.exists()
    assert "mlx-lm" in result.stdout and "not measured yet" in result.stdout
    monkeypatch.setattr(doctor, "proof", lambda engine: "other text")
    assert CliRunner().invoke(app, ["doctor", "-m", str(hybrid_folder)]).exit_code == 1
    assert CliRunner().invoke(app, ["doctor", "--reset-costs"]).exit_code == 0
    assert not kept.exists()
