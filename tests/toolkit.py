"""Small real tokenizers and scripted token streams for the tool-call tests. No model."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds4cli.tools import FORMATS, Tool

EOS = "<|eos|>"
MERGED = [">\n", '{"', '{"name', '{"name":', '": ', '", "', '"}', '"}}', '"}}\n', "}\n", "<to"]
MERGED += ["</", "=city", "</parameter>\n<", ">\n<", "get", "set", "Paris", "ool_call>", "12"]
MERGED += ["argum", "ents", "tool", "_call", "<tool_call>\n{", "x<tool", ">{", "true"]

TOOLS = [
    Tool(
        "get_weather",
        "the weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    ),
    Tool(
        "set_alarm",
        "an alarm",
        {
            "type": "object",
            "properties": {
                "on": {"type": "boolean"},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
            },
            "required": ["on"],
        },
    ),
    Tool("now", "", {"type": "object", "properties": {}}),
]
# An argument of every type; no call can have the last.
TYPED = Tool(
    "typed",
    "",
    {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "w": {"type": "string", "maxLength": 3},
            "maybe": {"type": ["string", "null"]},
            "b": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "number"}},
            "o": {"type": "object", "properties": {"k": {"type": "integer"}}},
            "e": {"enum": ["x y", 1, None, True, ""]},
            "any": {},
            "never": False,
        },
    },
)


def tokenizer(fmt: str = "json_tools", specials=(), merged=MERGED, think=False, stops=(EOS,)):
    """A byte-level BPE with the given merged tokens, wrapped as mlx-lm wraps it."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for text in merged:
        word = spell.pre_tokenize_str(text)[0][0]
        left = word[0]
        for char in word[1:]:
            merges.append((left, char))
            left += char
            vocab.setdefault(left, len(vocab))
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    bpe.pre_tokenizer = spell
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(t, special=True) for t in (*stops, EOS, "<|user|>")])
    bpe.add_special_tokens([AddedToken(t, special=True) for t in specials])
    if think:
        bpe.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS)
    fast.init_kwargs["tool_parser_type"] = fmt
    stop_ids = [bpe.token_to_id(t) for t in stops]
    entry = FORMATS[fmt]
    return TokenizerWrapper(
        fast,
        BPEStreamingDetokenizer,
        eos_token_ids=stop_ids,
        tool_call_start=entry.start,
        tool_call_end=entry.end,
    )


def pieces(wrapper, ids):
    """(id, text released with it) for each token, as the streaming detokenizer gives them."""
    detokenizer = wrapper.detokenizer
    for token in ids:
        detokenizer.add_token(token)
        yield token, detokenizer.last_segment


def encode(wrapper, text):
    return wrapper.encode(text, add_special_tokens=False)


def play(guard, wrapper, text, start=0, chars=False):
    """Feed a text's tokens (one character each where `chars`) until something must be rewound."""
    ids = [i for c in text for i in encode(wrapper, c)] if chars else encode(wrapper, text)
    steps = []
    for pos, (token, piece) in enumerate(pieces(wrapper, ids), start):
        steps.append(guard.feed(pos, token, piece))
        if steps[-1].event in ("left", "broken"):
            break
    return steps
