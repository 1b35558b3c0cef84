"""Chat templates that behave like the ones that differ most, and a byte-level tokenizer. No model.

Each template is a short stand-in: it keeps the habit that matters (default system text, a date in
the header, no system role, think blocks taken out of history, channels), not the wording.
"""

from __future__ import annotations

import re
from functools import cache

import jinja2

from ds4cli.text.chat_template import ChatTemplate

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<think>",
    "</think>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end｜>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
    "<tool_call>",
    "</tool_call>",
)
_PIECES = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
PAIRS = (b"th", b"he", b"in", b"\n\n", b"an", b"re", b"er")  # merged, as a BPE would


def encode(text: str) -> list[int]:
    """Ids: bytes below 256, pairs above, then special tokens."""
    ids: list[int] = []
    for piece in _PIECES.split(text):
        if piece in SPECIALS:
            ids.append(256 + len(PAIRS) + SPECIALS.index(piece))
        else:
            ids += _encode_bytes(piece.encode())
    return ids


def _encode_bytes(data: bytes) -> list[int]:
    ids, i = [], 0
    while i < len(data):
        pair = data[i : i + 2]
        ids.append(256 + PAIRS.index(pair) if pair in PAIRS else data[i])
        i += 2 if pair in PAIRS else 1
    return ids


def decode(ids: list[int]) -> str:
    """The inverse of `encode`, special tokens included."""
    return b"".join(map(_bytes_of, ids)).decode(errors="replace")


def _bytes_of(token: int) -> bytes:
    if token < 256:
        return bytes([token])
    table = (*PAIRS, *(special.encode() for special in SPECIALS))
    return table[token - 256]


CHATML = """
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """<|begin_of_text|>
{%- set has = messages[0].role == 'system' -%}
<|start_header_id|>system<|end_header_id|>

Today Date: {{ date }}

{{ messages[0].content | trim if has else '' }}<|eot_id|>
{%- for m in (messages[1:] if has else messages) -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

GEMMA = """<bos>
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

QWEN3 = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}
{{- m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not think %}<think>

</think>

{% endif %}{% endif %}"""

DEEPSEEK = """<bos>
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}
{%- if m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""

GPT_OSS = """<|start|>system<|message|>Knowledge cutoff: 2024-06
Current date: {{ date }}<|end|>
{%- if messages[0].role == 'system' %}<|start|>developer<|message|># Instructions

{{ messages[0].content }}<|end|>{% endif %}
{%- set ns = namespace(call=none) %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}
{%- if ns.call is none %}{{ raise_exception('no call for this tool message') }}{% endif -%}
<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}{% set ns.call = m.tool_calls[0].function.name -%}
<|start|>assistant to=functions.{{ ns.call }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|end|>' if not loop.last or add_generation_prompt else '<|return|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Draws results only behind the call that they answer, the call's keys in its own order.
ORPHANS = """<bos>
{%- for m in messages %}
{%- if m.role == 'tool' %}{% continue %}{% endif -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments | dictsort %} {{ key }}:{{ value }}{% endfor -%}
</tool_call>
{%- endfor %}
{%- if m.tool_calls %}{% for r in messages[loop.index0 + 1:] if r.role == 'tool' -%}
<start_of_turn>result {{ r.content }}<end_of_turn>
{%- endfor %}{% else %}<end_of_turn>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<start_of_turn>model
{% endif %}"""

SOURCES = {
    "orphans": ORPHANS,
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "qwen3-think": QWEN3,
    "qwen3-nothink": QWEN3,
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
}
ENDS = {
    "orphans": "<end_of_turn>",
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "qwen3-think": "<|im_end|>",
    "qwen3-nothink": "<|im_end|>",
    "deepseek": "<｜end｜>",
    "gpt-oss": "<|return|>",
}


@cache
def _compiled(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=False, lstrip_blocks=False, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(SOURCES[name])


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def template(name: str, date: str = "01 Jan 2026") -> ChatTemplate:
    """One of `SOURCES` with the byte tokenizer; `date` is what its header says today is."""
    think = name == "qwen3-think"

    def render(messages: list[dict], add_generation_prompt: bool) -> str:
        return _compiled(name).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            date=date,
            think=think,
        )

    return ChatTemplate(render, encode, frozenset(encode(ENDS[name])))
