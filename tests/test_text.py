"""Detokenising over token borders, and stop strings."""

import random

import pytest

from ds4cli.engine.reply import Reply
from ds4cli.text.detokenizer import Detokenizer
from ds4cli.text.stops import StopScanner


def decode(ids):
    """A byte is a token."""
    return bytes(ids).decode("utf-8", "replace")


TEXTS = [
    "plain",
    "日本語とemoji 🙂👩‍👩‍👧 end",
    "e\u0301 combining a\u0308",
    "  leading space",
    "tab\tnew\nline " * 9,
]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_equal_the_decoded_whole(text):
    """Characters split over tokens must neither vanish nor turn into U+FFFD."""
    ids = list(text.encode())
    d = Detokenizer(decode)
    pieces = [d.push(i) for i in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + d.flush() == text


@pytest.mark.parametrize("seed", range(40))
def test_joined_pieces_equal_the_decoded_whole_in_long_text(seed):
    """Three-byte characters only, or broken bytes, filled the buffer: then one was cut in two."""
    rng = random.Random(seed)
    alphabet = rng.choice(["日本語", "🎉日é a", "हि\u0301🙂", "a\n"])
    data = bytearray("".join(rng.choices(alphabet, k=150)).encode())
    for _ in range(seed % 5):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if seed % 7 == 0:
        data = bytes(rng.choices([0xF0, 0x9F, 0xE3, 0x81, 0xC3], k=200))
    d = Detokenizer(decode)
    assert "".join(d.push(i) for i in data) + d.flush() == decode(data)
    assert len(d._tokens) <= 65


def test_a_stop_string_inside_a_character_run_keeps_no_part_of_it():
    """The first bytes of a stop string's first character stayed in the state."""
    for text, stop in (("ab🎉c", "🎉"), ("日本語", "本"), ("éé", "é"), ("x é", "é")):
        reply = Reply(decode, 5, (), [stop])
        taken = [reply.take([i]) for i in text.encode()]
        kept = next(t.keep for t in taken if t.keep is not None)
        assert kept == 5 + len(text[: text.index(stop)].encode())


@pytest.mark.parametrize("cut", range(1, 9))
def test_going_on_inside_a_character(cut):
    """A reply cut in the middle of a character goes on without losing or repeating it."""
    ids = list("a🙂é日".encode())
    first = Detokenizer(decode)
    shown = "".join(first.push(i) for i in ids[:cut])
    second = Detokenizer(decode, ids[:cut])
    shown += "".join(second.push(i) for i in ids[cut:])
    assert shown == "a🙂é日"


@pytest.mark.parametrize("data", [b"\xf0\x9f", b"ok \xff\xfe", b"\xff" * 80, b"\xe6\x97 x"])
def test_broken_bytes_are_shown_not_lost(data):
    """Invalid bytes end as U+FFFD instead of being held for ever."""
    d = Detokenizer(decode)
    text = "".join(d.push(i) for i in data) + d.flush()
    assert text.replace("\ufffd", "") == decode(list(data)).replace("\ufffd", "")
    assert "\ufffd" in text


def scan(pieces, stops):
    scanner = StopScanner(stops)
    shown = ""
    for piece in pieces:
        text, hit = scanner.push(piece)
        shown += text
        if hit is not None:
            return shown, hit.kept
    return shown + scanner.flush(), None


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["ab", "ST", "OP", "cd"], ["STOP"], ("ab", 1)),
        (["abS", "TOPcd"], ["STOP"], ("ab", 0)),
        (["a", "", "", "STOP"], ["STOP"], ("a", 1)),  # its first bytes may be in the empty ones
        (["ST", "ST", "OP"], ["STOP"], ("ST", 1)),
        (["ST", "O"], ["STOP"], ("STO", None)),
        (["aab", "c"], ["b", "abc"], ("aa", 0)),
        (["x", "\n", "\n", "y"], ["\n\n"], ("x", 1)),
        (["none"], [], ("none", None)),
    ],
)
def test_stop_strings(pieces, stops, expected):
    """A stop that spans tokens is found, what follows never shows, held text is not lost."""
    assert scan(pieces, stops) == expected
