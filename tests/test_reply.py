"""The text side of a reply: stop strings, reasoning, regions, tool calls, what may be reported."""

import pytest
from test_tools_exact import GOOD
from toolkit import TOOLS, tokenizer

from ds4cli.engine.reply import Regions, ReplyText, Taken
from ds4cli.errors import StateError
from ds4cli.text.reasoning import Markers
from ds4cli.tools import Guard
from ds4cli.tools.parse import ParsedCall
from ds4cli.tools.steps import GuardEnd, GuardStep


def decode(ids):
    """A byte is a token."""
    return bytes(ids).decode("utf-8", "replace")


def test_a_stop_string_inside_a_character_run_keeps_no_part_of_it():
    """The first bytes of a stop string's first character stayed in the state."""
    for text, stop in (("ab🎉c", "🎉"), ("日本語", "本"), ("éé", "é"), ("x é", "é")):
        reply = ReplyText(decode, 5, (), [stop])
        taken = [reply.take([i]) for i in text.encode()]
        kept = next(t.keep for t in taken if t.keep is not None)
        assert kept == 5 + len(text[: text.index(stop)].encode())


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


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_regions_of_a_reply(size):
    """Prose inside a code block, or the answer taken for reasoning, would share chances."""
    text = "<think>\na ``` b\n</think>\nSee:\n```python\nx = '```'\n```\nDone."
    regions, at = Regions((Markers("<think>", "</think>"), False)), {}
    for start in range(0, len(text), size):
        regions.push(text[start : start + size])
        at[start + size] = regions.current
    if size == 1:
        assert at[1] == "prose" and at[text.index("a")] == "think"
        assert at[text.index("See") + 2] == "prose" and at[text.index("x =") + 2] == "code"
    assert regions.current == "prose"
    assert Regions((Markers("<think>", "</think>"), True)).current == "think"


def replied(wrapper, text, reason="stop", **guard):
    """What a reply of these tokens comes to: its calls, its final reason, its note."""
    reply = ReplyText(wrapper.decode, 0, guard=Guard(wrapper, TOOLS, **guard))
    ids = wrapper.encode(text, add_special_tokens=False)
    while ids:
        taken = reply.take(ids)
        assert taken.step is None or taken.step.bad_pos is None, taken
        ids = [] if taken.reason else ids[taken.used :]
    _, _, reason, note = reply.finish("tool" if taken.reason else reason)
    return [call.name for call in reply.calls], reason, note


def test_a_call_that_opens_and_closes_on_one_token_follows_another():
    """A call without arguments behind another call is dropped, with all that follows it."""
    wrapper = tokenizer("glm47", specials=["<tool_call>", "</tool_call>", "</arg_value>"])
    one = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rom</arg_value></tool_call>"
    calls, _, _ = replied(wrapper, f"{one}<tool_call>now</tool_call>\n{one}")
    assert calls == ["get_weather", "now", "get_weather"]


def test_a_call_whose_end_marker_found_no_room_is_a_call():
    """`max_tokens` between arguments and end marker: no call, no text, no note."""
    wrapper = tokenizer()
    text = GOOD["json_tools"].removesuffix("</tool_call>")
    calls, reason, note = replied(wrapper, text, "length")
    assert (calls, reason) == (["get_weather"], "tool") and "end marker was missing" in note
    calls, reason, note = replied(wrapper, text[:-3], "length")
    assert (calls, reason) == ([], "length") and "cut" in note


def test_what_was_mended_or_refused_is_said():
    """A call is changed, or given up, without a word."""
    wrapper = tokenizer()
    text = GOOD["json_tools"].replace('"Paris"', "'Paris'")
    calls, _, note = replied(wrapper, text, use_grammar=False)
    assert calls == ["get_weather"] and "single quotes" in note
    wrong = GOOD["json_tools"].replace("city", "town")
    calls, _, note = replied(wrapper, wrong, use_grammar=False, max_repairs=0)
    assert calls == [] and "left as text" in note and "town" in note


class Braces:
    """A guard over the letters of one-byte tokens: from `{` to `}` is a call, and only digits may
    stand in it."""

    def __init__(self):
        self.said = ""
        self.start = None

    def feed(self, pos, token, text):
        self.start = pos if self.start is None else self.start
        self.said = self.said[: pos - self.start]
        was_open = self.is_open
        if was_open and not chr(token).isdigit() and chr(token) != "}":
            return GuardStep(event="left", bad_pos=pos)
        self.said += chr(token)
        if self.is_open:
            return GuardStep() if was_open else GuardStep(event="open", opened=pos)
        if not was_open:
            return GuardStep(emit=text)
        return GuardStep(event="closed", calls=(ParsedCall("f", "{}", ("mended",)),))

    @property
    def is_open(self):
        return self.said.rfind("{") > self.said.rfind("}")

    @property
    def settled(self):
        return (self.start or 0) + (self.said.rfind("{") if self.is_open else len(self.said))

    def rewind(self, pos):
        self.said = self.said[: max(0, pos - (self.start or 0))]

    def finish(self, reason):
        return GuardEnd(reason="cut" if self.is_open else "")


def guarded(*stops):
    return ReplyText(decode, 5, (), stops, Braces())


def say(reply, data):
    """Take all of `data`; the text shown, and the last answer."""
    text = ""
    while data:
        taken = reply.take(data)
        text, data = text + taken.text, data[taken.used :]
    return text, taken


def test_going_back_forgets_the_tokens_that_a_stop_string_is_counted_from():
    """After a repair inside a call the reply ended some tokens behind its stop string."""
    reply = guarded("STOP")
    reply.take(b"ab{")
    assert reply.take(b"12x").step.bad_pos == 10
    reply.rewind(7)
    assert (reply.tokens, reply.pos, reply.region) == (list(b"ab"), 7, "prose")
    taken = reply.take(b"cSTOPd")
    assert (taken.text, taken.used, taken.keep, taken.reason) == ("c", 5, 8, "stop")


def test_only_what_nothing_can_take_back_is_reported():
    """Tokens of a half stop string, or of an open call, were told and taken back."""
    reply = guarded("STOP")
    told = []
    for piece, expected in (
        (b"ab", b"ab"),
        (b"ST", b""),
        (b"x", b"STx"),
        (b"{12", b""),
        (b"", b""),
    ):
        reply.take(piece)
        told.append(reply.report())
        assert bytes(told[-1]) == expected, piece
    reply.rewind(5 + 6)
    assert reply.take(b"3}").used == 2
    assert bytes(reply.report()) == b"{3}", "a closed call stands"
    reply.take(b"  ")
    assert reply.report() == [], "white space behind it falls away if no other call follows"
    assert reply.closed_at == 5 + 8
    taken = reply.take(b"!")
    assert (taken.text, taken.keep, taken.reason) == ("", 5 + 8, "tool")


def test_white_space_between_two_calls_is_shown():
    """The text that parts two calls was lost, or ended the reply."""
    reply = guarded()
    assert (say(reply, b"{1}")[0], say(reply, b" \n")[0]) == ("", "")
    taken = reply.take(b"{")
    assert (taken.text, taken.step.event, reply.closed_at) == (" \n", "open", None)
    assert reply.region == "tool"
    assert reply.take(b"2}").step.event == "closed"
    assert len(reply.calls) == 2
    taken = reply.end(0)
    assert (taken.keep, taken.reason) == (5 + 8, "tool")
    assert reply.finish("tool")[2:] == ("tool", "tool call `f`: mended"), "said once"


def test_the_end_gives_what_was_held_and_what_was_not_reported():
    """The first letters of a stop string that did not come were lost with their tokens."""
    reply = guarded("STOP")
    assert reply.take(b"abST").text == "ab"
    assert bytes(reply.report()) == b"ab"
    tokens, text, reason, note = reply.finish("length")
    assert (bytes(tokens), text, reason, note) == (b"ST", "ST", "length", "")
    cut = guarded()
    say(cut, b"a{1")
    assert cut.finish("length")[1:] == ("", "length", "cut")
    stopped = guarded("b")
    assert stopped.take(b"ab").reason == "stop"
    stopped.rewind(6)
    assert stopped.finish("stop")[1] == ""


def test_a_reply_that_is_moved_goes_on_where_it_stands():
    """Half a character that was said before the move belongs to the text behind it."""
    ids = "aé".encode()
    reply = ReplyText(decode, 5, b"x")
    assert reply.take(ids[:2]).text == "a"
    moved = reply.moved(7)
    assert (moved.start, moved.take(ids[2:]).text) == (7, "é")
    for elsewhere in (4, 8):
        moved = reply.moved(elsewhere)
        assert (moved.pos, moved.take(b"b").text) == (elsewhere, "b")
    back = reply.moved(5)
    assert back.take(b"c").text == "c"
    with pytest.raises(StateError):
        guarded().moved(5)


def test_what_a_stop_token_means_inside_a_call():
    """A reply that ended inside a call, or behind one, without its call."""
    asked = []

    def ends(step):
        reply, guard = guarded(), Braces()
        reply.take(b"ab")
        guard.feed = lambda *given: asked.append(given) or step
        reply.guard = guard
        return reply, reply.end(9)

    assert ReplyText(decode, 5).end(9) == Taken("", reason="stop")
    assert ends(GuardStep())[1] == Taken("", reason="stop")
    call = ParsedCall("f", "{}")
    reply, taken = ends(GuardStep("x", "closed", (call,)))
    assert (taken, reply.calls, reply.closed_at) == (Taken("x", keep=7, reason="tool"), [call], 7)
    left = GuardStep("y", "left", bad_pos=7)
    assert ends(left)[1] == Taken("y", step=left)
    assert asked == [(7, 9, "")] * 3


def test_a_call_that_begins_wrong_behind_another_is_taken_back():
    """The first call ended the reply, or its repair was lost."""
    reply = guarded()
    say(reply, b"{1}")
    step = GuardStep(event="left", bad_pos=8)
    reply.guard.feed = lambda *_: step
    assert reply.take(b"x") == Taken("", 1, step=step)


def test_a_moved_reply_keeps_its_stop_strings_and_its_reasoning():
    """After `rewind` between two events `--stop` was forgotten, or looked for in the reasoning."""
    think = (Markers("<think>", "</think>"), False)
    reply = ReplyText(decode, 5, (), ["know"], think=think)
    assert reply.take(b"<think>know x").keep is None and reply.region == "think"
    moved = reply.moved(5 + 11)
    assert moved.region == "think"
    taken = moved.take(b"know</think>I know")
    assert (taken.text, taken.keep) == ("know</think>I ", 5 + 11 + 14)


def test_a_stop_string_that_only_the_end_completes():
    """Half a character in front of the end, held back and then shown with what follows it."""
    reply = ReplyText(decode, 0, (), ["\ufffd", "b\ufffd"])
    assert reply.take(b"ab\xc3").text == "a"
    assert reply.finish("length")[1] == ""
    reply = ReplyText(decode, 0, (), ["xyz"])
    assert reply.take(b"axy").text == "a"
    reply.guard = Braces()
    reply.guard.finish = lambda reason: GuardEnd("z!", (ParsedCall("f", "{}"),), reason="odd")
    assert reply.finish("stop")[1:] == ("", "tool", "odd")
    assert [call.name for call in reply.calls] == ["f"]
    reply = ReplyText(decode, 0, guard=Braces())
    reply.guard.finish = lambda reason: GuardEnd("", (ParsedCall("f", "{}"),))
    assert reply.finish("cancelled")[2] == "cancelled" and not reply.calls


def test_an_indented_fence_begins_code():
    """A fence in a list item was prose, as is what may be its own mark at the end of a line."""
    regions = Regions()
    for text, current in (("x\n  ```py\n", "code"), ("a ```\n", "code"), ("```\n", "prose")):
        regions.push(text)
        assert regions.current == current, text
    regions = Regions((Markers("<t>", "</t>"), True))
    regions.push("</t> <t> </t>")
    assert regions.current == "prose"
