"""Small instructions with one right answer: repeat, list, sort, reverse, count, edit, sums."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from .sample import Sample, casual, dialogue, join_and, polite
from .values import draw
from .words import NUMBER_WORDS, Pool


def items_of(pool: Pool, low: int = 2, high: int = 7) -> list[str]:
    """Distinct items: one category, mixed words, names, or identifiers."""
    rng = pool.rng
    n = rng.randint(low, high)
    roll = rng.random()
    if roll < 0.45:
        category = rng.choice(
            (
                "fruit",
                "animal",
                "object",
                "color",
                "place",
                "city",
                "first_name",
                "food",
                "vegetable",
                "job",
            )
        )
        items = pool.words(category, n)
    elif roll < 0.85:
        items = [pool.any_word() for _ in range(n)]
    else:
        items = [pool.identifier() for _ in range(n)]
    return list(dict.fromkeys(items))


def numbers_of(rng: random.Random, low: int = 2, high: int = 7) -> list[int]:
    top = rng.choice((9, 20, 100, 100, 1000))
    return [rng.randint(0, top) for _ in range(rng.randint(low, high))]


def spoken(items: list[Any], rng: random.Random) -> str:
    return rng.choice((", ".join, ", ".join, " ".join))([str(i) for i in items])


def ask(pool: Pool, shapes: tuple[str, ...], **values: Any) -> str:
    return polite(pool.rng.choice(shapes).format(**values), pool.rng)


def repeat(pool: Pool) -> Sample:
    rng = pool.rng
    text = rng.choice(
        (
            pool.sentence,
            pool.free_text,
            pool.free_text,
            pool.free_text,
            pool.phrase,
            pool.paragraph,
            pool.code,
            pool.url,
            lambda: " ".join(items_of(pool)),
            lambda: pool.letters(5, 14),
        )
    )()
    shapes = (
        "Repeat: {t}", "Repeat after me: {t}", "Repeat this exactly: {t}", "Say '{t}'", 'Say "{t}"', "Echo {t}",
        "Copy this text: {t}", "Write this back to me: {t}", "Repeat the following text.\n\n{t}", "Say this: {t}", "Print: {t}",
    )  # fmt: skip
    if rng.random() < 0.25:
        return repeat_times(pool)
    return dialogue(
        "repeat", casual(rng.choice(shapes).format(t=text), rng), text, "I repeat the text."
    )


def repeat_times(pool: Pool) -> Sample:
    rng = pool.rng
    n, text = rng.randint(2, 6), rng.choice((pool.any_word, pool.phrase))()
    shapes = (
        "Say '{t}' {n} times.",
        "Repeat '{t}' {n} times.",
        "Write {t} {n} times.",
        "Print the word {t} {n} times.",
    )
    number = NUMBER_WORDS[n] if rng.random() < 0.3 else n
    return dialogue(
        "repeat", ask(pool, shapes, t=text, n=number), "\n".join([text] * n), f"{n} lines."
    )


def make_list(pool: Pool) -> Sample:
    rng = pool.rng
    items = items_of(pool, 2, 9)
    numbered = rng.random() < 0.45
    kind = (
        "numbered list"
        if numbered
        else rng.choice(("list", "bulleted list", "bullet list", "list with bullets"))
    )
    shapes = (
        "Make a {k}: {t}", "Make a {k} of {t}.", "Write these as a {k}: {t}", "Turn this into a {k}: {t}",
        "Format as a {k}: {t}", "List these items as a {k}: {t}", "I need a {k} of {t}.", "Create a {k} from: {t}", "Give me {t} as a {k}.",
    )  # fmt: skip
    lines = (
        [f"{i}. {item}" for i, item in enumerate(items, 1)]
        if numbered
        else [f"- {item}" for item in items]
    )
    request = ask(
        pool, shapes, k=kind, t=join_and(items, rng) if rng.random() < 0.6 else ", ".join(items)
    )
    return dialogue("list", request, "\n".join(lines), f"{len(items)} items.")


def sort_words(pool: Pool) -> Sample:
    rng = pool.rng
    items = items_of(pool, 2, 7)
    backwards = rng.random() < 0.25
    answer = sorted(items, key=str.lower, reverse=backwards)
    order = rng.choice(
        ("in reverse alphabetical order", "from Z to A")
        if backwards
        else ("alphabetically", "in alphabetical order", "from A to Z", "by alphabet", "", "")
    )
    shapes = (
        "Sort these words {o}: {t}",
        "Sort {o}: {t}",
        "Sort this list {o}: {t}",
        "Order these words {o}: {t}",
        "Arrange {t} {o}.",
        "Sort {t} {o}.",
        "Sort the words {t} {o}.",
        "Sort this {o}: {t}",
        "Please sort {t} {o}.",
    )
    letters = ", ".join(f"{w[:2]}" for w in answer)
    request = tidy(ask(pool, shapes, o=order, t=spoken(items, rng)))
    return dialogue("sort", request, ", ".join(answer), f"In order: {letters}.")


def tidy(text: str) -> str:
    """Take out the blank that an empty order leaves."""
    return text.replace("  ", " ").replace(" :", ":").replace(" .", ".")


def sort_numbers(pool: Pool) -> Sample:
    rng = pool.rng
    items = numbers_of(rng)
    backwards = rng.random() < 0.35
    order = rng.choice(
        ("in descending order", "from largest to smallest", "from high to low", "descending")
        if backwards
        else ("in ascending order", "from smallest to largest", "from low to high", "", "ascending")
    )
    shapes = (
        "Sort these numbers {o}: {t}",
        "Sort {o}: {t}",
        "Sort the numbers {t} {o}.",
        "Order {t} {o}.",
        "Put these numbers {o}: {t}",
        "Arrange these numbers {o}: {t}",
    )
    request = tidy(ask(pool, shapes, o=order, t=spoken(items, rng)))
    answer = sorted(items, reverse=backwards)
    return dialogue(
        "sort", request, ", ".join(map(str, answer)), "Descending." if backwards else "Ascending."
    )


def reverse(pool: Pool) -> Sample:
    rng = pool.rng
    if rng.random() < 0.4:
        return reverse_word(pool)
    items = items_of(pool) if rng.random() < 0.7 else [str(n) for n in numbers_of(rng, 3)]
    shapes = (
        "Reverse this list: {t}",
        "Reverse the order of {t}.",
        "Reverse: {t}",
        "Write these in reverse order: {t}",
        "Reverse the order of these items: {t}",
        "List these backwards: {t}",
        "Put these in the opposite order: {t}",
    )
    return dialogue(
        "reverse",
        ask(pool, shapes, t=spoken(items, rng)),
        ", ".join(reversed(items)),
        f"{len(items)} items, from the last to the first.",
    )


def reverse_word(pool: Pool) -> Sample:
    rng = pool.rng
    word = rng.choice((pool.any_word, lambda: pool.letters(3, 7), pool.invented))()
    if rng.random() < 0.25:
        return reverse_string(pool)
    shapes = (
        "Reverse {t}.",
        "Reverse '{t}'.",
        "Reverse the word {t}.",
        "Reverse the word '{t}'.",
        "Spell '{t}' backwards.",
        "Write {t} backwards.",
        "What is '{t}' reversed?",
        "Reverse the letters of {t}.",
        "Reverse the string '{t}'.",
    )
    return dialogue(
        "reverse",
        ask(pool, shapes, t=word),
        word[::-1],
        " ".join(word) + " -> " + " ".join(word[::-1]),
    )


def reverse_string(pool: Pool) -> Sample:
    """Two words as one string of letters; `_` stands for the blank while thinking."""
    text = f"{pool.any_word()} {pool.any_word()}"
    shapes = (
        "Reverse this string: {t}",
        "Reverse the string '{t}'.",
        "Write '{t}' backwards.",
        "Reverse the text {t} letter by letter.",
        "Spell '{t}' backwards.",
    )
    letters = " ".join(text.replace(" ", "_"))
    return dialogue(
        "reverse", ask(pool, shapes, t=text), text[::-1], f"{letters} -> {letters[::-1]}"
    )


def spell(pool: Pool) -> Sample:
    word = pool.rng.choice((pool.any_word, pool.invented, lambda: pool.letters(3, 8)))()
    shapes = (
        "Spell {t}.",
        "Spell the word '{t}'.",
        "How do you spell {t}?",
        "Spell out '{t}' letter by letter.",
        "Write the letters of {t} with dashes.",
    )
    return dialogue("spell", ask(pool, shapes, t=word), "-".join(word), "One letter at a time.")


def count(pool: Pool) -> Sample:
    return pool.rng.choice(
        (count_items, count_items, count_letters, count_one_letter, count_words, count_occurrences)
    )(pool)


def numbered_off(items: list[str]) -> str:
    return ", ".join(f"{i} {item}" for i, item in enumerate(items, 1)) + "."


def count_items(pool: Pool) -> Sample:
    items = items_of(pool, 2, 9)
    shapes = (
        "How many items are in this list: {t}?",
        "Count the items: {t}",
        "How many words are here: {t}?",
        "Count these: {t}",
        "How many things are in the list {t}?",
        "Count the elements of this list: {t}",
    )
    return dialogue(
        "count", ask(pool, shapes, t=", ".join(items)), f"{len(items)}", numbered_off(items)
    )


def count_letters(pool: Pool) -> Sample:
    word = pool.any_word()
    shapes = (
        "How many letters are in the word {t}?",
        "How many letters does '{t}' have?",
        "Count the letters in {t}.",
        "How long is the word '{t}'?",
        "How many characters are in '{t}'?",
    )
    return dialogue("count", ask(pool, shapes, t=word), f"{len(word)}", numbered_off(list(word)))


def count_one_letter(pool: Pool) -> Sample:
    rng = pool.rng
    word = pool.any_word()
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("aeioutrsn")
    shapes = (
        "How many times does the letter {c} occur in {t}?",
        "How many {c}'s are in '{t}'?",
        "Count the letter '{c}' in '{t}'.",
        "How often is {c} in the word {t}?",
        "How many {c}s are in {t}?",
    )
    return dialogue(
        "count",
        ask(pool, shapes, t=word, c=letter),
        f"{word.count(letter)}",
        mark_hits(word, letter),
    )


def mark_hits(word: str, letter: str) -> str:
    """`s t r1 a w b e r2 r3 y`: every hit with its number."""
    hits, parts = 0, []
    for char in word:
        hits += char == letter
        parts.append(f"{char}{hits}" if char == letter else char)
    return " ".join(parts) + "."


def count_words(pool: Pool) -> Sample:
    text = pool.sentence()
    if pool.rng.random() < 0.5:
        kinds = ["the", "a", *(pool.any_word() for _ in range(pool.rng.randint(2, 6)))]
        text = " ".join(pool.rng.choice(kinds) for _ in range(pool.rng.randint(2, 10)))
    shapes = (
        "How many words are in this sentence: {t}",
        "Count the words: {t}",
        "Count the words in this text: {t}",
        "How many words does this have? {t}",
        "Count the words in '{t}'.",
    )
    words = text.rstrip(".").split()
    return dialogue(
        "count",
        casual(pool.rng.choice(shapes).format(t=text), pool.rng),
        f"{len(words)}",
        numbered_off(words),
    )


def count_occurrences(pool: Pool) -> Sample:
    rng = pool.rng
    kinds = [pool.any_word() for _ in range(rng.randint(2, 3))]
    items = [rng.choice(kinds) for _ in range(rng.randint(3, 8))]
    wanted = rng.choice(items)
    shapes = (
        "How many times does {w} occur in {t}?",
        "Count '{w}' in this list: {t}",
        "How often is {w} in the list {t}?",
        "How many {w} are in {t}?",
    )
    hits = [i for i, item in enumerate(items, 1) if item == wanted]
    think = numbered_off(items) + f" `{wanted}` is at " + ", ".join(map(str, hits)) + "."
    return dialogue("count", ask(pool, shapes, w=wanted, t=", ".join(items)), f"{len(hits)}", think)


def carry_steps(a: int, b: int) -> str:
    """Column addition, the way it is taught: `7+5=12 write 2 carry 1`."""
    steps, carry = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        total = p + q + carry
        steps.append(f"{p}+{q}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ", ".join(steps) + "."


def borrow_steps(a: int, b: int) -> str:
    """Column subtraction from the right: `0-1=9 borrow 1`; a >= b."""
    steps, borrow = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i, digit in enumerate(x):
        q = int(y[i]) if i < len(y) else 0
        rest = int(digit) - q - borrow
        steps.append(
            f"{digit}-{q}{'-1' if borrow else ''}={rest % 10}{' borrow 1' if rest < 0 else ''}"
        )
        borrow = int(rest < 0)
    return ", ".join(steps) + "."


def sums(pool: Pool) -> Sample:
    rng = pool.rng
    op = rng.choice("++++--*")
    a, b, c, result, think = sum_problem(op, rng)
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    terms = f"{a} {op} {b}" + (f" {op} {c}" if c is not None else "")
    said = f"{a} {word} {b}" + (f" {word} {c}" if c is not None else "")
    tight = terms.replace(" ", "")
    shapes = (
        "What is {x}?",
        "Calculate {x}.",
        "{x}",
        "{x} =",
        "How much is {x}?",
        "Compute {x}.",
        "What's {x}?",
        "Solve {x}.",
        "What is the result of {x}?",
    )
    if op == "+" and c is None and rng.random() < 0.3:
        shapes = (f"Add {a} and {b}.", f"What is the sum of {a} and {b}?", f"Add {a} to {b}.")
    elif op == "-" and rng.random() < 0.3:
        shapes = (f"Subtract {b} from {a}.", f"What is {a} take away {b}?")
    elif op == "*" and rng.random() < 0.3:
        shapes = (
            f"Multiply {a} by {b}.",
            f"What is the product of {a} and {b}?",
            f"What is {a} x {b}?",
        )
    request = casual(rng.choice(shapes).format(x=rng.choice((terms, terms, said, tight))), rng)
    return dialogue("sums", request, f"{result}", think)


def sum_problem(op: str, rng: random.Random) -> tuple[int, int, int | None, int, str]:
    """Two operands, perhaps a third, the result, and the written-out way to it."""
    if op == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        return a, b, None, a * b, f"{a} times {b} is {a * b}."
    top = rng.choice((9, 20, 50, 99, 99, 999, 9999))
    a, b = rng.randint(0, top), rng.randint(0, top)
    if op == "-":
        a, b = max(a, b), min(a, b)
        if rng.random() < 0.2:
            a, b = rng.choice((10, 100, 1000, 10000)), rng.randint(0, 10)
        return a, b, None, a - b, borrow_steps(a, b)
    if rng.random() < 0.2:
        a, b, c = (rng.randint(0, 20) for _ in range(3))
        return a, b, c, a + b + c, f"{a} + {b} = {a + b}, {a + b} + {c} = {a + b + c}."
    return a, b, None, a + b, carry_steps(a, b)


def change_case(pool: Pool) -> Sample:
    rng = pool.rng
    text = rng.choice((pool.phrase, pool.any_word, pool.sentence, pool.free_text))()
    upper = rng.random() < 0.5
    source = text if upper else text.upper()
    kind = rng.choice(
        ("upper case", "uppercase", "capital letters", "all caps")
        if upper
        else ("lower case", "lowercase", "small letters")
    )
    shapes = (
        "Write '{t}' in {k}.",
        "Convert to {k}: {t}",
        "Put this in {k}: {t}",
        "Change '{t}' to {k}.",
        "{k}: {t}",
        "Make this {k}: {t}",
    )
    return dialogue(
        "case",
        casual(rng.choice(shapes).format(t=source, k=kind), rng),
        text.upper() if upper else text.lower(),
        f"All letters in {kind}.",
    )


def pick_item(pool: Pool) -> Sample:
    rng = pool.rng
    items = items_of(pool, 3, 7)
    ordinals = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
    index = rng.randrange(len(items))
    which = "last" if index == len(items) - 1 and rng.random() < 0.7 else ordinals[index]
    shapes = (
        "What is the {w} item in {t}?",
        "Give me the {w} word of this list: {t}",
        "Which is the {w} of these: {t}?",
        "Say only the {w} item: {t}",
        "Return the {w} element of {t}.",
    )
    return dialogue(
        "pick",
        ask(pool, shapes, w=which, t=", ".join(items)),
        items[index],
        numbered_off(items[: index + 1]),
    )


def extreme(pool: Pool) -> Sample:
    rng = pool.rng
    numbers = list(dict.fromkeys(numbers_of(rng, 2, 6)))
    largest = rng.random() < 0.5
    word = rng.choice(
        ("largest", "biggest", "highest", "maximum")
        if largest
        else ("smallest", "lowest", "minimum")
    )
    shapes = (
        "What is the {w} of {t}?",
        "Which number is the {w}: {t}?",
        "Find the {w} number in {t}.",
        "Give me the {w} value: {t}",
    )
    answer = max(numbers) if largest else min(numbers)
    think = "Sorted: " + ", ".join(map(str, sorted(numbers))) + "."
    return dialogue(
        "pick", ask(pool, shapes, w=word, t=", ".join(map(str, numbers))), f"{answer}", think
    )


def contains(pool: Pool) -> Sample:
    rng = pool.rng
    items = items_of(pool, 2, 6)
    present = rng.random() < 0.5
    wanted = rng.choice(items) if present else pool.any_word()
    present = wanted in items
    shapes = (
        "Is {w} in this list: {t}?",
        "Does the list {t} contain {w}?",
        "Is '{w}' one of {t}?",
        "Check whether {w} is in {t}.",
    )
    answer = f"Yes, {wanted} is in the list." if present else f"No, {wanted} is not in the list."
    return dialogue(
        "pick",
        ask(pool, shapes, w=wanted, t=", ".join(items)),
        answer,
        f"The list has {len(items)} items.",
    )


def extract(pool: Pool) -> Sample:
    rng = pool.rng
    kinds: dict[str, Callable[[], Any]] = {
        "email address": pool.email,
        "date": pool.date,
        "url": pool.url,
        "order number": pool.code,
        "city": pool.city,
        "name": pool.person,
        "file name": pool.filename,
        "price": pool.decimal,
    }
    kind = rng.choice(list(kinds))
    value = str(kinds[kind]())
    lines = {
        "email address": ("Write to {v} before {w}.", "My address is {v}, thanks.", "{n} uses {v} for work."),
        "date": ("We meet on {v} in the {p}.", "The ticket is valid until {v}.", "{n} was born on {v}."),
        "url": ("See {v} for the details.", "The manual is at {v} now.", "{n} sent me {v} yesterday."),
        "order number": ("My order {v} has not arrived.", "{n} asked about order {v} on {w}.", "Order {v} is in the {p}."),
        "city": ("{n} moved to {v} last {w}.", "The train to {v} leaves on {w}.", "We live in {v} near the {p}."),
        "name": ("I spoke with {v} about the {p}.", "The {p} belongs to {v}.", "{v} will call you on {w}."),
        "file name": ("Please open {v} on {w}.", "The report is in {v} now.", "{n} lost the file {v}."),
        "price": ("The lamp costs {v} dollars.", "{n} paid {v} for the {o}.", "It was {v} on {w}."),
    }[kind]  # fmt: skip
    text = rng.choice(lines).format(
        v=value,
        n=pool.word("first_name"),
        w=pool.word("weekday"),
        p=pool.word("place"),
        o=pool.word("object"),
    )
    if rng.random() < 0.4:
        text = (
            rng.choice((f"{pool.sentence()} {text}", f"{text} {pool.sentence()}"))
            if kind not in ("name", "city", "price", "date", "order number")
            else text
        )
    shapes = (
        "Extract the {k} from this text: {t}",
        "Find the {k}: {t}",
        "What is the {k} in this text? {t}",
        "Give me only the {k}: {t}",
        "Which {k} is mentioned here? {t}",
    )
    return dialogue(
        "extract",
        casual(rng.choice(shapes).format(k=kind, t=text), rng),
        value,
        f"I look for the {kind}.",
    )


def replace_word(pool: Pool) -> Sample:
    """Copy a text with one word exchanged: what drafts from the prompt are good at."""
    rng = pool.rng
    text = pool.paragraph() if rng.random() < 0.7 else pool.sentence()
    words = [w.strip(".,") for w in text.split() if len(w.strip(".,")) > 3] or text.split()
    old, new = rng.choice(words), pool.any_word()
    shapes = (
        "Replace '{o}' by '{n}' in this text: {t}",
        "Replace {o} with {n}: {t}",
        "Change {o} to {n} in the following text.\n\n{t}",
        "Rewrite this with '{n}' instead of '{o}': {t}",
        "Swap the word {o} for {n}: {t}",
    )
    return dialogue(
        "replace",
        casual(rng.choice(shapes).format(o=old, n=new, t=text), rng),
        text.replace(old, new),
        f"`{old}` becomes `{new}`.",
    )


JSON_FIELDS = [
    ("name", "person"), ("city", "city"), ("email", "email"), ("age", "int(1,99)"), ("price", "number"),
    ("active", "bool"), ("color", "word"), ("tags", "list(word,1,3)"), ("id", "code"), ("date", "date"),
    ("count", "integer"), ("title", "phrase"), ("status", "status"), ("path", "path"), ("port", "int(1,9999)"),
    ("host", "invented"), ("size", "object(width:int(1,900),height:int(1,900))"), ("owner", "object(name:person,email:email)"),
    ("debug", "bool"), ("timeout", "int(1,600)"), ("language", "language"), ("level", "enum(low,medium,high)"),
    ("scores", "list(int(1,99),1,4)"), ("address", "object(street:street,city:city)"), ("url", "url"),
]  # fmt: skip


def json_object(pool: Pool) -> dict[str, Any]:
    chosen = pool.rng.sample(JSON_FIELDS, pool.rng.randint(2, 6))
    return {key: draw(kind, pool).data for key, kind in chosen}


def dump(data: Any, pretty: bool) -> str:
    return json.dumps(data, ensure_ascii=False, indent=2 if pretty else None)


def edit_json(pool: Pool) -> Sample:
    rng = pool.rng
    data, pretty = json_object(pool), rng.random() < 0.4
    edit = rng.choice(
        (
            change_field,
            change_field,
            change_field,
            change_nested,
            remove_field,
            add_field,
            rename_field,
        )
    )
    order, changed = edit(copy.deepcopy(data), pool)
    shapes = (
        "{o} in this JSON: {t}",
        "{o}: {t}",
        "{o} in the following JSON.\n\n{t}",
        "Here is a JSON object: {t}\n{o}.",
        "{t}\n\n{o}.",
    )
    request = casual(rng.choice(shapes).format(o=order, t=dump(data, pretty)), rng)
    return dialogue("json", request, dump(changed, pretty), f"{order}. The rest stays as it is.")


def change_field(data: dict, pool: Pool) -> tuple[str, dict]:
    rng = pool.rng
    key = rng.choice([k for k in data if not isinstance(data[k], (list, dict))] or list(data))
    value = draw(dict(JSON_FIELDS)[key], pool).data
    data[key] = value
    shown = value if isinstance(value, str) and rng.random() < 0.5 else json.dumps(value)
    return rng.choice(
        (
            f"Change {key} to {shown}",
            f"Set {key} to {shown}",
            f"Set the field {key} to {shown}",
            f"Change the value of {key} to {shown}",
            f"Update {key} to {shown}",
            f"Make {key} {shown}",
        )
    ), data


def change_nested(data: dict, pool: Pool) -> tuple[str, dict]:
    rng = pool.rng
    nested = [k for k in data if isinstance(data[k], dict)]
    if not nested:
        return change_field(data, pool)
    key = rng.choice(nested)
    inner = rng.choice(list(data[key]))
    value = rng.randint(1, 999) if isinstance(data[key][inner], int) else pool.any_word()
    data[key][inner] = value
    return rng.choice(
        (
            f"Set {key}.{inner} to {json.dumps(value)}",
            f"Change the {inner} of {key} to {value}",
            f"Set the {inner} in {key} to {value}",
        )
    ), data


def remove_field(data: dict, pool: Pool) -> tuple[str, dict]:
    key = pool.rng.choice(list(data))
    del data[key]
    return pool.rng.choice(
        (f"Remove {key}", f"Remove the field {key}", f"Delete the key {key}", f"Drop {key}")
    ), data


def add_field(data: dict, pool: Pool) -> tuple[str, dict]:
    rng = pool.rng
    key = rng.choice([k for k, _ in JSON_FIELDS if k not in data])
    value = draw(rng.choice(("word", "integer", "bool", "code")), pool).data
    data[key] = value
    return rng.choice(
        (
            f"Add the field {key} with the value {json.dumps(value)}",
            f"Add {key}: {json.dumps(value)}",
            f"Add a key {key} with value {json.dumps(value)}",
        )
    ), data


def rename_field(data: dict, pool: Pool) -> tuple[str, dict]:
    key, new = pool.rng.choice(list(data)), pool.identifier()
    renamed = {new if k == key else k: v for k, v in data.items()}
    return pool.rng.choice(
        (
            f"Rename the field {key} to {new}",
            f"Rename {key} to {new}",
            f"Rename the key {key} to {new}",
        )
    ), renamed


def make_json(pool: Pool) -> Sample:
    """Put values that a sentence names into a JSON object."""
    rng = pool.rng
    chosen = rng.sample(
        [f for f in JSON_FIELDS if "(" not in f[1] or f[1].startswith("int")], rng.randint(2, 4)
    )
    values = {key: draw(kind, pool) for key, kind in chosen}
    said = join_and(
        [
            f"{key}{rng.choice((' ', ': ', ' = '))}{v.text if v.schema['type'] != 'boolean' else json.dumps(v.data)}"
            for key, v in values.items()
        ],
        rng,
    )
    shapes = (
        "Write this as JSON: {t}",
        "Make a JSON object with {t}.",
        "Convert to JSON: {t}",
        "Give me a JSON object: {t}",
        "JSON for {t}",
    )
    request = casual(rng.choice(shapes).format(t=said), rng)
    return dialogue(
        "json",
        request,
        dump({k: v.data for k, v in values.items()}, False),
        "Keys: " + ", ".join(values) + ".",
    )


def read_json(pool: Pool) -> Sample:
    rng = pool.rng
    data = json_object(pool)
    key = rng.choice(list(data))
    value = data[key]
    shapes = (
        "What is the {k} in this JSON? {t}",
        "Read the field {k}: {t}",
        "Get {k} from {t}",
        "{t}\n\nWhat is the value of {k}?",
        "Which {k} does this have? {t}",
    )
    answer = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return dialogue(
        "json",
        casual(rng.choice(shapes).format(k=key, t=dump(data, rng.random() < 0.3)), rng),
        answer,
        f"The field `{key}`.",
    )


INSTRUCTIONS: list[tuple[float, Callable[[Pool], Sample]]] = [
    (1.6, repeat), (1.2, make_list), (1.0, sort_words), (0.8, sort_numbers), (1.4, reverse), (0.5, spell),
    (1.8, count), (1.6, sums), (0.6, change_case), (0.5, pick_item), (0.4, extreme), (0.4, contains),
    (0.8, extract), (1.2, replace_word), (1.8, edit_json), (0.5, make_json), (0.4, read_json),
]  # fmt: skip
