"""Detokenising over token borders, and stop strings."""

import pytest

from ds4cli.text import Detokenizer, StopScanner


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
        (["a", "", "", "STOP"], ["STOP"], ("a", 3)),
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
