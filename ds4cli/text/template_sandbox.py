"""A sandbox of Jinja's in which no single operation makes a value of any size.

A watch (`template_limits`) ends a template between two steps of the interpreter. What one step does
inside C, `'x'.center(10**10)`, nothing can end: so it is told beforehand how much it would make.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, wraps
from typing import Any

from ds4cli.models import mlx_lm

MAX_LENGTH = 2**26  # of one value, in characters or items, with all that is in it
MAX_DIGITS = 4300  # Python prints no longer number
NUMBER_CHARS = 400  # a number is written with less, unless a width asks for more


class TooLarge(Exception):
    """One operation that would make a value of any size."""


@cache
def use() -> None:
    """Let transformers compile templates for this sandbox: constants are worked out when it
    compiles."""
    from jinja2.compiler import CodeGenerator
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generator(CodeGenerator):
        """Lists, and texts that are put together, come by `Held`."""

        def visit_List(self, node: Any, frame: Any) -> None:
            self._checked(super().visit_List, node, frame)

        def visit_Tuple(self, node: Any, frame: Any) -> None:
            if node.ctx != "load":
                return super().visit_Tuple(node, frame)
            self._checked(super().visit_Tuple, node, frame)

        def visit_Dict(self, node: Any, frame: Any) -> None:
            self._checked(super().visit_Dict, node, frame)

        def visit_Concat(self, node: Any, frame: Any) -> None:
            self.write("environment.put_together((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

        def _checked(self, visit: Callable[[Any, Any], None], node: Any, frame: Any) -> None:
            self.write("environment.checked(")
            visit(node, frame)
            self.write(")")

    class Held(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})
        code_generator_class = Generator
        concat = staticmethod(_joined)
        checked = staticmethod(_checked)
        put_together = staticmethod(_put_together)

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, finalize=_checked, **options)
            self.filters = _Filters(self.filters)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps a text's `format`
            owner = getattr(method, "__self__", None)
            if isinstance(owner, (str, bytes, int)):
                args = tuple(_counted(arg) for arg in args)
                _check_call(method.__name__, owner, [*args, *kwargs.values()])
            return super().call(__context, __obj, *args, **kwargs)

    mlx_lm.use_sandbox(Held)


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, each held to what it may make, whoever adds it."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        for name, function in filters.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(
            name, _held(name, function) if name in (*LENGTHS, "round") else function
        )


def _held(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Some are given a context or an environment before the value; the mark says so.
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        before, value, rest = args[:at], _counted(args[at]), args[at + 1 :]
        _check_call(name, value, [*rest, *kwargs.values()])
        return function(*before, value, *rest, **kwargs)

    return held


def _counted(value: Any) -> Any:
    """A list of what a generator would give, so that it can be looked at beforehand."""
    return list(value) if isinstance(value, Iterator) else value


def _checked(value: Any) -> Any:
    """A value that is about to be written or kept; TooLarge where it would be too long as text."""
    if not isinstance(value, str):
        _check_length(weigh(value))
    return value


def _joined(pieces: Iterable[str]) -> str:
    out, size = [], 0
    for piece in pieces:
        size += len(piece)
        _check_length(size)
        out.append(piece)
    return "".join(out)


def _put_together(parts: tuple[Any, ...]) -> str:
    return _joined(str(_checked(part)) for part in parts)


# -- how much an operation would make -------------------------------------------------------------


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TooLarge(f"makes a value of more than {MAX_LENGTH} characters or items")


def _check_digits(digits: int) -> None:
    if digits > MAX_DIGITS:
        raise TooLarge(f"makes a number of more than {MAX_DIGITS} digits")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_length(len(left) + len(right))
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_length(_formatted(left, [right]))
    elif operator in ("*", "**"):
        _check_digits(_digits_of(operator, left, right))
        _check_length(_repeated(left, right))


def _check_call(name: str, value: Any, given: list[Any]) -> None:
    """Of a filter, or of a method of a text or a number."""
    if name == "round":
        _check_digits(_largest(given))
    elif name in LENGTHS:
        _check_length(LENGTHS[name](value, given))


def weigh(value: Any, more: int = 0, indent: int = 0) -> int:
    """About how long a value is as text, with all that is in it; looks no further than MAX_LENGTH.

    An item takes `more` on top, and `indent` for each level it is deep.
    """
    size, left = 0, [(value, 0)]
    while left and size <= MAX_LENGTH:
        item, depth = left.pop()
        size += 1 + more + depth * indent
        if isinstance(item, (str, bytes)):
            size += len(item)
        elif item is not None and not isinstance(item, (int, float)):
            left += [(inner, depth + 1) for inner in _inside(item)]
    return size


def _inside(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        return [*item, *item.values()]
    if isinstance(item, Collection):
        return item
    from jinja2.utils import Namespace

    return [item._Namespace__attrs] if isinstance(item, Namespace) else []


def _digits_of(operator: str, left: Any, right: Any) -> int:
    """About how many digits a power or a product has; 0 where it is no whole number."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return 0
    digits = left.bit_length() * 0.3
    return int(digits * abs(right) if operator == "**" else digits + right.bit_length() * 0.3)


def _repeated(left: Any, right: Any) -> int:
    one, times = (right, left) if isinstance(left, int) else (left, right)
    repeats = isinstance(one, (str, bytes, list, tuple)) and isinstance(times, int)
    return weigh(one) * times if repeats else 0


def _largest(given: Iterable[Any]) -> int:
    return max((abs(one) for one in given if isinstance(one, int)), default=0)


def _longest(given: Iterable[Any]) -> int:
    return max((weigh(one) for one in given), default=0)


def _widest(given: Iterable[Any]) -> int:
    """What is set in or put between: so many blanks, or a text."""
    return max(_largest(given), _longest(given))


def _padded(value: Any, given: list[Any]) -> int:
    return weigh(value) + _largest(given)


def _by_line(value: Any, given: list[Any]) -> int:
    lines = 1 + value.count("\n") if isinstance(value, str) else 1
    return weigh(value) + lines * _widest(given)


def _by_character(value: Any, given: list[Any]) -> int:
    return weigh(value) * max(1, _widest(given))


def _by_tab(value: Any, given: list[Any]) -> int:
    return weigh(value) + value.count("\t") * _largest(given)


def _replaced(value: Any, given: list[Any]) -> int:
    old, new = [*given, "", ""][:2]
    if not isinstance(value, str):
        value = str(_checked(value))
    found = value.count(old) if isinstance(old, str) else len(value)
    return len(value) + found * weigh(new)


def _strung(value: Any, given: list[Any]) -> int:
    """`join`, as a filter of items and as a method of what stands between them."""
    between, items = (value, given[:1]) if isinstance(value, (str, bytes)) else (given[:1], value)
    return weigh(items, more=weigh(between))


def _formatted(value: Any, given: list[Any]) -> int:
    """`%`, `format`: the fields of a text, each with the longest value or the largest width."""
    text = value if isinstance(value, str) else str(_checked(value))
    fields = re.findall(r"%[-+ #0-9.*]*|\{[^}]*", text)
    width = max((int(run[:12]) for field in fields for run in re.findall(r"\d+", field)), default=0)
    if any("*" in field or field.count("{") > 1 for field in fields):
        width = max(width, _largest(_flat(given)))
    return len(text) + len(fields) * (max(width, _longest(given)) + NUMBER_CHARS)


def _flat(given: Iterable[Any]) -> list[Any]:
    """The values, and those one level inside: `%` takes a tuple or a dict, `format_map` a dict."""
    return [one for value in given for one in (value, *_inside(value))]


def _as_json(value: Any, given: list[Any]) -> int:
    return weigh(value, more=_longest(given), indent=_widest(given))


def _as_text(value: Any, given: list[Any]) -> int:
    return weigh(value)


# What makes a text or a list that is longer than what it was given, or a text of what was none.
LENGTHS: dict[str, Callable[[Any, list[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "batch", "slice"), _padded),
    **dict.fromkeys(("translate", "wordwrap"), _by_character),
    **dict.fromkeys(("format", "format_map"), _formatted),
    **dict.fromkeys(("string", "upper", "lower", "title", "capitalize", "trim", "safe"), _as_text),
    **dict.fromkeys(("e", "escape", "forceescape", "striptags", "urlencode", "urlize"), _as_text),
    **dict.fromkeys(("truncate", "wordcount", "pprint"), _as_text),
    "expandtabs": _by_tab,
    "indent": _by_line,
    "join": _strung,
    "replace": _replaced,
    "tojson": _as_json,
}
