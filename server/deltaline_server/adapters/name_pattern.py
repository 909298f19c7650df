"""Regular expressions for names of modules, from files of clients.

RE2 matches them: it never backtracks, and its work is counted and bounded here. Only syntax that means the same to RE2
as to Python's `re.fullmatch`, which PEFT uses, is passed on to it.
"""

from __future__ import annotations

import re
import time

import re2

from deltaline_server.checkpoints.config_reader import ModelError

MAX_CHARS = 1024
# Of a compiled pattern: about 10,000 instructions, or 1,000 repetitions.
MAX_BYTES = 1 << 18
# A step takes about a quarter of a microsecond, up to two where RE2 falls back. After STEPS_PER_TURN of them the thread
# sleeps for REST_S: each time a serving thread gives up the interpreter it would otherwise wait 5 ms to get it back.
STEPS_PER_TURN = 2048
REST_S = 5e-5
STEPS_PER_MATCH = 4
INSTRUCTIONS_PER_STEP = 256

# Left out is what RE2 takes and Python refuses or reads otherwise: (?P<1>a), \z, \pL, [[:alpha:]], [\d-z], ^*, a{,},
# a{1000000000}; and with it the other escapes and groups. Bad ranges and products of counts are RE2's to refuse.
# Possessive throughout: it reads a text once.
_SUPPORTED = re.compile(
    r"""(?: [|^$]
    | \((?:\?:|\?P<[A-Za-z_]\w*>)?
    | (?: [^\\\[\]()^$|{*+?]
        | \\(?:[dwsDWS]|[^0-9A-Za-z])
        | \[\^?+\]?+(?:\\[dwsDWS](?!-[^\]])|\\[^0-9A-Za-z]|[^\\\[\]])*+\]
        | [\])]
      )
      (?:(?:[*+?]|\{(?:\d{1,3}(?:,\d{0,3})?|,\d{1,3})\})\??)?+
    )*+""",
    re.VERBOSE,
)
# `{,n}` is {0,n} to Python, and four characters to RE2. What must not be changed is matched first.
_NO_LEAST_COUNT = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\{,")


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


class NamePattern:
    """An expression that is matched against whole names, of ASCII characters.

    Supported: characters, `.`, classes and their escapes (d w s), groups (their captures mean nothing), `|`, greedy and
    lazy repetition, `^` and `$`. Raises ModelError for everything else, or what is larger than the limits above.
    """

    def __init__(self, text: str, work: Work) -> None:
        if not is_readable(text):
            raise ModelError(f"pattern: expected at most {MAX_CHARS} printable ASCII characters, got {text[:40]!r}")
        scanned = _SUPPORTED.match(text)
        assert scanned is not None
        rest = text[scanned.end() :]
        if rest:
            expected = "characters, classes, groups, alternatives, single repetitions and anchors"
            raise ModelError(f"pattern: expected {expected}, got {rest[:12]!r} in {text[:80]!r}")
        options = re2.Options()
        options.encoding, options.max_mem = re2.Options.Encoding.LATIN1, MAX_BYTES
        options.never_capture, options.log_errors = True, False
        try:
            self._expression = re2.compile(_NO_LEAST_COUNT.sub(lambda found: found[1] or "{0,", text).encode(), options)
        except re2.error as error:
            why = error.args[0].decode()
            raise ModelError(
                f"pattern: expected a regular expression, small with its repetitions written out, got {text[:80]!r} "
                f"({why})"
            ) from error
        self._work, self._size = work, self._expression.programsize
        work.spend(2 * self._size)

    def matches(self, name: str) -> bool:
        """Whether the whole name matches. Raises ModelError when the work of the file is used up."""
        self._work.spend(STEPS_PER_MATCH + len(name) * self._size // INSTRUCTIONS_PER_STEP)
        return name.isascii() and self._expression.fullmatch(name.encode()) is not None
