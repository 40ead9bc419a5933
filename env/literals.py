"""A forgiving reader of JSON-like values as small models write them: JSON, or a Python literal.

Beyond JSON it takes single quotes, raw line breaks in strings, True/False/None, tuples and trailing commas. Each
character is read once and nesting is limited, so any input is read, or refused with ValueError, in linear time.

Choices: of duplicate keys the last one counts, as in Python's json. NaN, infinities, numbers with more than 30 digits
and keys that are not strings are refused. Lone surrogates and NUL become U+FFFD, so that what was read can be logged.
"""

from __future__ import annotations

import math
import re

MAX_DEPTH = 16

_BLANK = re.compile(r"\s*")
_NUMBER = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?(?![\w.])")
_WORD = re.compile(r"[A-Za-z]+")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_STRING_PART = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_UNSAFE = re.compile("[\ud800-\udfff\0]")


def read_value(text: str, pos: int = 0, depth: int = 0) -> tuple[object, int]:
    """The value that starts at `pos` (blanks skipped) and the position after it. Raises ValueError."""
    pos = skip_blanks(text, pos)
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    char = text[pos : pos + 1]
    if char in ('"', "'"):
        return _read_string(text, pos)
    if char == "{":
        return _read_object(text, pos, depth)
    if char in ("[", "("):
        return _read_list(text, pos, depth)
    if match := _NUMBER.match(text, pos):
        return _number(match[0]), match.end()
    if (match := _WORD.match(text, pos)) and match[0] in _WORDS:
        return _WORDS[match[0]], match.end()
    raise ValueError("a value is missing" if char else "it ends too early")


def read_whole(text: str) -> object:
    """The one value that `text` consists of. Raises ValueError."""
    value, end = read_value(text)
    if skip_blanks(text, end) != len(text):
        raise ValueError("there is text after the value")
    return value


def skip_blanks(text: str, pos: int) -> int:
    """The position of the next character that is not white space."""
    blank = _BLANK.match(text, pos)
    assert blank  # it matches the empty string too
    return blank.end()


def _number(digits: str) -> int | float:
    try:
        return int(digits)
    except ValueError:
        value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _read_string(text: str, pos: int) -> tuple[str, int]:
    quote = text[pos]
    parts: list[str] = []
    pos += 1
    while match := _STRING_PART[quote].search(text, pos):
        parts.append(text[pos : match.start()])
        if match[0] == quote:
            return printable("".join(parts)), match.end()
        escaped = text[match.end() : match.end() + 1]
        pos = match.end() + 1
        if escaped == "u" and (digits := _HEX.match(text, pos)):
            parts.append(chr(int(digits[0], 16)))
            pos = digits.end()
        else:
            # An unknown escape stands for its character: `\$` is a dollar sign.
            parts.append(_ESCAPES.get(escaped, escaped))
    raise ValueError("a string is not closed")


def printable(text: str) -> str:
    """Text that any file, log or tokenizer takes: surrogate pairs (an escaped emoji) become one character; lone
    surrogates and NUL become U+FFFD."""
    if not _UNSAFE.search(text):
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return joined.replace("\0", "\ufffd")


def _read_object(text: str, pos: int, depth: int) -> tuple[dict[str, object], int]:
    result: dict[str, object] = {}
    pos = skip_blanks(text, pos + 1)
    while text[pos : pos + 1] != "}":
        if text[pos : pos + 1] not in ('"', "'"):
            raise ValueError("a key must be a quoted string" if pos < len(text) else "an object is not closed")
        key, pos = _read_string(text, pos)
        pos = skip_blanks(text, pos)
        if text[pos : pos + 1] != ":":
            raise ValueError("a colon is missing")
        result[key], pos = read_value(text, pos + 1, depth + 1)
        pos = _next_item(text, pos, "}", "an object")
    return result, pos + 1


def _read_list(text: str, pos: int, depth: int) -> tuple[list[object], int]:
    close = "]" if text[pos] == "[" else ")"
    result: list[object] = []
    pos = skip_blanks(text, pos + 1)
    while text[pos : pos + 1] != close:
        value, pos = read_value(text, pos, depth + 1)
        result.append(value)
        pos = _next_item(text, pos, close, "a list")
    return result, pos + 1


def _next_item(text: str, pos: int, close: str, what: str) -> int:
    """The position after the comma, or of the closing bracket."""
    pos = skip_blanks(text, pos)
    if text[pos : pos + 1] == ",":
        return skip_blanks(text, pos + 1)
    if text[pos : pos + 1] != close:
        raise ValueError(f"{what} is not closed" if pos >= len(text) else f"a comma is missing in {what}")
    return pos
