"""Chat templates that run for ever, write without end, or take all memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
from folder import save_folder
from transformers.utils.chat_template_utils import render_jinja_template

from ds4cli.errors import ModelError
from ds4cli.models.source import locate
from ds4cli.models.tokenizers import load_tokenizer
from ds4cli.text import template_limits, template_sandbox
from ds4cli.text.tokenizer import Vocabulary

LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
GROWS = (
    "{% set n = namespace(kept=[]) %}"
    "{% for i in range(99) %}{% set n.kept = n.kept + ['0123456789' * 1000000 ~ i] %}{% endfor %}"
)


def drawn(template, **values):
    return template_limits.render(
        lambda: render_jinja_template([[]], chat_template=template, **values)[0][0], values
    )


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(template_limits, "SECONDS", 0.3)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOPS, "runs for more than 0.3 s"),
        (CALLS, "runs for more"),
        ("{{ 'x' * 5000000 }}", "writes 5000000 characters"),
        (
            "{% for i in range(999) %}{{ 'x' * 100000 }}{% endfor %}",
            "makes a value of more than 67108864",
        ),
        ("{{ 'x' * 10**12 }}", "makes a value"),
        ("{{ 10**12 * [1] }}", "makes a value"),
        ("{{ 9 ** (9 ** 9) }}", "makes a number"),
        ("{{ 1.5 | round(10**9, 'floor') }}", "makes a number"),
    ],
)
def test_a_template_without_end_is_refused(template, said):
    """Guards: a folder whose template keeps the machine busy for minutes, or fills its memory."""
    with pytest.raises(ModelError, match=said):
        drawn(template)


TEN_MB = "{% set x = '0123456789' * 1000000 %}"
NESTED = "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = LITERAL %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' | center(10**10) }}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x'.rjust(width=10**10) if false else 'x'.rjust(10**10) }}",
        "{{ 'x'.zfill(10**10) }}",
        "{{ 'x'.encode().center(10**10) }}",
        "{{ (5).to_bytes(10**10, 'big') }}",
        "{{ ('\t' * 100000).expandtabs(10**9) }}",
        "{{ 'x' | indent(10**10, true) }}",
        "{{ ('x\n' * 100000) | indent(10**6) }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%.999999999999f' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=10**10) }}",
        "{{ '{x:>9999999999}'.format_map({'x': 1}) }}",
        TEN_MB + "{{ ('%s' * 1000) % ((x,) * 1000) }}",
        TEN_MB + "{{ x.replace('0', x) }}",
        TEN_MB + "{{ x | replace('0', x) }}",
        TEN_MB + "{{ x.replace('', x) }}",
        TEN_MB + "{{ x.translate({48: x}) }}",
        TEN_MB + "{{ x.join(['a'] * 1000) }}",
        TEN_MB + "{{ range(1000) | join(x) }}",
        TEN_MB + "{{ range(1000) | map('string') | join(x) }}",
        TEN_MB + "{{ x.join(range(1000) | map('string')) }}",
        TEN_MB + "{{ [x, x, x, x, x, x, x] }}",
        TEN_MB + "{{ x ~ x ~ x ~ x ~ x ~ x ~ x }}",
        TEN_MB + "{% set x = x + x %}{% set x = x + x %}{% set x = x + x %}{{ x | length }}",
        TEN_MB + "{{ ('ab' | list) | wordwrap(1, true, x * 4) }}",
        "{{ [1] | batch(10**10, 'x') | list }}",
        "{{ ([[1]] * 100000) | tojson(indent=1000) }}",
        NESTED.replace("LITERAL", "[n.x, n.x]"),
        NESTED.replace("LITERAL", "(n.x, n.x)"),
        NESTED.replace("LITERAL", "{'a': n.x, 'b': n.x}"),
        NESTED.replace("LITERAL", "[n.x] * 2"),
        NESTED.replace("LITERAL", "dict(a=n.x, b=n.x)") + "{{ n.x }}",
        NESTED.replace("LITERAL", "dict(a=n.x, b=n.x)") + "{{ n.x | tojson }}",
        NESTED.replace("LITERAL", "dict(a=n.x, b=n.x)") + "{{ n.x | string | length }}",
        NESTED.replace("LITERAL", "dict(a=n.x, b=n.x)") + "{{ 'a' ~ n.x }}",
        NESTED.replace("LITERAL", "dict(a=n.x, b=n.x)") + "{{ '%s' % n.x }}",
        NESTED.replace("LITERAL", "dict(a=n.x, b=n.x)") + "{{ n }}",
    ],
)
def test_one_operation_makes_no_giant(monkeypatch, template):
    """Guards: a filter or a method that fills the memory inside C, where no watch can end it."""
    monkeypatch.setattr(template_limits, "SECONDS", 30)
    most = 2**26 if "0123" in template else 2**20 if "n.x" not in template else 2**12
    monkeypatch.setattr(template_sandbox, "MAX_LENGTH", most)
    with pytest.raises(ModelError, match="makes a value of more than"):
        drawn(template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{{ 'x' | center(5) }}|{{ 'x'.ljust(3) }}|{{ 'a\nb' | indent(2, true) }}",
            "  x  |x  |  a\n  b",
        ),
        ("{{ '%s is %3d' % ('x', 1733000000) }}{{ '%s' | format(2) }}", "x is 17330000002"),
        ("{{ '{} {:>4}'.format(1733000000000, 'a') }}", "1733000000000    a"),
        ("{{ ', '.join(['a', 'b']) }}{{ [1, 2] | map('string') | join('-') }}", "a, b1-2"),
        ("{{ [{'a': 1}] | map(attribute='a') | join(',') }}{{ ['a'] | join }}", "1a"),
        ("{{ {'a': [1, (2, 3)]} | tojson(indent=2) | length }}{{ [1] + [2] }}", "52[1, 2]"),
        (
            "{{ 'a.b'.replace('.', '-') }}{{ 'a.b' | replace('.', '') }}{{ 'a' ~ 1 ~ none }}",
            "a-baba1None",
        ),
        ("{% for a, b in [(1, 2)] %}{{ a + b }}{% endfor %}{% set a, b = 1, 2 %}{{ b }}", "32"),
        ("{{ undefined }}{{ undefined is defined }}{{ none }}{{ 2.5 | round }}", "FalseNone2.0"),
    ],
)
def test_a_template_writes_what_jinja_writes(template, text):
    """Guards: a check before an operation that changes what it makes."""
    assert drawn(template) == text


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told by /proc")
def test_a_template_that_takes_memory_is_refused(monkeypatch):
    """Guards: a text that doubles until the machine swaps, inside the time that is allowed."""
    monkeypatch.setattr(template_limits, "SECONDS", 60)
    monkeypatch.setattr(template_limits, "MEMORY_BYTES", 2**27)
    monkeypatch.setattr(template_limits, "LOOK_S", 0.001)
    with pytest.raises(ModelError, match="takes more than 128 MB"):
        drawn(GROWS)


def test_a_template_may_do_what_templates_do():
    """Guards: a long conversation taken for an attack, or products that come out otherwise."""
    text = "{{ text }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ '-' * 3 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}"
    long = "word " * 600_000
    assert drawn(text, text=long) == long + "121024---3.00.5"


def test_nothing_arrives_after_a_template_has_ended():
    """Guards: an exception that strikes the code behind the template."""
    for _ in range(20):
        assert drawn("{{ 'x' }}") == "x"
    before = threading.active_count()
    watch = template_limits._Watch()
    with watch:
        pass
    watch._stop("too late")
    time.sleep(0.01)
    assert not watch.reason and threading.active_count() <= before + 1


def test_ctrl_c_ends_a_template(monkeypatch):
    """Guards: a loop that swallows the interrupt."""
    monkeypatch.setattr(template_limits, "SECONDS", 60)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        drawn(LOOPS)


def test_every_way_to_a_template_is_held(tmp_path):
    """Guards: a template that runs free where it is asked something else than a conversation."""
    folder = save_folder(tmp_path / "m")
    tokenizer = load_tokenizer(locate(str(folder)))
    tokenizer._tokenizer.chat_template = "{{ messages[0]['content'] }}" + LOOPS
    vocabulary = Vocabulary(tokenizer)
    for ask in (
        lambda: vocabulary.render([{"role": "user", "content": "hi"}]),
        lambda: vocabulary.template(vocabulary.settings).takes_system,
        lambda: vocabulary.template(vocabulary.settings).dropped_system(
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
        ),
    ):
        with pytest.raises(ModelError, match="runs for more than"):
            ask()


def test_a_profiled_generator_goes_on_after_a_template():
    """A stop that is called off though none was sent: CPython looks for it at every instruction
    from then on, and a generator that is profiled never comes back."""
    program = (
        "import cProfile\n"
        "from ds4cli.text import template_limits\n"
        "template_limits.render(lambda: 'text', '')\n"
        "steps = (n for n in range(9))\n"
        "next(steps)\n"
        "cProfile.Profile().runcall(lambda: print(next(steps)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "1\n", ran.stderr
