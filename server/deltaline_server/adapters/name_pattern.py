"""Regular expressions for names of modules, from files that nobody vouches for.

A safe subset is parsed and run as an automaton, all its states at once: there is no backtracking, and the work is
counted and bounded. Means what Python's `re.fullmatch` means for the same text. Knows names, not what they name.
"""

from __future__ import annotations

import string
import time
from dataclasses import dataclass, field

from deltaline_server.checkpoints.config_reader import ModelError

MAX_CHARS = 1024
MAX_NODES = 4096
MAX_DEPTH = 16
MAX_REPEATS = 255
# After so many steps (half a millisecond or so) the work rests, seconds: it runs beside threads that serve, and each
# operation of theirs that gives up the interpreter would wait 5 ms for it.
STEPS_PER_TURN = 1024
REST_S = 5e-5

_ALPHABET = 128
_ANY = (1 << _ALPHABET) - 1 & ~(1 << ord("\n"))


def _set(characters: str) -> int:
    return sum(1 << ord(character) for character in characters)


_CLASSES = {"d": _set(string.digits), "w": _set(string.ascii_letters + string.digits + "_"), "s": _set(" \t\n\r\f\v")}
_CLASSES |= {name.upper(): (1 << _ALPHABET) - 1 & ~mask for name, mask in _CLASSES.items()}


def is_readable(text: str) -> bool:
    """Whether a text can be a pattern, as far as its length and its characters tell, and be a part of a message."""
    return len(text) <= MAX_CHARS and text.isascii() and text.isprintable()


class Work:
    """How much matching may still be done for one file."""

    def __init__(self, steps: int) -> None:
        self._left, self._rest_at = steps, steps - STEPS_PER_TURN

    def spend(self, steps: int) -> None:
        """Count steps, and let other threads run now and then. Raises ModelError when more were made than may be."""
        self._left -= steps
        if self._left < 0:
            raise ModelError("patterns: expected ones that are quick to match, got some that take too many steps")
        if self._left < self._rest_at:
            self._rest_at = self._left - STEPS_PER_TURN
            time.sleep(REST_S)


@dataclass(frozen=True)
class _Node:
    """A part of an expression: one character of a set; or parts, in a row or to choose from; or an anchor.

    Repeated low .. high times, high None for any number.
    """

    kind: str
    characters: int = 0
    parts: tuple[_Node, ...] = ()
    low: int = 1
    high: int | None = 1


@dataclass
class _State:
    """A state of the automaton: `kind` is "set", "begin", "end", "fork" or "accept"; `targets` where it leads."""

    kind: str
    characters: int = 0
    targets: list[int] = field(default_factory=list)


class NamePattern:
    """An expression that is matched against whole names, of ASCII characters.

    Supported: characters, `.`, classes and their escapes (d w s), groups (their captures mean nothing), `|`, greedy and
    lazy repetition, `^` and `$`. Raises ModelError for everything else, or what is larger than the limits above.
    """

    def __init__(self, text: str, work: Work) -> None:
        self._work = work
        self._states: list[_State] = []
        self._num_built = 0
        accept = self._add(_State("accept"))
        first = self._build(_Parser(text).parse(), accept)
        self._moves: dict[frozenset[int], dict[str, frozenset[int]]] = {}
        self._ends: dict[frozenset[int], bool] = {}
        self._first = self._reach([first], at_begin=True)
        self._takes_nothing = accept in self._reach([first], at_begin=True, at_end=True)
        self._accept = accept

    def matches(self, name: str) -> bool:
        """Whether the whole name matches. Raises ModelError when the work of the file is used up."""
        if not name:
            return self._takes_nothing
        self._work.spend(1 + len(name) // 4)  # a character whose move is known takes a quarter of another step
        current = self._first
        for character in name:
            moves = self._moves.setdefault(current, {})
            if character not in moves:
                moves[character] = self._move(current, character)
            current = moves[character]
        if current not in self._ends:
            self._ends[current] = self._accept in self._reach(list(current), at_end=True)
        return self._ends[current]

    def _move(self, current: frozenset[int], character: str) -> frozenset[int]:
        self._work.spend(len(current))
        code = ord(character)
        if code >= _ALPHABET:
            return frozenset()
        taken = [i for i in current if self._states[i].kind == "set" and self._states[i].characters >> code & 1]
        return self._reach([target for i in taken for target in self._states[i].targets])

    def _reach(self, seeds: list[int], at_begin: bool = False, at_end: bool = False) -> frozenset[int]:
        """The states that are reached without a character."""
        found: set[int] = set()
        while seeds:
            i = seeds.pop()
            if i in found:
                continue
            found.add(i)
            self._work.spend(1)
            kind = self._states[i].kind
            if kind == "fork" or (kind == "begin" and at_begin) or (kind == "end" and at_end):
                seeds.extend(self._states[i].targets)
        return frozenset(i for i in found if self._states[i].kind in ("set", "end", "accept"))

    def _build(self, node: _Node, then: int) -> int:
        """Add the states of a node that leads to state `then`; return the first of them."""
        self._num_built += 1
        if self._num_built > MAX_NODES:
            raise ModelError(f"pattern: expected one of at most {MAX_NODES} parts, its repetitions written out")
        if node.high is None:
            again = self._add(_State("fork", targets=[then]))
            self._states[again].targets.append(self._build_once(node, again))
            then = again
        else:
            for _ in range(node.high - node.low):
                then = self._add(_State("fork", targets=[then, self._build_once(node, then)]))
        for _ in range(node.low):
            then = self._build_once(node, then)
        return then

    def _build_once(self, node: _Node, then: int) -> int:
        if node.kind == "row":
            for part in reversed(node.parts):
                then = self._build(part, then)
            return then
        if node.kind == "choice":
            return self._add(_State("fork", targets=[self._build(part, then) for part in node.parts]))
        return self._add(_State(node.kind, node.characters, [then]))

    def _add(self, state: _State) -> int:
        self._work.spend(1)
        self._states.append(state)
        if len(self._states) > MAX_NODES:
            raise ModelError(f"pattern: expected one of at most {MAX_NODES} parts, its repetitions written out")
        return len(self._states) - 1


class _Parser:
    """Reads the text of an expression, once."""

    def __init__(self, text: str) -> None:
        if not is_readable(text):
            raise ModelError(f"pattern: expected at most {MAX_CHARS} printable ASCII characters, got {text[:40]!r}")
        self._text, self._at, self._depth = text, 0, 0

    def parse(self) -> _Node:
        """Return the whole expression."""
        node = self._choice()
        if self._at < len(self._text):
            raise self._wrong("no ')' without its '('")
        return node

    def _choice(self) -> _Node:
        parts = [self._row()]
        while self._take("|"):
            parts.append(self._row())
        return _Node("choice", parts=tuple(parts))

    def _row(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._single()))
        return _Node("row", parts=tuple(parts))

    def _single(self) -> _Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return _Node("set", self._class())
        if character == ".":
            return _Node("set", _ANY)
        if character in "^$":
            return _Node("begin" if character == "^" else "end")
        if character == "\\":
            return _Node("set", self._escape())
        if character in "*+?{":
            raise self._wrong(f"something before {character!r} that it repeats")
        return _Node("set", _set(character))

    def _repeated(self, node: _Node) -> _Node:
        for sign, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                return self._counted(node, low, high)
        if not self._take("{"):
            return node
        end = self._text.find("}", self._at)
        first, comma, last = self._text[self._at : max(end, self._at)].partition(",")
        low = int(first) if first.isdecimal() and len(first) <= 3 else 0 if comma and not first else -1
        last = last if comma else first
        high = int(last) if last.isdecimal() and len(last) <= 3 else None
        if low < 0 or not (0 <= low <= MAX_REPEATS) or (last and high is None) or not (first or last):
            raise self._wrong(f"{{m,n}} with counts up to {MAX_REPEATS}")
        if high is not None and not low <= high <= MAX_REPEATS:
            raise self._wrong(f"{{m,n}} with m up to n and n up to {MAX_REPEATS}")
        self._at = end + 1
        return self._counted(node, low, high)

    def _counted(self, node: _Node, low: int, high: int | None) -> _Node:
        """The node so many times. A lazy repetition matches the same names as a greedy one."""
        if node.kind in ("begin", "end"):
            raise self._wrong("no repetition of an anchor")
        self._take("?")
        if self._at < len(self._text) and self._text[self._at] in "*+?{":
            raise self._wrong("one repetition after another only in a group")
        return _Node("row", parts=(node,), low=low, high=high)

    def _group(self) -> _Node:
        if self._take("?") and not self._take(":"):
            end = self._text.find(">", self._at)
            name = self._text[self._at + 2 : max(end, 0)]
            if not self._text.startswith("P<", self._at) or not name.isidentifier():
                raise self._wrong("no group but (...), (?:...) and (?P<name>...)")
            self._at = end + 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"groups at most {MAX_DEPTH} deep")
        node = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise self._wrong("a ')' for every '('")
        return node

    def _class(self) -> int:
        is_negated, mask, is_first = self._take("^"), 0, True
        while is_first or not self._take("]"):
            is_first = False
            character = self._next()
            low = self._escape() if character == "\\" else _set(character)
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                character = self._next()
                high = self._escape() if character == "\\" else _set(character)
                if low.bit_count() != 1 or high.bit_count() != 1 or low > high:
                    raise self._wrong("a range from one character up to another")
                low = (high << 1) - low
            mask |= low
        return (1 << _ALPHABET) - 1 & ~mask if is_negated else mask

    def _escape(self) -> int:
        character = self._next()
        if character in _CLASSES:
            return _CLASSES[character]
        if character.isalnum():
            raise self._wrong(f"no escape \\{character}")
        return _set(character)

    def _next(self) -> str:
        if self._at == len(self._text):
            raise self._wrong("something after the last character")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, character: str) -> bool:
        """Go on past a character if it is the next one."""
        is_next = self._text.startswith(character, self._at)
        self._at += is_next
        return is_next

    def _wrong(self, expected: str) -> ModelError:
        return ModelError(f"pattern: expected {expected}, got {self._text[:80]!r}")
