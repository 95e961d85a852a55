"""A text that matches a regular expression, for `pattern` in a schema and `regex` in structured outputs.

It supports literals, escapes, classes, groups, alternatives and repetitions. Alternatives are drawn at random, and
repetitions are as short as possible. Python's `re` then checks the result.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from random import Random

_DIGITS = string.digits
_WORD = string.ascii_letters + _DIGITS + "_"
_SPACE = " "
_PRINTABLE = _WORD + " .,:;!?-+*/=()[]{}<>@#$%&|~^'\"`\\"
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4}
_ANCHORS = frozenset("bBAZ")
_REPEAT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_GROUP = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
_LONGEST = 4096
_ATTEMPTS = 40
_MOST_REPETITIONS = 100_000

Draw = Callable[[int], str]
"""Makes a text. Its argument is the least number of times that unbounded repetitions occur."""


class NoText(ValueError):
    """No text: the expression is wrong, or this module does not support it."""


def text_for(pattern: str, random: Random, min_length: int = 0, max_length: int = _LONGEST) -> str:
    """A text of the wanted length that contains a match of `pattern`. Raises NoText."""
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise NoText(f"regex parse error: {pattern!r}: {error}") from error
    draw = _Parser(pattern, random).parsed()
    for attempt in range(_ATTEMPTS):
        text = draw(attempt if min_length else 0)
        if len(text) > _LONGEST:
            break
        if min_length <= len(text) <= max_length and expression.search(text):
            return text
    raise NoText(f"the simulated replica finds no text of {min_length} to {max_length} characters for {pattern!r}")


class _Parser:
    """Reads an expression that `re` has compiled, so that its syntax needs no checks."""

    def __init__(self, pattern: str, random: Random) -> None:
        self._pattern = pattern
        self._random = random
        self._at = 0
        self._repetitions_left = _MOST_REPETITIONS

    def parsed(self) -> Draw:
        return self._alternatives()

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        self._at += 1
        return char

    def _alternatives(self) -> Draw:
        """Reads up to the end, or to the bracket that closes a group."""
        choices = [self._sequence()]
        while self._peek() == "|":
            self._take()
            choices.append(self._sequence())
        if len(choices) == 1:
            return choices[0]

        def draw(repeats: int) -> str:
            return self._random.choice(choices)(repeats)

        return draw

    def _sequence(self) -> Draw:
        parts: list[Draw] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return lambda repeats: "".join(part(repeats) for part in parts)

    def _repeated(self, draw: Draw) -> Draw:
        bounds = self._bounds()
        if bounds is None:
            return draw
        low, high = bounds
        if self._peek() in ("?", "+"):  # lazy, possessive
            self._take()
        return lambda repeats: self._repeat(draw, low, high, repeats)

    def _repeat(self, draw: Draw, low: int, high: int, repeats: int) -> str:
        count = max(low, min(high, repeats))
        self._repetitions_left -= count
        if self._repetitions_left < 0:
            raise NoText(f"the simulated replica does not write the repetitions of {self._pattern!r}")
        inner = repeats if count < 2 else 0  # once is enough to make a text longer
        return "".join(draw(inner) for _ in range(count))

    def _bounds(self) -> tuple[int, int] | None:
        simple = {"*": (0, _LONGEST), "+": (1, _LONGEST), "?": (0, 1)}
        if (found := simple.get(self._peek())) is not None:
            self._take()
            return found
        counted = _REPEAT.match(self._pattern, self._at)
        if counted is None:
            return None
        self._at = counted.end()
        low = int(counted[1])
        if not counted[2]:
            return low, low
        return low, int(counted[3]) if counted[3] else max(low, _LONGEST)

    def _atom(self) -> Draw:
        char = self._take()
        match char:
            case "(":
                return self._group()
            case "[":
                return self._one_of(self._class())
            case ".":
                return self._one_of(_WORD)
            case "^" | "$":
                return lambda _: ""
            case "\\":
                return self._escape()
        return lambda _: char

    def _group(self) -> Draw:
        if self._peek() == "?":
            opening = _GROUP.match(self._pattern, self._at)
            if opening is None:
                raise NoText(f"the simulated replica writes nothing for (?… in {self._pattern!r}")
            self._at = opening.end()
        draw = self._alternatives()
        self._take()
        return draw

    def _escape(self) -> Draw:
        if self._peek() in _ANCHORS:
            self._take()
            return lambda _: ""
        if self._peek() in "123456789k":
            raise NoText(f"the simulated replica repeats no group, as in {self._pattern!r}")
        return self._one_of(self._escaped())

    def _escaped(self) -> str:
        """The characters that an escape stands for, in a class or outside."""
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char.lower() in _CLASSES:
            return _without(_CLASSES[char.lower()])
        if char in _HEX_DIGITS:
            digits = self._pattern[self._at : self._at + _HEX_DIGITS[char]]
            self._at += len(digits)
            return chr(int(digits, 16))
        return _CONTROLS.get(char, char)

    def _class(self) -> str:
        negated = self._peek() == "^"
        if negated:
            self._take()
        chars = ""
        while self._peek() != "]" or not chars:
            char = self._take()
            first = self._escaped() if char == "\\" else char
            if len(first) == 1 and self._peek() == "-" and self._pattern[self._at + 1] != "]":
                self._take()
                char = self._take()
                last = self._escaped() if char == "\\" else char
                first = "".join(map(chr, range(ord(first), min(ord(last), ord(first) + 255) + 1)))
            chars += first
        self._take()
        return _without(chars) if negated else chars

    def _one_of(self, chars: str) -> Draw:
        if not chars:
            raise NoText(f"the simulated replica finds no character for a class of {self._pattern!r}")
        return lambda _: self._random.choice(chars)


def _without(chars: str) -> str:
    return "".join(char for char in _PRINTABLE if char not in chars)
