"""Changing the text of what was sampled: only the edited span is encoded again. No mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds4cli.text.detokenizer import REPLACEMENT, Detokenizer
from ds4cli.tokens import common_prefix


def edit_tokens(
    tokens: Sequence[int],
    text: str,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
) -> tuple[int, ...]:
    """`tokens` changed so that they decode to `text`; only the edited span is encoded again.

    The longest common beginning and ending of both texts keep their ids. Where a tokenizer writes
    the new span differently in the middle of a text, more is encoded again until it decodes right.
    """
    tokens = list(tokens)
    old = decode(tokens)
    if text == old:
        return tuple(tokens)
    ends = token_ends(tokens, decode)
    for first, last in _spans(old, text, ends):
        begin, end = ends[first], ends[last]
        span = text[begin : len(text) - (len(old) - end)]
        for ids in _encodings(span, encode, in_middle=first > 0):
            edited = [*tokens[:first], *ids, *tokens[last:]]
            if decode(edited) == text:
                return tuple(edited)
    return tuple(encode(text))


def token_ends(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> dict[int, int]:
    """{i: characters in the text of tokens[:i]} for each i that does not split a character."""
    detokenizer = Detokenizer(decode)
    ends, length = {0: 0}, 0
    for i, token in enumerate(tokens, 1):
        piece = detokenizer.push(token)
        length += len(piece)
        if piece and not piece.endswith(REPLACEMENT):
            ends[i] = length
    ends[len(tokens)] = len(decode(list(tokens)))
    return ends


def _spans(old: str, new: str, ends: dict[int, int]) -> list[tuple[int, int]]:
    """Token spans [first, last) to encode again, the tightest first."""
    same = common_prefix(old, new)
    room = min(len(old), len(new)) - same
    tail = common_prefix(old[::-1][:room], new[::-1][:room])
    first = max(i for i, end in ends.items() if end <= same)
    last = min(i for i, end in ends.items() if end >= len(old) - tail)
    final = max(ends)
    before = max((i for i in ends if i < first), default=0)
    return [(first, last), (before, last), (first, final), (before, final)]


def _encodings(span: str, encode: Callable[[str], list[int]], in_middle: bool) -> list[list[int]]:
    """Ways to encode a span: as it is, and as it would stand after a line's end."""
    ways = [list(encode(span))]
    if in_middle:  # some tokenizers put a space in front of everything they encode
        anchor = list(encode("\n"))
        joined = list(encode("\n" + span))
        if joined[: len(anchor)] == anchor:
            ways.append(joined[len(anchor) :])
    return ways
