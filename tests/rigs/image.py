"""The Dockerfile and its build context as data: what a stage inherits, and which files a build is sent.

Knows the instructions that our Dockerfile uses; builds nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]


@dataclass
class Stage:
    """A stage with what it inherits from the stages below it; RUN and COPY in their order."""

    base: str
    environment: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    copies: list[list[str]] = field(default_factory=list)
    last: dict[str, str] = field(default_factory=dict)
    """The arguments of the last of each other instruction."""

    def command(self, instruction: str) -> list[str]:
        """The JSON form that ENTRYPOINT or HEALTHCHECK ends with. Raises ValueError for the shell's form."""
        words: list[str] = json.loads(self.last[instruction][self.last[instruction].index("[") :])
        return words


def stages() -> dict[str, Stage]:
    """The stages of the Dockerfile by name."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M).replace("\\\n", "")
    found: dict[str, Stage] = {}
    now = Stage("")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        match name:
            case "FROM":
                base, _, stage = rest.partition(" AS ")
                below = found.get(base, Stage(base))
                now = Stage(below.base, dict(below.environment), [*below.runs], [*below.copies], dict(below.last))
                found[stage] = now
            case "ENV":
                now.environment |= dict(word.split("=", 1) for word in shlex.split(rest))
            case "RUN":
                now.runs.append(rest)
            case "COPY":
                now.copies.append(rest.split())
            case _:
                now.last[name] = rest
    return found


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file of the repository into the build's context."""
    sent = True
    steps = PurePosixPath(path)
    for pattern in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        bare = pattern.removeprefix("!").removeprefix("**/")
        places = steps.parts if "**/" in pattern else [str(steps), *map(str, steps.parents)]
        if any(fnmatch(place, bare) for place in places if place != "."):
            sent = pattern.startswith("!")
    return sent
