"""Repairing after the fact gives exactly what masking at every step gives. No model: logits come
from a function.
"""

from __future__ import annotations

import numpy as np
import pytest
import regex
from test_tools_guard import intro, text_of
from test_tools_parse import BODIES
from toolkit import EOS, TOOLS, tokenizer

from ds4cli.tools import FORMATS, Guard
from ds4cli.tools.grammar import grammar_for

BAD = {
    "json_tools": 'Hi x<tool_call>\n{"name": "get_weathr", "arguments": {"city": "Paris", '
    '"days": "12"}}\n</tool_call>\nbye',
    "qwen3_coder": "Hi x<tool_call>\n<functon=get_weather>\n<parameter=town>\nPa</parameter> x\n"
    "</parameter>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>\nbye",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="set_alarm">\n<parameter name="on">yes'
    '</parameter>\n<parameter name="off">1</parameter>\n</invoke>\n</minimax:tool_call>',
}
GOOD = {
    "json_tools": '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
}
LENGTH = 140
NAMES = [tool.name for tool in TOOLS]


class FakeModel:
    """Logits that want to continue a script, wherever the context has got to in it, plus noise."""

    def __init__(self, wrapper, script: str, seed: int, chaos: float = 0.05) -> None:
        self.chaos = chaos  # how often a row is mostly noise
        self.size = len(wrapper) + 7  # a padded head
        self.script, self.seed = script + EOS, seed
        # One character per byte, so that halves of a character are told apart.
        trie = grammar_for(wrapper, FORMATS["json_tools"], TOOLS)
        self.spelled = [trie.bytes_of(i).decode("latin-1") for i in range(len(wrapper))]

    def row(self, tokens: list[int]) -> np.ndarray:
        salt = [self.seed, len(tokens), *tokens[-3:]]
        rng = np.random.default_rng(salt)
        row = rng.normal(0, 8 if rng.random() < self.chaos else 1, self.size)
        rest = self._rest("".join(self.spelled[t] for t in tokens))
        for token, text in enumerate(self.spelled):
            if text and rest.startswith(text):
                row[token] += 8 + 2 * len(text)
        return row

    def _rest(self, text: str) -> str:
        """What follows in the script, after walking along it with `text` and catching up where they
        differ.
        """
        at = 0
        for i, char in enumerate(text):
            if self.script.startswith(char, at):
                at += 1
            elif (ahead := self.script.find(text[max(0, i - 2) : i + 1], at, at + 60)) >= 0:
                at = ahead + min(3, i + 1)
        return self.script[at:]


class Loop:
    """What the session does, on lists: position-keyed picks, drafts, acceptance, the guard's
    answers.
    """

    def __init__(self, wrapper, model: FakeModel, temp: float) -> None:
        self.wrapper, self.model, self.temp = wrapper, model, temp

    def pick(self, tokens: list[int], mask=None) -> int:
        row = self.model.row(tokens)
        row[len(self.wrapper) :] = -np.inf
        if self.temp:
            row = row / self.temp + np.random.default_rng([99, len(tokens)]).gumbel(size=len(row))
        return int(np.argmax(row if mask is None else np.where(mask, row, -np.inf)))

    def guarded(self, guard: Guard, drafter=None) -> tuple[list[int], int]:
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            first = self.pick(tokens)
            block = [first, *(drafter(tokens, first) if drafter else [])]
            block = block[: max(1, guard.filter(block))]
            accepted = [first]
            for draft in block[1:]:
                if self.pick([*tokens, *accepted]) != draft:
                    break
                accepted.append(draft)
            if self._commit(guard, tokens, accepted[: LENGTH - len(tokens)]):
                break
        return tokens, guard.repairs

    def _commit(self, guard: Guard, tokens: list[int], block: list[int]) -> bool:
        for token in block:
            step = guard.feed(len(tokens), token, self.model.spelled[token])
            while step.event == "left":
                del tokens[step.bad_pos :]
                guard.rewind(step.bad_pos)  # a session tells the guard too, which knows already
                token = self.pick(tokens, guard.allowed(self.model.size))
                step = guard.feed(len(tokens), token, self.model.spelled[token])
                block = []
            if self._ended(tokens, token, step):
                return True
            if not block:
                return False
        return False

    def _ended(self, tokens, token, step) -> bool:
        if token in self.wrapper.eos_token_ids:
            return True
        tokens.append(token)
        return step.event == "closed"

    def masked(self, fmt) -> list[int]:
        """The reference: the whole text is read again at every step, and the mask is always on."""
        grammar = grammar_for(self.wrapper, fmt, TOOLS)
        opening = regex.compile(fmt.opening(NAMES))
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            text = self._text(tokens)
            match = opening.search(text)
            if match:
                matcher = self._after(grammar, text[match.start() :])
                if matcher.is_accepting():
                    break
                token = self.pick(tokens, grammar.mask(matcher, self.model.size))
            else:
                token = self._free(grammar, opening, tokens, text)
            if token in self.wrapper.eos_token_ids:
                break
            tokens.append(token)
        return tokens

    def _free(self, grammar, opening, tokens, text) -> int:
        """Free text; only a token that would open a call wrongly is not free."""
        token = self.pick(tokens)
        match = opening.search(text + self.model.spelled[token])
        if not match or self._after(grammar, (text + self.model.spelled[token])[match.start() :]):
            return token
        if match.start() < len(text):
            mask = grammar.mask(self._after(grammar, text[match.start() :]), self.model.size)
        else:
            mask = np.array(
                [self._may_begin(grammar, opening, text, t) for t in range(self.model.size)]
            )
        return self.pick(tokens, mask)

    def _may_begin(self, grammar, opening, text, token) -> bool:
        text += self.model.spelled[token] if token < len(self.model.spelled) else ""
        match = opening.search(text)
        return match is None or self._after(grammar, text[match.start() :]) is not None

    def _after(self, grammar, text):
        """A fresh matcher after `text`, byte by byte; None when the grammar refuses it."""
        matcher = grammar.matcher()
        for byte in text.encode("latin-1"):
            if not matcher.try_consume_tokens(grammar.tokens_of(bytes([byte]))):
                return None
        return matcher

    def _text(self, tokens) -> str:
        return "".join(self.model.spelled[t] for t in tokens)


def copying(reference: list[int], seed: int):
    """Drafts that are mostly what the reference says, sometimes wrong."""
    rng = np.random.default_rng(seed)

    def propose(tokens, first):
        ahead = reference[len(tokens) + 1 : len(tokens) + 1 + int(rng.integers(0, 7))]
        return [int(rng.integers(0, 256)) if rng.random() < 0.1 else t for t in ahead]

    return propose


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("name", list(BAD))
def test_repair_equals_masking_from_the_start(name, temp):
    """A repair that gives other text than constrained decoding, with or without drafts, at any
    temperature.
    """
    wrapper, fmt = tokenizer(name), FORMATS[name]
    repaired = closed = 0
    for seed in range(4):
        loop = Loop(wrapper, FakeModel(wrapper, BAD[name], seed), temp)
        expected = loop.masked(fmt)
        plain, repairs = loop.guarded(Guard(wrapper, TOOLS))
        assert plain == expected
        drafted, _ = loop.guarded(Guard(wrapper, TOOLS), copying(expected, seed))
        assert drafted == expected
        repaired += repairs
        closed += loop._text(plain).endswith(fmt.end) or fmt.end in loop._text(plain)
    assert repaired > 4, "the scripts must make the model err"
    assert closed, "some call must have come to its end"


# The fake model spells one character per byte, so no DeepSeek; others share its styles.
OTHERS = [n for n, f in FORMATS.items() if n not in BAD and (f.start + f.end).isascii()]


def name_opens(name: str) -> bool:
    """A call's name is a part of what opens it: the reference masks only what follows that."""
    fmt = FORMATS[name]
    text = fmt.start + BODIES[name].partition("get_weather")[0] + "g"
    return regex.search(fmt.opening(NAMES), text) is None


@pytest.mark.parametrize("name", OTHERS)
def test_repair_equals_masking_in_every_format(name):
    """Guards: a format whose repairs give other text than its grammar, with drafts or without."""
    wrapper, fmt = tokenizer(name), FORMATS[name]
    script = (
        intro(name, "x")
        + text_of(name).partition(BODIES[name])[0]
        + BODIES[name].replace("weather", "weathr").replace("city", "ciy")
    )
    loop = Loop(wrapper, FakeModel(wrapper, script + fmt.end, 1, chaos=0.0), 0.0)
    plain, repairs = loop.guarded(Guard(wrapper, TOOLS))
    drafted, _ = loop.guarded(Guard(wrapper, TOOLS), copying(plain, 1))
    assert repairs and plain == drafted
    if not name_opens(name) and fmt.end:
        assert plain == loop.masked(fmt)


@pytest.mark.parametrize("name", list(GOOD))
def test_a_model_that_makes_no_mistake_is_not_touched(name):
    """A guard that changes, masks or repairs text that was right."""
    wrapper = tokenizer(name)
    loop = Loop(wrapper, FakeModel(wrapper, "Well. " + GOOD[name], 1, chaos=0.0), 0.0)
    tokens, repairs = loop.guarded(Guard(wrapper, TOOLS))
    assert repairs == 0
    assert loop._text(tokens) == "Well. " + GOOD[name]
