"""What an engine refuses: ids without a row, tokenizers and files of others."""

import json
import shutil

import pytest
from folder import VOCAB_SIZE

from ds4cli.engine.engine import Engine
from ds4cli.errors import StateError, UsageError
from ds4cli.rewind import storage


@pytest.mark.parametrize("bad", [VOCAB_SIZE, 2**31 - 1, -1, -(10**9)])
def test_ids_without_a_row_in_the_embedding_are_refused(model_folder, bad):
    """MLX reads beyond the end of the table for them: garbage, or the end of the process."""
    session = Engine.load(str(model_folder)).session()
    session.sync([1, 2, 3])
    with pytest.raises(UsageError, match=f"`{bad}` at position 1"):
        session.sync([1, bad, 3])
    with pytest.raises(UsageError, match=f"`{bad}`"):
        session.step(drafts=[bad])
    assert session.tokens == [1, 2, 3] and len(session.step(drafts=[4]).tokens) >= 1


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1, "a", None])
def test_a_session_file_with_ids_that_are_none_is_refused(model_folder, tmp_path, bad):
    """Ids of a file are fed as they are when its session goes back."""
    engine = Engine.load(str(model_folder))
    session = engine.session()
    session.sync([1, 2, 3])
    state = session._timeline.state()
    storage.write(tmp_path / "s", {**state, "tokens": [1, bad, 3]}, engine.fingerprint)
    with pytest.raises(StateError, match=r"no tokens|do not stand"):
        engine.load_session(tmp_path / "s")


def tokenizer_with(folder, model_folder, token_id, special):
    """A copy of the model whose tokenizer has one token more, with this id."""
    shutil.copytree(model_folder, folder)
    table = json.loads((folder / "tokenizer.json").read_text())
    if special:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": token_id, "content": "<extra>", "special": True, **flags}
        table["added_tokens"].append(token)
    else:
        vocab = table["model"]["vocab"]
        vocab.update({"ab": token_id, **{f"zz{i}": token_id + 1 + i for i in range(10)}})
        table["model"]["merges"] = [["a", "b"]]
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return folder


def test_a_tokenizer_of_another_model_is_refused(model_folder, tmp_path):
    """Its ordinary text becomes ids that the model has no row for."""
    folder = tokenizer_with(tmp_path / "m", model_folder, VOCAB_SIZE, special=False)
    with pytest.raises(UsageError, match="267` tokens, its model only `263`"):
        Engine.load(str(folder))


def test_a_token_that_was_added_to_a_tokenizer_alone_can_do_no_harm(model_folder, tmp_path):
    """Gemma 3 has such a token: the model works, until the text contains it."""
    folder = tokenizer_with(tmp_path / "m", model_folder, VOCAB_SIZE, special=True)
    engine = Engine.load(str(folder))
    assert any("tokenizer 264" in n for n in engine.notices) and engine.token_limit == VOCAB_SIZE
    engine.session().sync(engine.encode("ab"))
    with pytest.raises(UsageError, match=f"`{VOCAB_SIZE}`"):
        engine.session().sync(engine.encode("ab<extra>"))
    with pytest.raises(UsageError, match="logit_bias"):
        Engine.load(str(folder), logit_bias={VOCAB_SIZE: 1.0}).session()
