"""Typed parameter values: the JSON value, its schema, and how a request says it."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .sample import join_and
from .words import NUMBER_WORDS, STATUSES, Pool

SCALARS: dict[str, Callable[[Pool], Any]] = {
    "city": Pool.city,
    "person": Pool.person,
    "email": Pool.email,
    "date": Pool.date,
    "time": Pool.time,
    "path": Pool.path,
    "url": Pool.url,
    "code": Pool.code,
    "phrase": Pool.phrase,
    "sentence": Pool.sentence,
    "word": Pool.any_word,
    "invented": Pool.invented,
    "ident": Pool.identifier,
    "number": Pool.decimal,
    "integer": Pool.integer,
    "place": lambda p: p.word("place"),
    "food": lambda p: p.word("food"),
    "thing": lambda p: (
        f"{p.word('color')} {p.word('object')}" if p.rng.random() < 0.5 else p.any_word()
    ),
    "proper": lambda p: p.invented().capitalize(),
    "country": lambda p: p.word("country"),
    "language": lambda p: p.rng.choice(
        ("English", "French", "German", "Spanish", "Italian", "Polish", "Dutch", "Greek")
    ),
    "currency": lambda p: p.rng.choice(
        "USD EUR GBP JPY CHF CAD AUD SEK NOK DKK PLN INR CNY".split()
    ),
    "unit": lambda p: p.rng.choice(
        "km miles meters feet inches cm kg pounds grams ounces liters gallons celsius fahrenheit hours minutes".split()
    ),
    "symbol": lambda p: "".join(
        p.rng.choice(string.ascii_uppercase) for _ in range(p.rng.randint(2, 5))
    ),
    "phone": lambda p: (
        f"+{p.rng.randint(1, 99)} {p.rng.randint(100, 999)} {p.rng.randint(1000, 9999999)}"
    ),
    "zip": lambda p: f"{p.rng.randint(1000, 99999)}",
    "street": lambda p: (
        f"{p.rng.randint(1, 300)} {p.invented().capitalize()} {p.rng.choice(('Street', 'Road', 'Lane', 'Avenue'))}"
    ),
    "folder": lambda p: (
        p.rng.choice(("/", "~/", "", "/home/"))
        + "/".join(p.any_word() for _ in range(p.rng.randint(1, 3)))
    ),
    "expression": lambda p: expression(p.rng),
    "command": lambda p: command(p),
    "sql": lambda p: sql(p),
    "status": lambda p: p.rng.choice(STATUSES),
}


def expression(rng: random.Random) -> str:
    a, b, c = (rng.randint(1, 99) for _ in range(3))
    op, op2 = rng.choice("+-*/"), rng.choice("+-*")
    return rng.choice(
        (f"{a} {op} {b}", f"{a} {op} {b} {op2} {c}", f"({a} {op} {b}) {op2} {c}", f"{a}{op}{b}")
    )


def command(pool: Pool) -> str:
    rng, path = pool.rng, pool.path()
    shapes = (
        f"ls -la {path}",
        f"cat {path}",
        f"python {pool.any_word()}.py",
        f"pytest {path}",
        "git status",
        f"git checkout {pool.any_word()}",
        f"make {pool.any_word()}",
        f"pip install {pool.any_word()}",
        f"echo {pool.any_word()}",
        f"wc -l {path}",
    )
    return rng.choice(shapes)


def sql(pool: Pool) -> str:
    rng, table, column = pool.rng, pool.word("noun") + "s", pool.any_word()
    shapes = (
        f"SELECT * FROM {table}",
        f"SELECT {column} FROM {table} WHERE id = {rng.randint(1, 999)}",
        f"SELECT COUNT(*) FROM {table}",
        f"DELETE FROM {table} WHERE {column} = {rng.randint(0, 99)}",
        f"SELECT {column} FROM {table} ORDER BY {column}",
    )
    return rng.choice(shapes)


@dataclass(frozen=True)
class Value:
    """`data` goes into the call, `text` into the request, `schema` into the declaration."""

    data: Any
    text: str
    schema: dict[str, Any]


@lru_cache(maxsize=4096)
def _split_arguments(kind: str) -> tuple[str, list[str]]:
    """`enum(a,b)` -> ("enum", ["a", "b"]); commas inside nested brackets do not split."""
    if "(" not in kind:
        return kind, []
    head, inner = kind[:-1].split("(", 1)
    parts, depth, start = [], 0, 0
    for i, char in enumerate(inner + ","):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(inner[start:i])
            start = i + 1
    return head, parts


def draw(kind: str, pool: Pool) -> Value:
    """A value of `kind`: a scalar name, `int(a,b)`, `enum(..)`, `list(kind,a,b)`, `object(..)`, `bool`."""
    head, args = _split_arguments(kind)
    if head in SCALARS:
        return scalar(SCALARS[head](pool), pool.rng)
    return COMPOUND[head](args, pool)


def scalar(data: Any, rng: random.Random) -> Value:
    if isinstance(data, float):
        data = int(data) if data == int(data) else data
        return Value(data, str(data), {"type": "number"})
    if isinstance(data, int):
        return Value(data, str(data), {"type": "integer"})
    return Value(data, data, {"type": "string"})


def _int(args: list[str], pool: Pool) -> Value:
    data = pool.rng.randint(int(args[0]), int(args[1]))
    spelled = 2 <= data <= 12 and pool.rng.random() < 0.08
    return Value(data, NUMBER_WORDS[data] if spelled else str(data), {"type": "integer"})


def _enum(args: list[str], pool: Pool) -> Value:
    options = list(args)
    if pool.rng.random() < 0.3 and len(options) > 2:
        pool.rng.shuffle(options)
    data = pool.rng.choice(options)
    return Value(data, data, {"type": "string", "enum": options})


def _list(args: list[str], pool: Pool) -> Value:
    low, high = int(args[-2]), int(args[-1])
    items = [draw(",".join(args[:-2]), pool) for _ in range(pool.rng.randint(low, high))]
    text = join_and([item.text for item in items], pool.rng)
    return Value([item.data for item in items], text, {"type": "array", "items": items[0].schema})


def _object(args: list[str], pool: Pool) -> Value:
    fields = {name: draw(kind, pool) for name, kind in (arg.split(":", 1) for arg in args)}
    link = pool.rng.choice((" ", " ", ": ", " = "))
    text = join_and([f"{say(name)}{link}{value.text}" for name, value in fields.items()], pool.rng)
    schema = {
        "type": "object",
        "properties": {name: value.schema for name, value in fields.items()},
        "required": list(fields),
    }
    return Value({name: value.data for name, value in fields.items()}, text, schema)


def _bool(args: list[str], pool: Pool) -> Value:
    data = pool.rng.random() < 0.5
    words = ("true", "yes", "on") if data else ("false", "no", "off")
    return Value(data, pool.rng.choice(words), {"type": "boolean"})


COMPOUND: dict[str, Callable[[list[str], Pool], Value]] = {
    "int": _int,
    "enum": _enum,
    "list": _list,
    "object": _object,
    "bool": _bool,
}


def say(name: str) -> str:
    """How a person says an identifier: `max_price` and `maxPrice` become `max price`."""
    spaced = "".join(f" {c.lower()}" if c.isupper() else c for c in name)
    return spaced.replace("_", " ").strip()
