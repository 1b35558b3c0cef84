"""What a model folder says: which model it is, end tokens, context, weight files, templates."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from folder import TEMPLATE, VOCAB_SIZE, byte_tokenizer, save_folder
from mlx_lm.utils import load_config
from tokenizers import decoders
from typer.testing import CliRunner

from ds4cli.cli import app
from ds4cli.engine.engine import Engine
from ds4cli.errors import StateError
from ds4cli.models import config as configs
from ds4cli.models import identity, mlx_lm, shards
from ds4cli.models.source import locate
from ds4cli.models.tokenizers import load_tokenizer
from ds4cli.models.weights import load_weights


def change(path: Path, **entries) -> None:
    """Put entries into a JSON file, which may be new."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**table, **entries}), encoding="utf-8")


@pytest.fixture
def copy(model_folder, tmp_path):
    """A copy of the tiny model to spoil."""
    return shutil.copytree(model_folder, tmp_path / "copy")


def say(*args) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["generate", "--no-config", *map(str, args)])
    return done.exit_code, done.stdout, done.stderr


# --- identity -----------------------------------------------------------------------------------


def train(folder: Path, name: str) -> None:
    """Change one tensor; nothing else in the file, nor its size."""
    begin, end = shards.find(folder, "").files[0].spans[name]
    data = bytearray((folder / "model.safetensors").read_bytes())
    numbers = np.frombuffer(data, np.float32, (end - begin) // 4, begin)
    numbers += 0.01
    (folder / "model.safetensors").write_bytes(data)


def test_two_fine_tunes_of_one_base_are_two_models(copy, model_folder, tmp_path):
    """A saved session of one was taken up by the other, next-token logits off by 6.3: they have the
    same configs and file sizes."""
    train(copy, "model.layers.1.self_attn.q_proj.weight")
    session = Engine.load(model_folder).session()
    session.sync([1, 2, 3])
    session.save(tmp_path / "state")
    with pytest.raises(StateError):
        Engine.load(copy).load_session(tmp_path / "state")


DECIDING = {
    "chat_template.jinja": "{{ messages }}",
    "chat_template.json": '{"chat_template": "x"}',
    "generation_config.json": '{"eos_token_id": 5}',
    "config.json": "{}",
    "tokenizer_config.json": "{}",
}


@pytest.mark.parametrize("name", DECIDING)
def test_what_decides_belongs_to_the_identity(copy, name):
    """Guards: answers of two templates under one `system_fingerprint`."""
    source = locate(str(copy))
    before = source.fingerprint()
    assert locate(str(copy)).fingerprint() == before
    (copy / name).write_text(DECIDING[name], encoding="utf-8")
    assert source.fingerprint() != before


def sparse_model(folder: Path, files: int, file_bytes: int, tensors: int) -> None:
    """Weight files with holes instead of numbers."""
    for number in range(files):
        size = (file_bytes // tensors) & ~7
        spans = [[i * size, (i + 1) * size] for i in range(tensors)]
        entries = {
            f"layer{number}.{i}": {"dtype": "U8", "shape": [size], "data_offsets": span}
            for i, span in enumerate(spans)
        }
        header = json.dumps(entries).encode()
        path = folder / f"model-{number:05}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + tensors * size)


def test_the_identity_of_a_large_model_reads_little(tmp_path, monkeypatch):
    """Guards: every load of a model of 50 GB begins with reading it."""
    sparse_model(tmp_path, files=10, file_bytes=5 << 30, tensors=150)
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    identity.fingerprint(tmp_path, shards.find(tmp_path, "large").files)
    assert 10 * 150 <= len(read) <= identity.MAX_SAMPLES
    assert sum(read) <= 1 << 20


def test_every_tensor_is_looked_at():
    """Guards: a tensor that was trained on is overlooked, or a small one is read beyond its end."""
    spans = [(i * 1000, (i + 1) * 1000) for i in range(100)]
    places = identity.sample_places(spans, 200)
    assert len(places) == 100 and all(b <= p < e for p, (b, e) in zip(places, spans, strict=True))
    assert len(identity.sample_places(spans, 20)) == 20
    assert len(set(identity.sample_places([(0, 1 << 20)], 200))) == 64


# --- config -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [65, [65, 66]])
def test_end_tokens_of_the_generation_config(copy, ids):
    """mlx-lm stops at these; the reply ran to its limit."""
    change(copy / "generation_config.json", eos_token_id=ids)
    source = locate(str(copy))
    expected = {65, 66} if isinstance(ids, list) else {65}
    assert expected <= set(load_tokenizer(source).eos_token_ids)
    code, _, said = say("-m", copy, "-v", "-n", "2", "hi")
    assert code == 0
    assert f"eos {', '.join(map(str, sorted(expected)))} from generation_config.json" in said


CONFIGS = {
    "int": ({"eos_token_id": 3}, {"eos_token_id": 4}),
    "list": ({"eos_token_id": 3}, {"eos_token_id": [4, 5]}),
    "zero": ({"eos_token_id": 3}, {"eos_token_id": 0}),
    "none": ({"eos_token_id": [3]}, {}),
    "infinity": ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_are_read_as_mlx_lm_reads_them(tmp_path, case):
    """Guards: what we read and what mlx-lm builds the model from drift apart."""
    config, generation = CONFIGS[case]
    change(tmp_path / "config.json", model_type="llama", **config)
    change(tmp_path / "generation_config.json", **generation)
    assert configs.read(tmp_path, "m")[0] == load_config(tmp_path)


def test_a_generation_config_that_cannot_be_read_is_said(copy):
    """Guards: end tokens that are lost without a word."""
    (copy / "generation_config.json").write_text("{", encoding="utf-8")
    code, _, said = say("-m", copy, "-v", "-n", "2", "hi")
    assert code == 0 and "generation_config.json is not used" in said


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
CONTEXTS = [
    ({"max_position_embeddings": 512}, 512),
    ({"max_position_embeddings": 512, "rope_scaling": YARN}, 2048),
    ({"max_position_embeddings": 2048, "rope_scaling": YARN}, 2048),
    ({"max_position_embeddings": 512, "rope_scaling": {**YARN, "rope_type": "llama3"}}, 512),
    ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 8.0}}, 512),
    ({"max_position_embeddings": 512, "rope_parameters": {"full_attention": YARN}}, 2048),
    ({"text_config": {"max_position_embeddings": 512, "rope_scaling": YARN}}, 2048),
    ({"model_type": "mamba"}, None),
]


@pytest.mark.parametrize(("config", "tokens"), CONTEXTS)
def test_scaled_contexts(config, tokens):
    """512 with a factor of 4 refused a prompt of 619 tokens."""
    assert configs.context_tokens(config) == tokens


def test_a_scaled_context_of_target_and_draft(tmp_path):
    """Guards: a context that the model reads is refused, also because of its draft model."""
    one = save_folder(tmp_path / "one", rope_scaling=YARN)
    two = save_folder(tmp_path / "two", seed=1, rope_scaling=YARN)
    code, _, said = say("-m", one, "--draft-model", two, "-n", "2", "--raw", "x" * 619)
    assert code == 0, said


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temp": 0.6, "top_p": 0.9, "top_k": 20}),
        ({"temperature": 1, "do_sample": True}, {"temp": 1.0}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": "hot", "top_p": None, "top_k": -3}, {}),
    ],
)
def test_sampling_of_the_generation_config(generation, expected):
    """Guards: a chat that fails for a value that no setting can have."""
    assert configs.sampling(generation) == expected


def test_what_the_generation_config_recommends_is_said(copy):
    """Guards: sampling that nobody set and nobody is told of."""
    change(copy / "generation_config.json", temperature=0.6, top_k=20)
    _, _, said = say("-m", copy, "-v", "-n", "2", "hi")
    assert "in chat temp 0.6, top_k 20 from generation_config.json" in said


# --- weights ------------------------------------------------------------------------------------


def indexed(folder: Path, files: int = 2) -> dict[str, str]:
    """Split the weights of a folder into files with an index; tensor -> file."""
    weights = dict(sorted(mx.load(str(folder / "model.safetensors")).items()))
    (folder / "model.safetensors").unlink()
    names = list(weights)
    where = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {name: weights[name] for name in names[number::files]}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        where |= dict.fromkeys(part, file)
    change(folder / shards.INDEX, weight_map=where)
    return where


def test_a_stray_file_beside_an_index_is_left_out(copy, model_folder, tmp_path):
    """It replaced tensors by the order of the directory: logits off by 10.2."""
    indexed(copy)
    stray = save_folder(tmp_path / "stray", seed=9) / "model.safetensors"
    shutil.copy(stray, copy / "model-00000-of-00001.safetensors")
    shutil.copy(stray, copy / "model.safetensors")
    (one, _), (two, notices) = (
        load_weights(locate(str(f)), "stored") for f in (model_folder, copy)
    )
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(one(tokens), two(tokens))
    assert "left out" in notices[0] and "`model-00000-of-00001.safetensors`" in notices[0]
    assert locate(str(copy)).fingerprint()


def pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(text)


def torn(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 5) + b"{oops" + bytes(99))


def lost_file(folder: Path) -> None:
    indexed(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def missing(folder: Path) -> None:
    change_weights(folder, lambda w: {k: w[k] for k in w if "layers.1" not in k})


def surplus(folder: Path) -> None:
    change_weights(folder, lambda w: {**w, **{f"extra.{i}": mx.zeros(2) for i in range(9)}})


def change_weights(folder: Path, how) -> None:
    weights = how(mx.load(str(folder / "model.safetensors")))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def doubled(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-00001.safetensors")


def activations(folder: Path) -> None:
    change(folder / "config.json", quantize_activations=True)


BROKEN = {
    pointer: ("git-LFS pointer", "git lfs pull"),
    torn: ("is torn: it has", "again"),
    no_header: ("header cannot be read", "again"),
    lost_file: ("lacks the weights `model-00002-of-00002.safetensors`", "1 of 2"),
    missing: ("Missing 9 parameters: `model.layers.1.input_layernorm.weight`, ", "do not belong"),
    surplus: ("Received 9 parameters not in model: `extra.0`, `extra.1`, `extra.2`, …", "do not"),
    doubled: ("is both in `model-00001.safetensors` and in `model.safetensors`", "remove"),
    activations: ("quantised activations", "quantize_activations"),
}


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
def test_broken_weights_are_one_line(copy, spoil):
    """Guards: pages of parameter names, a crash in the middle, or wrong numbers without a word."""
    message, hint = BROKEN[spoil]
    spoil(copy)
    code, out, said = say("-m", copy, "hi")
    error, advice = said.splitlines()
    assert (code, out) == (2, "") and message in error and hint in advice, said


def test_adapters_that_are_not_used_are_said(copy):
    """Guards: somebody who put them there takes the base model's text for the fine-tune's."""
    (copy / "adapters.safetensors").write_bytes(b"")
    code, _, said = say("-m", copy, "-n", "2", "hi")
    assert code == 0 and "`adapters.safetensors`" in said and "is not used" in said


def test_an_index_of_other_files_is_not_followed(copy):
    """A conversion that kept the index of the files it was made from must load."""
    change(copy / shards.INDEX, weight_map={"a": "model-00001-of-00009.safetensors"})
    found = shards.find(copy, "copy")
    assert len(found.files) == 1 and "not followed" in found.notices[0]


# --- tokenizers and templates -------------------------------------------------------------------


def no_template(folder: Path) -> Path:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["chat_template"]
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_template_in_chat_template_json(copy):
    """Folders that were made for a processor have the template there only: prompts went in bare."""
    change(no_template(copy) / "chat_template.json", chat_template=TEMPLATE)
    assert load_tokenizer(locate(str(copy))).has_chat_template


def test_a_byte_level_vocabulary_under_another_decoder(copy):
    """It printed `Ġ` for a space and `Ċ` for a line's end."""
    tokenizer = byte_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.save(str(copy / "tokenizer.json"))
    loaded = load_tokenizer(locate(str(copy)))
    assert loaded.decode(loaded.encode("a b\n", add_special_tokens=False)) == "a b\n"


def test_what_we_use_of_mlx_lms_own_names_is_there(copy):
    """Guards: a version of mlx-lm in which a name that it keeps to itself has moved."""
    mlx_lm.check_type({"model_type": "llama"})
    with pytest.raises(ValueError, match="not supported"):
        mlx_lm.check_type({"model_type": "alien"})
    wrapper = load_tokenizer(locate(str(copy)))
    assert hasattr(wrapper, "_tokenizer") and hasattr(wrapper, "_chat_template")
    assert mlx_lm.inner_tokenizer(wrapper) is not wrapper
    assert mlx_lm.own_renderer(wrapper) is None
    assert mlx_lm.renderer_parameters(wrapper) == frozenset()
    assert wrapper._thinking_kwarg == "enable_thinking"
    source = inspect.getsource(type(wrapper).apply_chat_template)
    assert "self._chat_template(*args, **kwargs)" in source  # what `own_renderer` stands for
    assert len(wrapper) == VOCAB_SIZE
