"""Detokenising over token borders, and stop strings."""

import random

import pytest

from ds4cli.engine.reply import ReplyText
from ds4cli.text.detokenizer import Detokenizer
from ds4cli.text.reasoning import Markers
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
        reply = ReplyText(decode, 5, (), [stop])
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
    assert text == decode(list(data)) and "\ufffd" in text


def test_any_bytes_stream_as_python_reads_them():
    """Guards: streamed text with more or fewer U+FFFD than the whole has."""
    rng = random.Random(3)
    for _ in range(1000):
        data = bytes(rng.choices([0x20, 0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF], k=30))
        d = Detokenizer(decode)
        assert "".join(map(d.push, data)) + d.flush() == data.decode(errors="replace")


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


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("I know</think>You know it", ["know"], "I know</think>You "),
        ("a < b</think>< c", ["<"], "a < b</think>"),
        ("know", ["know"], "know"),
        ("</think>know", ["know"], "</think>"),
        ("kn</think>ow", ["know"], "kn</think>ow"),
    ],
)
def test_stop_strings_are_looked_for_in_the_answer(text, stops, expected, size, inside):
    """`--stop know` ended the reply inside its reasoning: the answer was empty."""
    opened = "" if inside else "<think>"
    reply = ReplyText(decode, 5, (), stops, think=(Markers("<think>", "</think>"), inside))
    data, shown, keep = (opened + text).encode(), "", None
    while data and keep is None:
        taken = reply.take(data[:size])
        shown, keep, data = shown + taken.text, taken.keep, data[size:]
    if keep is None:
        shown += reply.finish("stop")[1]
    else:
        assert keep == 5 + len(opened + expected)
    assert shown == opened + expected


@pytest.mark.parametrize(("text", "expected"), [("  <b", "  "), ("<x", ""), (" x", " x")])
def test_a_stop_string_where_reasoning_could_begin(text, expected):
    """Guards: what may open reasoning is held back and then shown without looking for stops."""
    reply = ReplyText(decode, 0, (), ["<"], think=(Markers("<think>", "</think>"), False))
    taken = reply.take(text.encode())
    rest = "" if taken.keep is not None else reply.finish("stop")[1]
    assert taken.text + rest == expected


def test_a_reply_that_goes_on_inside_its_reasoning():
    """Guards: the part that was shown before is forgotten, so its reasoning is looked through."""
    think = (Markers("<think>", "</think>"), False)
    reply = ReplyText(decode, 0, b"<think>I kn", ["know"], think=think)
    taken = reply.take(b"ow, know</think>I know")
    assert (taken.text, taken.keep) == ("ow, know</think>I ", 18)
