"""Write runtime/cpp/src/prompt/unicode_tables.inc from this Python's `unicodedata`, for tokenizers."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

FILE = Path(__file__).parents[1] / "runtime/cpp/src/prompt/unicode_tables.inc"
HANGUL = range(0xAC00, 0xD7A4)  # composed by arithmetic
SURROGATES = range(0xD800, 0xE000)
WIDTH = 118


def codes() -> Iterator[int]:
    return (code for code in range(sys.maxunicode + 1) if code not in SURROGATES)


def ranges(holds: Callable[[str], bool]) -> list[int]:
    """First and last code point of each run for which `holds`."""
    found: list[int] = []
    for code in codes():
        if holds(chr(code)):
            if found and found[-1] == code - 1:
                found[-1] = code
            else:
                found += [code, code]
    return found


def decompositions() -> tuple[list[int], list[int]]:
    """Full decompositions, (code, offset * 32 + length) in rising order of code, and the letters they point into.

    A code stands for its compatible form, and plus 2**24 for its canonical one; one without an entry stays as it is.
    """
    index: list[tuple[int, int]] = []
    letters: list[int] = []
    for offset, form in ((0, "NFKD"), (1 << 24, "NFD")):
        for code in codes():
            parts = unicodedata.normalize(form, chr(code))
            if code not in HANGUL and parts != chr(code):
                index.append((code + offset, len(letters) * 32 + len(parts)))
                letters += map(ord, parts)
    return [value for pair in index for value in pair], letters


def compositions() -> list[int]:
    """(first, second, composed) of every canonical pair."""
    found = []
    for code in codes():
        parts = unicodedata.decomposition(chr(code))
        if parts and not parts.startswith("<") and len(parts.split()) == 2:
            first, second = (int(part, 16) for part in parts.split())
            if unicodedata.normalize("NFC", chr(first) + chr(second)) == chr(code):
                found.append((first, second, code))
    return [value for triple in sorted(found) for value in triple]


def combining() -> list[int]:
    """(code, combining class) of codes whose class is not 0."""
    return [value for code in codes() if (kind := unicodedata.combining(chr(code))) for value in (code, kind)]


def lower() -> list[int]:
    """(code, first, second) of the lower case; second is 0 for one character."""
    found: list[int] = []
    for code in codes():
        small = chr(code).lower()
        if small != chr(code):
            found += [code, ord(small[0]), ord(small[1]) if len(small) > 1 else 0]
    return found


def table(name: str, values: Iterable[int]) -> str:
    lines, line = [f"inline constexpr uint32_t {name}[] = {{"], "   "
    for value in values:
        word = f" {value},"
        if len(line) + len(word) > WIDTH:
            lines.append(line)
            line = "   "
        line += word
    return "\n".join([*lines, line, "};", ""])


def text() -> str:
    """The text of unicode_tables.inc."""
    index, letters = decompositions()
    tables = {
        "kLetters": ranges(lambda char: unicodedata.category(char)[0] == "L"),
        "kNumbers": ranges(lambda char: unicodedata.category(char)[0] == "N"),
        "kMarks": ranges(lambda char: unicodedata.category(char)[0] == "M"),
        "kLower": lower(),
        "kCombining": combining(),
        "kDecompositions": index,
        "kDecomposed": letters,
        "kCompositions": compositions(),
    }
    head = f"// Unicode {unicodedata.unidata_version}. Written by scripts/cpp_unicode.py; do not edit.\n"
    return head + "\n".join(table(name, values) for name, values in tables.items())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
