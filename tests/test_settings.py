"""Settings: defaults once, layers in order, every bad value named. Pure; no model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tomli

from ds4cli import settings
from ds4cli.errors import UsageError
from ds4cli.settings import OPTIONS, PANELS, Settings, find_config, read_config, resolve, to_toml


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_layers_in_order(tmp_path):
    """Guards: a file overrules a flag, or a profile does not overrule its file."""
    text = "temp = 0.1\ntop_p = 0.1\nmin_p = 0.1\nseed = 1\n[profiles.p]\nmin_p = 0.2\nseed = 2\n"
    config = read_config(write(tmp_path / "c.toml", text))
    environ = {"DS4CLI_TOP_P": "0.3", "DS4CLI_SEED": "3"}
    resolved = resolve({"seed": 4, "top_k": None}, config, "p", environ)
    chosen = resolved.settings
    assert (chosen.temp, chosen.min_p, chosen.top_p, chosen.seed) == (0.1, 0.2, 0.3, 4)
    names = ("seed", "top_p", "min_p", "temp", "top_k")
    origins = [resolved.origins[name].split()[0] for name in names]
    assert origins == ["flag", "environment", "profile", "file", "default"]
    assert resolved.given("seed") and not resolved.given("temp")


def test_a_user_without_a_home(monkeypatch):
    """Guards: who has neither HOME nor a passwd entry cannot start, or gets a folder `~`."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert find_config({}) is None and settings.cache_folder({}) is None
    with pytest.raises(UsageError, match="no home folder"):
        settings.state_folder({})
    assert settings.state_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/ds4cli")


def test_two_fields_never_share_a_flag():
    """Guards: a new setting's short flag silently replaces another's."""
    spellings = [flag for option in OPTIONS.values() for flag in option.flags]
    spellings += ["--" + name.replace("_", "-") for name in OPTIONS]
    assert len(spellings) == len(set(spellings))
    assert {option.panel for option in OPTIONS.values()} == set(PANELS)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("tempp = 1", "unknown key `tempp`", "did you mean `temp`?"),
        ("max-tokens = 1", "unknown key `max-tokens`", "did you mean `max_tokens`?"),
        ('temp = "hot"', "`temp` wants a number", None),
        ("temp = true", "`temp` wants a number", None),
        ("seed = 1.5", "`seed` wants a whole number", None),
        ("parallel = 'x'", "`parallel` wants auto, or a whole number, not `x`", None),
        ("temp = inf", "`temp` wants a number", None),
        ("top_p = 0", "`top_p` cannot be `0`", "it wants above 0, at most 1"),
        ("max_tokens = 0", "`max_tokens` cannot be `0`", "it wants at least 1, or -1"),
        ('drafter = "ngrm"', "`drafter` cannot be `ngrm`", "did you mean `ngram`?"),
        ("stop = [1]", "`stop` wants a list of texts", None),
        ('stop = [""]', "`stop` cannot be", "no empty text"),
        ("logit_bias = {x = 1}", "`logit_bias` wants token ids", None),
        ("logit_bias = {-1 = 1}", "`logit_bias` wants token ids", None),
        ("num_draft_tokens = 64", "`num_draft_tokens` cannot be `64`", "from 1 to 31"),
        ("kv_bits = 7", "`kv_bits` cannot be `7`", "2, 4 or 8"),
        ("temp = 1\ntemp = 2", "not valid TOML", None),
        ("temp = \n", "line 1", None),
        ("[profiles]\na = 1", "`profiles`", "[profiles.NAME]"),
        ("[profiles.a]\ntempp = 1", "[profiles.a]", "did you mean `temp`?"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message, hint):
    """Guards: a mistyped or ill-typed key is dropped in silence, or reported without its place."""
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(UsageError) as caught:
        read_config(path)
    assert message in caught.value.message and str(path) in caught.value.message
    assert hint is None or hint in caught.value.hint


@pytest.mark.parametrize("data", [None, b"\xff\xfe"])
def test_an_unreadable_file_is_named(tmp_path, data):
    """Guards: a missing or binary config file ends in a traceback."""
    path = tmp_path / "c.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError, match="config file"):
        read_config(path)


def test_an_ill_typed_variable_is_named():
    """Guards: the message names a setting that the user never typed."""
    with pytest.raises(UsageError, match=r"\$DS4CLI_TEMP"):
        resolve({}, environ={"DS4CLI_TEMP": "hot"})


def test_variables_have_the_types_of_their_settings():
    """Guards: a variable arrives as text where a number, switch or table is due."""
    environ = {"DS4CLI_RAW": "yes", "DS4CLI_LOGIT_BIAS": "5=1.5,6=-2", "DS4CLI_STOP": "a b"}
    chosen = resolve({}, environ=environ).settings
    assert (chosen.raw, chosen.logit_bias, chosen.stop) == (True, {5: 1.5, 6: -2.0}, ("a b",))


def test_a_missing_profile_is_an_error(tmp_path):
    """Guards: a mistyped profile runs with the defaults."""
    config = read_config(write(tmp_path / "c.toml", "[profiles.fast]\ntemp = 1"))
    with pytest.raises(UsageError) as caught:
        resolve({}, config, "fats", {})
    assert caught.value.hint == "did you mean `fast`?"
    with pytest.raises(UsageError):
        resolve({}, None, "fast", {})


def test_contradictions_count_within_one_layer(tmp_path):
    """Guards: a flag cannot overrule a file's draft model, or two flags that exclude each other
    pass."""
    config = read_config(write(tmp_path / "c.toml", 'draft_model = "d"'))
    assert resolve({"drafter": "ngram"}, config, None, {}).settings.drafter == "ngram"
    with pytest.raises(UsageError, match="contradict"):
        resolve({"drafter": "ngram", "draft_model": "d"}, environ={})
    with pytest.raises(UsageError, match="draft model"):
        resolve({"drafter": "model"}, environ={})


def test_bad_keywords_are_refused():
    """Guards: a library caller's bad value goes unnoticed until it is used."""
    with pytest.raises(UsageError, match="`model`"):
        Settings(model=None)
    with pytest.raises(UsageError, match="`temp`"):
        Settings(temp=-1)
    with pytest.raises(TypeError):
        Settings(tempp=1)
    assert Settings(stop="x", logit_bias={"3": 1}).logit_bias == {3: 1.0}


def test_find_config_prefers_the_working_folder(tmp_path, monkeypatch):
    """Guards: the file of the home folder hides the project's."""
    home = tmp_path / "xdg" / "ds4cli"
    home.mkdir(parents=True)
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert find_config(environ) is None
    write(home / "config.toml", "")
    assert find_config(environ) == home / "config.toml"
    write(tmp_path / "ds4cli.toml", "")
    assert find_config(environ) == Path("ds4cli.toml")


def test_printed_settings_can_be_read_back(tmp_path):
    """Guards: `--show-config` prints something that is not a settings file."""
    odd = Settings(stop=('a"\n\\', "\x7fé🎉"), logit_bias={5: -1.5}, system="x = 1 # no", kv_bits=4)
    text = to_toml(odd, dict.fromkeys(OPTIONS, "default"))
    assert Settings(**tomli.loads(text)) == odd
    assert read_config(write(tmp_path / "c.toml", text)).values["stop"] == odd.stop


def test_settings_import_without_mlx():
    """Guards: `--help` starts to import mlx, which takes seconds."""
    code = "import sys, ds4cli.cli, ds4cli.settings; sys.exit('mlx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_every_field_has_an_option():
    """Guards: a setting that no flag, file or variable can reach."""
    assert [field.name for field in fields(Settings)] == list(OPTIONS)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("temprature = 1", "did you mean `temp`?"),
        ("max-tokens = 1", "did you mean `max_tokens`?"),
        (
            "[generate]\ntemp = 1",
            "settings stand at the top of the file, or under `[profiles.NAME]`",
        ),
        ("temp =", "`temp` has no value: leave the line out, or write one"),
        ("temp", "a setting is written `name = value`"),
        ("[profiles.x", "a table is written `[profiles.NAME]`"),
        (
            "model = qwen",
            'texts need quotes, as in `model = "NAME"`; numbers, true and false have none',
        ),
    ],
)
def test_hints_for_a_settings_file_fit(tmp_path, text, hint):
    """Guards: advice about quotes for a line that has no value; no advice for another spelling."""
    path = tmp_path / "ds4cli.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_config(path)
    assert caught.value.hint.startswith(hint)


def test_a_mistyped_variable_is_said():
    """Guards: `DS4CLI_TMEP=1`, of which nobody hears."""
    environ = {"DS4CLI_TMEP": "1", "DS4CLI_TEMP": "1", "DS4CLI_BLAS": "none", "HOME": "/"}
    said = "nothing reads `DS4CLI_TMEP`: did you mean `DS4CLI_TEMP`?"
    assert settings.unread_variables(environ) == [said]
