"""What a rank holds of a model: the files that it asks for, the weights that it keeps."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch

import mlx.core as mx
import pytest
import tiny
from folder import save_folder
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from ds4cli.errors import ModelError, UsageError
from ds4cli.models import adapters, sharding, source
from ds4cli.models.sharding import PIPELINE, TENSOR, Share
from ds4cli.models.weights import load_weights

NAME, COMMIT = "owner/name", "0123abcd"


class Comm:
    """MLX's group, seen from one rank."""

    def __init__(self, rank: int, size: int = 2):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A model with a file for each layer, one for what is no layer, and one for a drafting head."""
    folder = save_folder(tmp_path_factory.mktemp("hub") / COMMIT, "qwen3_5")
    tensors = mx.load(str(folder / "model.safetensors"))
    tensors |= {"mtp.layers.0.norm.weight": mx.ones(4), "model.visual.layers.9.weight": mx.ones(4)}
    (folder / "model.safetensors").unlink()
    files: dict[str, dict] = {}
    for name, x in tensors.items():
        words = name.split(".")
        kind = words[words.index("layers") + 1] if "layers" in words else "rest"
        kind = "mtp" if words[0] == "mtp" else "visual" if "visual" in words else kind
        files.setdefault(f"model-{kind}.safetensors", {})[name] = x
    for file, held in files.items():
        mx.save_safetensors(str(folder / file), held, {"format": "mlx"})
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "evil.py").write_text("")
    return folder


@pytest.fixture
def hub(repository, monkeypatch, tmp_path):
    """The hub: what it copies here, file by file."""
    got: list[str] = []

    def snapshot_download(name, allow_patterns, local_files_only):
        assert name == NAME
        place = tmp_path / COMMIT
        place.mkdir(exist_ok=True)
        for path in sorted(repository.iterdir()):
            if any(fnmatch(path.name, p) for p in allow_patterns) and path.name not in got:
                got.append(path.name)
                shutil.copy(path, place)
        return str(place)

    monkeypatch.setattr("mlx_lm.utils.snapshot_download", snapshot_download)
    return got


def weights_of(files: list[str]) -> set[str]:
    return {f[6:-12] for f in files if f.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("rank", "wanted"), [(0, {"2", "3", "rest", "mtp", "visual"}), (1, {"0", "1", "rest"})]
)
def test_a_stage_asks_for_its_own_files(hub, repository, rank, wanted):
    """Guards: every machine downloads all of the model; a stage without a tensor that it needs, or
    that says it is another model than the other stage."""
    share = Share(Comm(rank), PIPELINE)
    found = source.find(NAME, share=share)
    assert weights_of(hub) == wanted and "config.json" in hub and "evil.py" not in hub
    model, _ = load_weights(found, "stored", share)
    whole, _ = load_weights(source.find(str(repository)), "stored")
    theirs, own = (dict(tree_flatten(m.parameters())) for m in (whole, model))
    mine = {name for name in theirs if "layers" not in name or name.split(".")[3] in wanted}
    assert set(own) == mine
    assert all(mx.array_equal(x, theirs[name]) for name, x in own.items())
    other = source.Source(NAME, found.folder, found.config, own_files=("model-0.safetensors",))
    assert other.fingerprint() == found.fingerprint()


def test_a_stage_that_lacks_a_tensor_is_refused(hub):
    """Guards: made-up weights in place of those that a file does not have."""
    share = Share(Comm(1), PIPELINE)
    found = source.find(NAME, share=share)
    path = found.folder / "model-1.safetensors"
    tensors = mx.load(str(path))
    tensors.pop(next(name for name in tensors if name.endswith("input_layernorm.weight")))
    mx.save_safetensors(str(path), tensors, {"format": "mlx"})
    with pytest.raises(UsageError, match="input_layernorm"):
        load_weights(found, "stored", share)
    path.unlink()
    with pytest.raises(UsageError, match=r"lacks the weights `model-1"):
        _ = source.find(NAME, share=share).shards


def test_all_files_where_every_rank_reads_them(hub):
    """Guards: a part of the files where each layer is dealt out, or for a process alone."""
    source.find(NAME, share=Share(Comm(0), TENSOR))
    assert weights_of(hub) == {"0", "1", "2", "3", "rest", "mtp", "visual"}
    hub.clear()
    assert source.find(NAME).own_files is None and len(weights_of(hub)) == 7


def test_the_projection_is_kept_for_a_head():
    """Guards: a head that looks at half of the vocabulary; memory for one that is not wanted."""
    for keeps in (True, False):
        text = {**tiny.CFG["qwen3_5"]["text_config"], "vocab_size": 98}
        model, rows = tiny.build("qwen3_5", text_config=text), 98
        share = Share(Comm(0), keeps_output=keeps)
        share.take(model, {}, "m")
        assert model.language_model.lm_head.weight.shape[0] == rows // 2
        assert (share.output is not None) == keeps
        assert share.output is None or share.output.weight.shape[0] == rows
    share = Share(Comm(0), keeps_output=True)
    share.take(tiny.build("llama"), {}, "m")
    assert share.output is None  # it is whole anyway


def save_adapter(folder, model) -> None:
    """A LoRA adapter of weights that are not small."""
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    lora = {"rank": 2, "scale": 4.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, 2, lora)
    own = {n: x.shape for n, x in tree_flatten(model.parameters()) if "lora_" in n}
    folder.mkdir()
    tensors = {name: 0.1 * mx.random.normal(shape) for name, shape in own.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": lora}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_an_adapter_is_added_to_the_weights(tmp_path):
    """Guards: ranks that leave the adapter out, or round packed weights anew without a word."""
    save_adapter(tmp_path / "a", tiny.build("llama"))
    beside, within, plain = (tiny.build("llama", scale=2.0) for _ in range(3))
    adapters.put_on(beside, tmp_path / "a")
    adapters.fuse_into(within, tmp_path / "a")
    rows = [model(tiny.ids(9)[None]) for model in (beside, within, plain)]
    assert mx.abs(rows[0] - rows[1]).max() < 1e-4 < mx.abs(rows[0] - rows[2]).max()
    assert not any("lora_" in name for name, _ in tree_flatten(within.parameters()))
    with pytest.raises(UsageError, match="are packed"):
        adapters.fuse_into(tiny.quantise(tiny.build("llama")), tmp_path / "a")
    with pytest.raises(ModelError, match="does not fit"):
        adapters.fuse_into(tiny.build("llama", hidden_size=32), tmp_path / "a")


def test_heads_are_not_cut_in_two():
    """Guards: mlx-lm goes on with heads of another size, and the text is nonsense."""
    config = {"num_attention_heads": 6, "num_key_value_heads": 2}
    sharding._check_heads(config, 2, "m")
    with pytest.raises(UsageError, match="num_attention_heads is 6"):
        sharding._check_heads(config, 4, "m")
    with pytest.raises(UsageError, match="num_key_value_heads is 2"):
        sharding._check_heads(config, 3, "m")
