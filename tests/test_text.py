"""Detokenising over token borders, and stop strings."""

import random

import pytest

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
    assert text == decode(list(data)) and "\ufffd" in text


def test_any_bytes_stream_as_python_reads_them():
    """Guards: streamed text with more or fewer U+FFFD than the whole has."""
    rng = random.Random(3)
    for _ in range(1000):
        data = bytes(rng.choices([0x20, 0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF], k=30))
        d = Detokenizer(decode)
        assert "".join(map(d.push, data)) + d.flush() == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("aé🙂b".encode(), ["a", "", "é", "", "", "", "🙂", "b"]),
        (b"\xf0\x9f\x99\x82\xc3\xa9", ["", "", "", "🙂", "", "é"]),
        (b"\xff\xff\xff\xff\xff\xff", ["", "", "", "\ufffd" * 3, "\ufffd", "\ufffd"]),
        (b"\xff\xff\xff\xc3\xa9\xc3\xa9", ["", "", "", "\ufffd" * 3, "é", "", "é"]),
        (b"\xffa\xc3\xa9", ["", "\ufffda", "", "é"]),
    ],
)
def test_text_is_shown_as_soon_as_it_is_sure(data, pieces):
    """A character that came out tokens late, or as U+FFFD because its last byte was not awaited."""
    d = Detokenizer(decode)
    assert [d.push(i) for i in data] == pieces
    d = Detokenizer(decode, b"some text before ")
    assert [d.push(i) for i in data] == pieces
    assert d.flush() == ("\ufffd" if pieces[-1] == "\ufffd" else "")


def test_a_token_is_decoded_with_a_few_before_it():
    """Decoders look at what stands before a token; the whole reply for each would be quadratic."""
    seen = []

    def watched(ids):
        seen.append(list(ids))
        return decode(ids)

    text = list("日本語 and plain words, ".encode() * 9)
    d = Detokenizer(watched)
    for i, token in enumerate(text, 1):
        seen.clear()
        d.push(token)
        now, *shorter = seen
        assert now == text[:i][-len(now) :] and min(i, 9) <= len(now) <= 19
        assert all(8 <= len(ids) <= 11 for ids in shorter)
    seen.clear()
    Detokenizer(watched, text)
    assert seen == [text[-64:]]
    assert Detokenizer(watched).flush() == "" and seen == [text[-64:]], "nothing to decode"


def test_broken_bytes_are_cut_anywhere_when_they_are_many():
    """Text without a whole character at any place was decoded whole for every byte of it."""
    seen = []
    d = Detokenizer(lambda ids: seen.append(len(ids)) or decode(ids))
    for _ in range(200):
        d.push(0xBF)
    assert max(seen) == 65


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
