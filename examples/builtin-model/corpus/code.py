"""Python tasks: write a small function from a description, rename, edit, explain.

`FUNCTIONS` lists `name(params) | what it does; another wording | body`. A body line starts after
`/`, one leading `>` per extra level of indentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .sample import Sample, casual, dialogue
from .words import Pool

FUNCTIONS = """
reverse_string(text) | reverses a string; returns a string backwards; takes a string and reverses it; turns a string around; reverses text | return text[::-1]
reverse_list(items) | reverses a list; returns a list in reverse order; returns the items of a list backwards | return items[::-1]
is_palindrome(text) | checks if a string is a palindrome; tests whether a word is a palindrome; says if a text reads the same backwards; detects palindromes | text = text.lower() / return text == text[::-1]
factorial(n) | computes the factorial of a number; returns n factorial; calculates factorials; computes n! | result = 1 / for i in range(2, n + 1): / > result *= i / return result
fibonacci(n) | returns the nth Fibonacci number; computes Fibonacci numbers; calculates the nth number of the Fibonacci sequence; computes fibonacci | a, b = 0, 1 / for _ in range(n): / > a, b = b, a + b / return a
factorial_recursive(n) | computes the factorial recursively; computes n factorial with recursion; calculates a factorial with a recursive function | if n < 2: / > return 1 / return n * factorial_recursive(n - 1)
fibonacci_recursive(n) | computes the nth Fibonacci number recursively; computes Fibonacci numbers with recursion; calculates fibonacci recursively | if n < 2: / > return n / return fibonacci_recursive(n - 1) + fibonacci_recursive(n - 2)
sum_recursive(items) | sums a list recursively; adds up a list with recursion | if not items: / > return 0 / return items[0] + sum_recursive(items[1:])
reverse_recursive(text) | reverses a string recursively; reverses a string with recursion | if not text: / > return "" / return reverse_recursive(text[1:]) + text[0]
reverse_words(text) | reverses the order of the words in a string; reverses the words of a sentence | return " ".join(text.split()[::-1])
count_char(text, char) | counts how often a character occurs in a string; counts a letter in a string | return text.count(char)
common_letters(a, b) | returns the letters that two words share; finds the common letters of two strings | return set(a) & set(b)
is_prime(n) | checks if a number is prime; tests whether a number is a prime; says if n is a prime number; detects prime numbers | if n < 2: / > return False / for i in range(2, int(n ** 0.5) + 1): / > if n % i == 0: / > > return False / return True
is_even(n) | checks if a number is even; returns True for even numbers; tests if n is even | return n % 2 == 0
is_odd(n) | checks if a number is odd; returns True for odd numbers; tests if n is odd | return n % 2 == 1
add(a, b) | adds two numbers; returns the sum of two numbers; sums a and b; adds a and b | return a + b
subtract(a, b) | subtracts two numbers; returns the difference of two numbers; subtracts b from a | return a - b
multiply(a, b) | multiplies two numbers; returns the product of two numbers; multiplies a by b | return a * b
divide(a, b) | divides two numbers; divides a by b; divides two numbers safely | if b == 0: / > raise ValueError("division by zero") / return a / b
power(base, exponent) | raises a number to a power; computes a power; returns base to the exponent | return base ** exponent
square(x) | squares a number; returns the square of a number; computes x squared | return x * x
cube(x) | cubes a number; returns the cube of a number | return x ** 3
absolute(x) | returns the absolute value of a number; computes the absolute value | return -x if x < 0 else x
average(numbers) | computes the average of a list; returns the mean of a list of numbers; calculates the average of numbers; computes the mean | return sum(numbers) / len(numbers)
median(numbers) | computes the median of a list; returns the median of numbers; finds the median | ordered = sorted(numbers) / middle = len(ordered) // 2 / if len(ordered) % 2: / > return ordered[middle] / return (ordered[middle - 1] + ordered[middle]) / 2
mode(items) | returns the most common item of a list; finds the most frequent element; computes the mode | return max(set(items), key=items.count)
sum_list(numbers) | sums a list of numbers; returns the sum of a list; adds up all numbers in a list; computes the total of a list | total = 0 / for number in numbers: / > total += number / return total
product(numbers) | multiplies all numbers in a list; returns the product of a list | result = 1 / for number in numbers: / > result *= number / return result
largest(numbers) | returns the largest number in a list; finds the maximum of a list; finds the biggest number; returns the maximum | result = numbers[0] / for number in numbers: / > if number > result: / > > result = number / return result
smallest(numbers) | returns the smallest number in a list; finds the minimum of a list; returns the minimum | result = numbers[0] / for number in numbers: / > if number < result: / > > result = number / return result
second_largest(numbers) | returns the second largest number in a list; finds the second biggest number | return sorted(set(numbers))[-2]
count_vowels(text) | counts the vowels in a string; returns the number of vowels; counts vowels | return sum(1 for char in text.lower() if char in "aeiou")
count_consonants(text) | counts the consonants in a string; returns the number of consonants | return sum(1 for char in text.lower() if char.isalpha() and char not in "aeiou")
count_words(text) | counts the words in a string; returns the number of words in a text; counts words | return len(text.split())
count_lines(text) | counts the lines of a text; returns the number of lines in a string | return len(text.splitlines())
count_letters(text) | counts how often each letter occurs; counts the letters of a string; returns a dictionary of letter counts | counts = {} / for char in text: / > counts[char] = counts.get(char, 0) + 1 / return counts
word_counts(text) | counts how often each word occurs; returns a dictionary of word counts; counts word frequencies | counts = {} / for word in text.split(): / > counts[word] = counts.get(word, 0) + 1 / return counts
remove_duplicates(items) | removes duplicates from a list; returns the unique items of a list; keeps each item once | return list(dict.fromkeys(items))
remove_vowels(text) | removes the vowels from a string; returns a string without vowels | return "".join(char for char in text if char.lower() not in "aeiou")
remove_spaces(text) | removes all spaces from a string; returns a string without spaces | return text.replace(" ", "")
remove_digits(text) | removes all digits from a string; returns a string without digits | return "".join(char for char in text if not char.isdigit())
remove_empty(items) | removes empty strings from a list; drops the empty items of a list | return [item for item in items if item]
capitalize_words(text) | capitalizes every word; capitalizes the first letter of each word; converts a string to title case | return " ".join(word.capitalize() for word in text.split())
to_upper(text) | converts a string to upper case; makes a string uppercase; returns a string in capital letters | return text.upper()
to_lower(text) | converts a string to lower case; makes a string lowercase | return text.lower()
swap_case(text) | swaps the case of all letters; changes upper case to lower case and back | return text.swapcase()
first_item(items) | returns the first item of a list; gets the first element | return items[0]
last_item(items) | returns the last item of a list; gets the last element | return items[-1]
middle_item(items) | returns the middle item of a list; gets the middle element | return items[len(items) // 2]
is_empty(items) | checks if a list is empty; tests whether a list has no items | return len(items) == 0
contains(items, value) | checks if a list contains a value; tests whether a value is in a list | return value in items
index_of(items, value) | returns the index of a value in a list; finds the position of a value, or -1 | for i, item in enumerate(items): / > if item == value: / > > return i / return -1
flatten(lists) | flattens a list of lists; turns nested lists into one list; joins a list of lists | return [item for sub in lists for item in sub]
chunk(items, size) | splits a list into chunks; divides a list into pieces of a given size; cuts a list into groups | return [items[i:i + size] for i in range(0, len(items), size)]
merge_dicts(a, b) | merges two dictionaries; combines two dicts; joins two dictionaries | return {**a, **b}
invert_dict(data) | swaps the keys and values of a dictionary; inverts a dictionary | return {value: key for key, value in data.items()}
sort_list(items) | sorts a list; returns a sorted list; sorts a list in ascending order | return sorted(items)
sort_descending(items) | sorts a list in descending order; sorts from largest to smallest | return sorted(items, reverse=True)
sort_by_length(words) | sorts words by length; orders a list of strings by their length | return sorted(words, key=len)
bubble_sort(items) | sorts a list with bubble sort; implements bubble sort | items = list(items) / for i in range(len(items)): / > for j in range(len(items) - 1 - i): / > > if items[j] > items[j + 1]: / > > > items[j], items[j + 1] = items[j + 1], items[j] / return items
quick_sort(items) | sorts a list with quicksort; implements quicksort; implements quick sort | if len(items) < 2: / > return items / pivot, *rest = items / left = [x for x in rest if x < pivot] / right = [x for x in rest if x >= pivot] / return quick_sort(left) + [pivot] + quick_sort(right)
binary_search(items, target) | searches a sorted list with binary search; implements binary search; finds a target in a sorted list | low, high = 0, len(items) - 1 / while low <= high: / > middle = (low + high) // 2 / > if items[middle] == target: / > > return middle / > if items[middle] < target: / > > low = middle + 1 / > else: / > > high = middle - 1 / return -1
linear_search(items, target) | searches a list with linear search; implements linear search | for i, item in enumerate(items): / > if item == target: / > > return i / return -1
gcd(a, b) | computes the greatest common divisor; returns the gcd of two numbers; finds the greatest common divisor of two numbers | while b: / > a, b = b, a % b / return a
lcm(a, b) | computes the least common multiple; returns the lcm of two numbers | x, y = a, b / while y: / > x, y = y, x % y / return a * b // x
fizzbuzz(n) | prints FizzBuzz up to n; implements FizzBuzz; plays fizz buzz | for i in range(1, n + 1): / > if i % 15 == 0: / > > print("FizzBuzz") / > elif i % 3 == 0: / > > print("Fizz") / > elif i % 5 == 0: / > > print("Buzz") / > else: / > > print(i)
celsius_to_fahrenheit(celsius) | converts Celsius to Fahrenheit; turns a Celsius temperature into Fahrenheit | return celsius * 9 / 5 + 32
fahrenheit_to_celsius(fahrenheit) | converts Fahrenheit to Celsius; turns a Fahrenheit temperature into Celsius | return (fahrenheit - 32) * 5 / 9
km_to_miles(km) | converts kilometers to miles | return km * 0.621371
miles_to_km(miles) | converts miles to kilometers | return miles * 1.609344
circle_area(radius) | computes the area of a circle; returns the area of a circle | return 3.141592653589793 * radius ** 2
rectangle_area(width, height) | computes the area of a rectangle; returns the area of a rectangle | return width * height
triangle_area(base, height) | computes the area of a triangle; returns the area of a triangle | return base * height / 2
distance(x1, y1, x2, y2) | computes the distance between two points; returns the distance of two points | return ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
is_leap_year(year) | checks if a year is a leap year; tests for leap years | return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
sum_digits(n) | sums the digits of a number; returns the sum of the digits | return sum(int(digit) for digit in str(n))
count_digits(n) | counts the digits of a number; returns the number of digits | return len(str(abs(n)))
reverse_number(n) | reverses the digits of a number; turns a number around | return int(str(n)[::-1])
to_binary(n) | converts a number to binary; returns the binary form of a number | return bin(n)[2:]
from_binary(text) | converts a binary string to a number; parses a binary number | return int(text, 2)
clamp(value, low, high) | clamps a value between two limits; limits a number to a range | return max(low, min(value, high))
is_anagram(a, b) | checks if two words are anagrams; tests whether two strings are anagrams | return sorted(a) == sorted(b)
longest_word(text) | returns the longest word in a string; finds the longest word in a sentence | return max(text.split(), key=len)
shortest_word(text) | returns the shortest word in a string; finds the shortest word | return min(text.split(), key=len)
greet(name) | greets a person; prints a greeting; returns a greeting for a name; says hello to someone | return f"Hello, {name}!"
repeat_string(text, times) | repeats a string a number of times; returns a string n times | return text * times
starts_with(text, prefix) | checks if a string starts with a prefix | return text.startswith(prefix)
ends_with(text, suffix) | checks if a string ends with a suffix | return text.endswith(suffix)
join_words(words) | joins a list of words with spaces; turns a list of words into a sentence | return " ".join(words)
split_words(text) | splits a string into words; returns the words of a text | return text.split()
even_numbers(numbers) | returns the even numbers of a list; filters even numbers; keeps only even numbers | return [n for n in numbers if n % 2 == 0]
odd_numbers(numbers) | returns the odd numbers of a list; filters odd numbers; keeps only odd numbers | return [n for n in numbers if n % 2 == 1]
positive_numbers(numbers) | returns the positive numbers of a list; filters positive numbers | return [n for n in numbers if n > 0]
squares(n) | returns a list of the first n squares; makes a list of squares up to n | return [i * i for i in range(1, n + 1)]
double_all(numbers) | doubles every number in a list; multiplies each number by two | return [2 * n for n in numbers]
running_total(numbers) | returns the running total of a list; computes cumulative sums | total, result = 0, [] / for number in numbers: / > total += number / > result.append(total) / return result
transpose(matrix) | transposes a matrix; swaps rows and columns | return [list(row) for row in zip(*matrix)]
intersection(a, b) | returns the common items of two lists; computes the intersection of two lists | return [item for item in a if item in b]
union(a, b) | returns the union of two lists; combines two lists without duplicates | return list(dict.fromkeys(a + b))
difference(a, b) | returns the items of a that are not in b; computes the difference of two lists | return [item for item in a if item not in b]
rotate(items, k) | rotates a list by k places; rotates a list | k %= len(items) / return items[k:] + items[:k]
zip_to_dict(keys, values) | makes a dictionary from two lists; combines keys and values into a dictionary | return dict(zip(keys, values))
group_by_length(words) | groups words by their length | groups = {} / for word in words: / > groups.setdefault(len(word), []).append(word) / return groups
caesar(text, shift) | encrypts text with a Caesar cipher; implements the Caesar cipher | result = [] / for char in text: / > if char.isalpha(): / > > start = ord("a") if char.islower() else ord("A") / > > char = chr((ord(char) - start + shift) % 26 + start) / > result.append(char) / return "".join(result)
read_file(path) | reads a file; returns the contents of a file; reads a text file | with open(path) as file: / > return file.read()
read_lines(path) | reads the lines of a file; returns a list of the lines in a file | with open(path) as file: / > return file.read().splitlines()
write_file(path, text) | writes text to a file; saves a string in a file | with open(path, "w") as file: / > file.write(text)
read_json(path) | reads a JSON file; loads JSON from a file | import json / with open(path) as file: / > return json.load(file)
write_json(path, data) | writes data to a JSON file; saves a dictionary as JSON | import json / with open(path, "w") as file: / > json.dump(data, file)
factors(n) | returns the factors of a number; lists all divisors of n; finds the divisors of a number | return [i for i in range(1, n + 1) if n % i == 0]
primes_up_to(n) | returns all primes up to n; lists the prime numbers up to a limit | primes = [] / for i in range(2, n + 1): / > if all(i % p for p in primes): / > > primes.append(i) / return primes
collatz(n) | returns the Collatz sequence of a number; computes the Collatz steps | steps = [n] / while n != 1: / > n = n // 2 if n % 2 == 0 else 3 * n + 1 / > steps.append(n) / return steps
swap(a, b) | swaps two values; returns two values in swapped order | return b, a
is_sorted(items) | checks if a list is sorted; tests whether a list is in order | return items == sorted(items)
all_equal(items) | checks if all items of a list are equal; tests whether all elements are the same | return len(set(items)) <= 1
has_duplicates(items) | checks if a list has duplicates; tests whether an item occurs twice | return len(set(items)) < len(items)
truncate(text, length) | shortens a string to a length; truncates a text | return text if len(text) <= length else text[:length] + "..."
initials(name) | returns the initials of a name; gets the first letters of a name | return "".join(part[0].upper() for part in name.split())
slugify(text) | turns a title into a slug; makes a string safe for a URL | return "-".join(text.lower().split())
is_number(text) | checks if a string is a number; tests whether a text is numeric | try: / > float(text) / > return True / except ValueError: / > return False
random_item(items) | returns a random item of a list; picks a random element | import random / return random.choice(items)
random_number(low, high) | returns a random number in a range; picks a random integer | import random / return random.randint(low, high)
today() | returns the date of today; gets the current date | from datetime import date / return date.today()
current_time() | returns the current time | from datetime import datetime / return datetime.now()
countdown(n) | counts down from n; prints a countdown | while n > 0: / > print(n) / > n -= 1
print_items(items) | prints every item of a list; prints a list line by line | for item in items: / > print(item)
hello() | prints hello world; says hello | print("Hello, world!")
max_of_three(a, b, c) | returns the largest of three numbers; finds the maximum of three values | return max(a, b, c)
min_of_two(a, b) | returns the smaller of two numbers | return a if a < b else b
max_of_two(a, b) | returns the larger of two numbers | return a if a > b else b
percentage(part, whole) | computes a percentage; returns how many percent part is of whole | return 100 * part / whole
is_digits(text) | checks if a string contains only digits; tests whether a string has only digits; says if all characters are digits | return text.isdigit()
is_letters(text) | checks if a string contains only letters; tests whether a string has only letters | return text.isalpha()
count_word(text, word) | counts how often a word occurs in a text; counts how many times a word appears in a text | return text.split().count(word)
count_value(items, value) | counts how often a value occurs in a list; counts an item in a list | return items.count(value)
print_sum(a, b) | adds two numbers and prints the result; prints the sum of two numbers | print(a + b)
print_reversed(text) | prints a string backwards; prints the reverse of a string | print(text[::-1])
length(text) | returns the length of a string; counts the characters of a string | return len(text)
is_positive(n) | checks if a number is positive; tests whether a number is greater than zero | return n > 0
is_negative(n) | checks if a number is negative; tests whether a number is below zero | return n < 0
is_vowel(char) | checks if a letter is a vowel; tests whether a character is a vowel | return char.lower() in "aeiou"
is_divisible(a, b) | checks if a number is divisible by another; tests whether a is divisible by b | return a % b == 0
remove_item(items, value) | removes a value from a list; removes all copies of a value from a list | return [item for item in items if item != value]
replace_spaces(text) | replaces spaces with underscores; turns the spaces of a string into underscores | return text.replace(" ", "_")
first_letter(text) | returns the first letter of a string; gets the first character of a string | return text[0]
last_letter(text) | returns the last letter of a string; gets the last character of a string | return text[-1]
sum_to(n) | sums the numbers from 1 to n; returns the sum of the first n numbers | return n * (n + 1) // 2
sum_squares(numbers) | sums the squares of a list; returns the sum of squares of numbers | return sum(n * n for n in numbers)
numbers_to(n) | returns a list of the numbers from 1 to n; lists the numbers up to n | return list(range(1, n + 1))
print_numbers(n) | prints the numbers from 1 to n; prints all numbers up to n | for i in range(1, n + 1): / > print(i)
range_of(numbers) | returns the range of a list of numbers; computes the difference of the largest and the smallest number | return max(numbers) - min(numbers)
average_length(words) | computes the average length of words; returns the mean word length | return sum(len(word) for word in words) / len(words)
long_words(words, length) | returns the words longer than a length; filters words by length | return [word for word in words if len(word) > length]
shuffle(items) | shuffles a list; returns a list in random order | import random / return random.sample(items, len(items))
dict_keys(data) | returns the keys of a dictionary; lists the keys of a dictionary | return list(data.keys())
dict_values(data) | returns the values of a dictionary; lists the values of a dictionary | return list(data.values())
sort_dict(data) | sorts a dictionary by its keys; orders a dictionary by key | return dict(sorted(data.items()))
file_exists(path) | checks if a file exists; tests whether a path exists | import os / return os.path.exists(path)
append_line(path, line) | appends a line to a file; adds a line to the end of a file | with open(path, "a") as file: / > file.write(line + "\\n")
to_int(text) | converts a string to an integer; parses an integer | return int(text)
to_string(value) | converts a value to a string; turns a number into a string | return str(value)
hypotenuse(a, b) | computes the hypotenuse of a triangle; applies the Pythagorean theorem | return (a ** 2 + b ** 2) ** 0.5
"""


@dataclass(frozen=True)
class Function:
    name: str
    params: tuple[str, ...]
    tasks: tuple[str, ...]
    body: tuple[str, ...]

    def source(self, name: str | None = None) -> str:
        """The function as text, with its lines indented by four spaces."""
        name = name or self.name
        lines = [re.sub(rf"\b{self.name}\(", f"{name}(", line) for line in self.body]
        return "\n".join(
            [f"def {name}({', '.join(self.params)}):", *("    " + line for line in lines)]
        )


def _body_line(text: str) -> str:
    depth = 0
    while text.startswith("> "):
        text, depth = text[2:], depth + 1
    return "    " * depth + text


def _parse(line: str) -> Function:
    head, tasks, body = line.split(" | ", 2)
    name, params = head[:-1].split("(")
    # A blank-slash-blank ends a line of the body, except in an arithmetic division.
    lines = re.split(
        r" / (?=return\b|for\b|while\b|if\b|elif\b|else:|except\b|with\b|try:|>|[a-z_]+(?:, [*a-z_]+)* %?=|[a-z_]+\()",
        body,
    )
    return Function(
        name,
        tuple(filter(None, params.split(", "))),
        tuple(tasks.split("; ")),
        tuple(map(_body_line, lines)),
    )


LIBRARY: tuple[Function, ...] = tuple(map(_parse, FUNCTIONS.strip().splitlines()))

# Functions put together from a filter, a change and a summary: too many to learn by heart.
FILTERS = [
    ("", ""), ("even", "n % 2 == 0"), ("odd", "n % 2 == 1"), ("positive", "n > 0"), ("negative", "n < 0"),
    ("nonzero", "n != 0"), ("above", "n > {k}"), ("below", "n < {k}"), ("divisible", "n % {k} == 0"),
]  # fmt: skip
FILTER_WORDS = {
    "above": "greater than {k}",
    "below": "less than {k}",
    "divisible": "divisible by {k}",
}
CHANGES = [
    ("", "n"), ("the squares of", "n * n"), ("the cubes of", "n ** 3"), ("the doubles of", "2 * n"),
    ("the halves of", "n / 2"), ("the absolute values of", "abs(n)"),
]  # fmt: skip
SUMMARIES = [
    ("returns the sum of", "sum({g})"), ("counts", "sum(1 {f})"), ("returns the largest of", "max({g})"),
    ("returns the smallest of", "min({g})"), ("returns a list of", "[{g}]"), ("returns a sorted list of", "sorted({g})"),
    ("returns the set of", "{{{g}}}"),
]  # fmt: skip


def composed(pool: Pool) -> tuple[str, str, str]:
    """(what it does, name, source) of a function over a list of numbers."""
    rng = pool.rng
    (kind, condition), (change, element), (does, form) = (
        rng.choice(FILTERS),
        rng.choice(CHANGES),
        rng.choice(SUMMARIES),
    )
    k = rng.randint(2, 100)
    if does == "counts":
        change, element = "", "n"
    noun = (
        f"numbers {FILTER_WORDS[kind].format(k=k)}"
        if kind in FILTER_WORDS
        else f"{kind} numbers".strip()
    )
    loop = "for n in numbers" + (f" if {condition.format(k=k)}" if condition else "")
    expression = form.format(g=f"{element} {loop}", f=loop)
    words = {
        "returns the sum of": "sum",
        "counts": "count",
        "returns the largest of": "largest",
        "returns the smallest of": "smallest",
    }
    stem = [words.get(does, "list"), *(change.split()[1:2]), *([kind] if kind else [])]
    task = " ".join(f"{does} {change} the {noun} in a list".split()).replace(
        "of the squares of the", "of the squares of the"
    )
    name = "_".join(stem)
    return task, name, f"def {name}(numbers):\n    return {expression}"


ASKS = (
    "Write a Python function that {t}.", "Write a function that {t}.", "Write a function in Python that {t}.",
    "Python function that {t}.", "Write a small Python function that {t}.", "I need a Python function that {t}.",
    "Give me a Python function that {t}.", "Create a function that {t}.", "Show me a function that {t}.",
    "Can you write a Python function that {t}?", "Could you write a function that {t}?", "Code a function that {t}.",
    "Please write a Python function which {t}.", "Write Python code that {t}.", "Implement a function that {t}.",
    "Write a simple Python function that {t}.", "Write a short function that {t}.", "Write a program that {t}.", "Write code that {t}.",
    "How do I write a function that {t}?", "Write me a function that {t}.", "Make a Python function that {t}.", "Define a function that {t}.",
    "Write some Python that {t}.", "Write a Python script that {t}.", "python function that {t}", "function that {t}", "Give me a function that {t}.",
    "Write a tiny Python function that {t}.", "Write, in Python, a function that {t}.", "I want a function that {t}.", "In Python, write a function that {t}.",
)  # fmt: skip
NAMED_ASKS = (
    "Write a Python function {n} that {t}.", "Write a function called {n} that {t}.", "Write a function `{n}` that {t}.",
    "Define {n}, a function that {t}.", "Implement {n}: it {t}.", "Create a Python function named {n} that {t}.",
    "Write the function {n}. It {t}.", "Write {n}({p}), which {t}.",
)  # fmt: skip


def infinitive(task: str) -> str:
    """`reverses a string` -> `reverse a string`."""
    first, _, rest = task.partition(" ")
    if first in ("is", "has"):
        return task
    for ending, base in (
        ("ches", "ch"),
        ("shes", "sh"),
        ("sses", "ss"),
        ("ies", "y"),
        ("xes", "x"),
    ):
        if first.endswith(ending):
            return f"{first[: -len(ending)]}{base} {rest}".strip()
    return f"{first[:-1] if first.endswith('s') else first} {rest}".strip()


TO_ASKS = (
    "Write a Python function to {t}.", "Write a function to {t}.", "Python function to {t}", "How do I {t} in Python?",
    "How can I {t} in Python?", "I want to {t} in Python.", "Show me how to {t} in Python.", "Python code to {t}", "{t} in Python",
    "Give me code to {t}.", "Help me {t} in Python.", "Write Python code to {t}.", "Write a Python script to {t}.", "python {t}", "Write code to {t}.", "function to {t}",
    "Implement a function to {t}.", "Can you write a function to {t}?", "I need a function to {t}.", "Write a program to {t}.", "Create a Python function to {t}.",
)  # fmt: skip


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


def write_function(pool: Pool) -> Sample:
    rng = pool.rng
    if rng.random() < 0.2:
        task, name, source = composed(pool)
        request = rng.choice(ASKS).format(t=task)
        return dialogue("code", casual(request, rng), fenced(source), f"The function is `{name}`.")
    function = rng.choice(LIBRARY)
    task = rng.choice(function.tasks)
    name = function.name
    roll = rng.random()
    if roll < 0.45:
        request = rng.choice(ASKS).format(t=task)
    elif roll < 0.7:
        request = rng.choice(TO_ASKS).format(t=infinitive(task))
    else:
        name = rng.choice((name, pool.identifier(), f"{pool.invented()}_{name}", f"my_{name}"))
        request = rng.choice(NAMED_ASKS).format(t=task, n=name, p=", ".join(function.params))
    return dialogue(
        "code", casual(request, rng), fenced(function.source(name)), f"The function is `{name}`."
    )


def rename_variable(pool: Pool) -> Sample:
    """Copy a function with one name exchanged."""
    rng = pool.rng
    source = snippet(pool)
    unquoted = re.sub(r'"[^"]*"', "", source)
    names = [
        w for w in dict.fromkeys(re.findall(r"\b[a-z_][a-z_0-9]*\b", unquoted)) if w not in RESERVED
    ]
    if not names:
        return rename_variable(pool)
    old, new = rng.choice(names), pool.identifier()
    shapes = (
        "Rename {o} to {n} in this code:\n\n{c}", "Rename the variable {o} to {n}:\n{c}", "Change the name {o} to {n} in this code.\n\n{c}",
        "{c}\n\nRename {o} to {n}.", "In this code, rename `{o}` to `{n}`.\n\n{c}", "Replace the name {o} by {n}:\n\n{c}",
    )  # fmt: skip
    shown = fenced(source) if rng.random() < 0.7 else source
    changed = re.sub(rf"\b{old}\b", new, source)
    request = casual(rng.choice(shapes).format(o=old, n=new, c=shown), rng)
    return dialogue("rename", request, fenced(changed), f"`{old}` becomes `{new}`.")


RESERVED = frozenset(
    "def return for in if else elif while not and or import from with as try except raise range len print sum max min sorted set list dict str int abs zip open float bool lower upper split join append items get key reverse python enumerate lambda class pass break is none all any count bin ord chr isalpha isdigit islower replace capitalize read write index update pop add self".split()
)


SHORT_NAMES = "a b c d e f g h j k m n p q r s t u v w x y z".split()


def snippet(pool: Pool) -> str:
    """A library function whose names are partly invented, or a few lines of a script."""
    rng = pool.rng
    if rng.random() < 0.3:
        return script(pool)
    function = rng.choice(LIBRARY)
    source = function.source(rng.choice((function.name, pool.identifier())))
    for param in function.params:
        if rng.random() < 0.6:
            name = rng.choice(SHORT_NAMES) if rng.random() < 0.25 else pool.identifier()
            if name not in source.split("(", 1)[1]:
                source = re.sub(rf"\b{param}\b", name, source)
    return source


def script(pool: Pool) -> str:
    rng = pool.rng
    a, b, c = (
        rng.sample(SHORT_NAMES, 3) if rng.random() < 0.2 else (pool.identifier() for _ in range(3))
    )
    shapes = (
        f"def {a}({b}):\n    return {b} {rng.choice('+-*')} {rng.randint(1, 99)}",
        f"{a} = {rng.randint(1, 99)}\n{b} = {rng.randint(1, 99)}\nprint({a} + {b})",
        f"{a} = [{rng.randint(1, 9)}, {rng.randint(1, 9)}, {rng.randint(1, 9)}]\nfor {b} in {a}:\n    print({b} * {rng.randint(2, 9)})",
        f'{a} = input("{pool.any_word()}: ")\nif {a} == "{pool.any_word()}":\n    print("{pool.any_word()}")\nelse:\n    print({a})',
        f"def {a}({b}, {c}={rng.randint(0, 9)}):\n    return {b} + {c}\n\nprint({a}({rng.randint(1, 99)}))",
        f"class {a.title().replace('_', '')}:\n    def __init__(self, {b}):\n        self.{b} = {b}\n\n    def {c}(self):\n        return self.{b}",
        f'{a} = {{}}\n{a}["{pool.any_word()}"] = {rng.randint(1, 99)}\nfor {b}, {c} in {a}.items():\n    print({b}, {c})',
        f'with open("{pool.filename()}") as {a}:\n    {b} = {a}.read()\n{c} = {b}.splitlines()\nprint(len({c}))',
    )
    return rng.choice(shapes)


def write_class(pool: Pool) -> Sample:
    rng = pool.rng
    name = rng.choice((pool.word("noun"), pool.word("animal"), pool.invented())).capitalize()
    fields = list(
        dict.fromkeys(
            pool.identifier()
            if rng.random() < 0.4
            else rng.choice("name age size color price title owner count x y width height".split())
            for _ in range(rng.randint(1, 4))
        )
    )
    listed = ", ".join(fields[:-1]) + (" and " if len(fields) > 1 else "") + fields[-1]
    shapes = (
        "Write a Python class {n} with {f}.",
        "Write a class {n} with the attributes {f}.",
        "Create a class called {n} that has {f}.",
        "Define a Python class {n} with the fields {f}.",
    )
    lines = [
        f"class {name}:",
        f"    def __init__(self, {', '.join(fields)}):",
        *(f"        self.{f} = {f}" for f in fields),
    ]
    return dialogue(
        "code",
        casual(rng.choice(shapes).format(n=name, f=listed), rng),
        fenced("\n".join(lines)),
        f"The class is `{name}`.",
    )


def write_loop(pool: Pool) -> Sample:
    rng = pool.rng
    a, b = rng.randint(0, 10), rng.randint(11, 100)
    word = pool.any_word()
    pairs = (
        (f"prints the numbers from {a} to {b}", f"for i in range({a}, {b + 1}):\n    print(i)"),
        (f"prints '{word}' {b} times", f'for _ in range({b}):\n    print("{word}")'),
        (
            f"prints the even numbers from {a} to {b}",
            f"for i in range({a}, {b + 1}):\n    if i % 2 == 0:\n        print(i)",
        ),
        (f"prints the squares from {a} to {b}", f"for i in range({a}, {b + 1}):\n    print(i * i)"),
        (f"adds the numbers from {a} to {b}", f"print(sum(range({a}, {b + 1})))"),
        (f"prints '{word}'", f'print("{word}")'),
    )
    task, source = rng.choice(pairs)
    shapes = (
        "Write a Python loop that {t}.",
        "Write Python code that {t}.",
        "Write a short script that {t}.",
        "Write a Python program that {t}.",
    )
    return dialogue(
        "code",
        casual(rng.choice(shapes).format(t=task), rng),
        fenced(source),
        "A few lines are enough.",
    )


def explain(pool: Pool) -> Sample:
    rng = pool.rng
    function = rng.choice(LIBRARY)
    name = rng.choice((function.name, pool.identifier()))
    shapes = (
        "What does this function do?\n\n{c}",
        "Explain this code:\n\n{c}",
        "{c}\n\nWhat does it do?",
        "Describe this function.\n\n{c}",
        "What is this code for?\n{c}",
    )
    request = rng.choice(shapes).format(c=fenced(function.source(name)))
    return dialogue(
        "explain",
        casual(request, rng),
        f"`{name}` {function.tasks[0]}.",
        "I read the body of the function.",
    )


def add_docstring(pool: Pool) -> Sample:
    rng = pool.rng
    function = rng.choice(LIBRARY)
    source = function.source(rng.choice((function.name, pool.identifier())))
    head, rest = source.split("\n", 1)
    text = function.tasks[0]
    doc = f'    """{text[0].upper()}{text[1:]}."""'
    shapes = (
        "Add a docstring to this function:\n\n{c}",
        "Add a docstring.\n\n{c}",
        "{c}\n\nAdd a docstring.",
        "Document this function:\n{c}",
    )
    request = casual(rng.choice(shapes).format(c=fenced(source)), rng)
    return dialogue(
        "edit-code",
        request,
        fenced("\n".join([head, doc, rest])),
        "I add one line below the first.",
    )


CODE: list[tuple[float, Callable[[Pool], Sample]]] = [
    (3.0, write_function), (1.6, rename_variable), (0.4, write_class), (0.4, write_loop), (0.4, explain), (0.4, add_docstring),
]  # fmt: skip
