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
from ds4cli.text import template_limits
from ds4cli.text.tokenizer import Vocabulary

LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
GROWS = (
    "{% set n = namespace(x='0123456789' * 1000000) %}"
    "{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
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
        ("{% for i in range(999) %}{{ 'x' * 100000 }}{% endfor %}", "writes more than 67108864"),
        ("{{ 'x' * 10**12 }}", "makes a value"),
        ("{{ 10**12 * [1] }}", "makes a value"),
        ("{{ 9 ** (9 ** 9) }}", "makes a number"),
    ],
)
def test_a_template_without_end_is_refused(template, said):
    """Guards: a folder whose template keeps the machine busy for minutes, or fills its memory."""
    with pytest.raises(ModelError, match=said):
        drawn(template)


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
