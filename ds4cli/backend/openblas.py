"""OpenBLAS out of the `scipy-openblas32` wheel, for MLX.

Its names begin with `scipy_`, so that it can be loaded beside another OpenBLAS; MLX asks for the
plain ones. So a copy in memory is loaded in which the functions that MLX multiplies with have
those: a name in an ELF file is an offset into a table of strings, where `cblas_sgemm` stands
inside `scipy_cblas_sgemm`. What finds names by their hash is made anew.
"""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Sequence
from pathlib import Path

FILE = "libscipy_openblas.so"
PREFIX = b"scipy_"
# All that MLX multiplies with.
NAMES = (b"cblas_sgemm", b"cblas_dgemm", b"cblas_cgemm")

_DYNSYM, _GNU_HASH = 11, 0x6FFFFFF6  # kinds of sections
_SYMBOL_BYTES = 24
_WORD_BITS = 64


def installed() -> Path | None:
    """The wheel's library, where it is installed."""
    found = importlib.util.find_spec("scipy_openblas32")
    folder = next(iter(found.submodule_search_locations or ()), None) if found else None
    path = Path(folder, "lib", FILE) if folder else None
    return path if path is not None and path.is_file() else None


def in_memory(path: Path, names: Sequence[bytes] = NAMES) -> str:
    """A path to load a copy of the library by, in which `names` stand without `PREFIX`.

    OSError or ValueError where it is no library of this form.
    """
    data = bytearray(path.read_bytes())
    _drop_prefixes(data, names)
    descriptor = os.memfd_create(path.name)
    with open(descriptor, "wb", closefd=False) as copy:
        copy.write(data)
    return f"/proc/self/fd/{descriptor}"


def _drop_prefixes(data: bytearray, names: Sequence[bytes]) -> None:
    try:
        symbols, strings, hashes = _sections(data)
        _rename(data, symbols, strings, hashes, names)
    except (struct.error, StopIteration, IndexError) as error:
        raise ValueError(f"a library of another form: {error!r}") from None


def _sections(data: bytearray) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Where symbols are, in bytes, and how many bytes they take; where their strings are; where
    their hashes are."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no library for a 64-bit little-endian Linux")
    (table,), (size, count) = (
        struct.unpack_from("<Q", data, 40),
        struct.unpack_from("<HH", data, 58),
    )
    sections = [struct.unpack_from("<IIQQQQI", data, table + i * size) for i in range(count)]
    symbols = next(section for section in sections if section[1] == _DYNSYM)
    hashes = next(section for section in sections if section[1] == _GNU_HASH)
    return (symbols[4], symbols[5]), sections[symbols[6]][4], (hashes[4], hashes[5])


def _rename(
    data: bytearray,
    symbols: tuple[int, int],
    strings: int,
    hashes: tuple[int, int],
    names: Sequence[bytes],
) -> None:
    at, room = hashes
    buckets, first, words, shift = struct.unpack_from("<IIII", data, at)
    chain = at + 16 + words * 8 + buckets * 4
    count = symbols[1] // _SYMBOL_BYTES - first
    # The lowest bit is not the hash's: it says where a chain ends.
    known = [value & ~1 for value in struct.unpack_from(f"<{count}I", data, chain)]
    places = {
        struct.unpack_from("<I", data, symbols[0] + (first + i) * _SYMBOL_BYTES)[0]: i
        for i in range(count)
    }
    for name in names:
        place = data.index(b"\0" + PREFIX + name + b"\0", strings) + 1 - strings
        index = places[place]
        struct.pack_into(
            "<I", data, symbols[0] + (first + index) * _SYMBOL_BYTES, place + len(PREFIX)
        )
        known[index] = _hash(name) & ~1
    made = _table(known, first, words, shift)
    if len(made) > room:
        raise ValueError("there is no room for its names")
    data[at : at + len(made)] = made


def _table(hashes: Sequence[int], first: int, words: int, shift: int) -> bytes:
    """A table with one bucket, so that symbols may stay in their order. `words` of a filter keep
    most searches for other names out of it."""
    bloom = [0] * words
    for known in hashes:
        for value in (known, known | 1):
            word = (value // _WORD_BITS) % words
            bloom[word] |= 1 << value % _WORD_BITS | 1 << (value >> shift) % _WORD_BITS
    head = struct.pack(f"<IIII{words}QI", 1, first, words, shift, *bloom, first)
    return head + struct.pack(f"<{len(hashes)}I", *hashes[:-1], hashes[-1] | 1)


def _hash(name: bytes) -> int:
    """The hash that GNU's loader finds names by."""
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value
