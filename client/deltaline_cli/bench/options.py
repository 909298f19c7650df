"""What a bench is asked to do, and which of it makes no sense."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np

from deltaline.sizes import parse_bytes
from deltaline_client import Output, ServerInfo, Tls

Kind = Literal["prefill", "decode", "verify"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Mix = dict[Kind, float]
# A row of so many tokens is gigabytes of hidden states, all of them in memory at once.
MAX_TOKENS = 2**20
_LENGTHS = f"--prefill-tokens: expected N, LOW:HIGH or lognormal:MEDIAN,P99, each in 1 .. {MAX_TOKENS} and growing"
_MAX_WEIGHT = 1e9
_DAY_S = 86_400.0
# What an option may be. Timers take no much longer times.
_LIMITS: dict[str, tuple[float, float]] = {
    "clients": (1, 4096),
    "rows": (1, 2**20),
    "duration_s": (1e-3, _DAY_S),
    "steps": (1, 10**9),
    "rate": (1e-6, 1e6),
    "drafts": (1, MAX_TOKENS),
    "ramp_up_s": (0, _DAY_S),
    "processes": (1, 1024),
    "shared_memory_bytes": (0, 2**50),
    "timeout_s": (1e-3, _DAY_S),
}
# The 99th percentile of the standard normal distribution.
_Z99 = 2.3263478740408408


def bytes_of(text: str, option: str) -> int:
    """Read a number of bytes: "65536", "256MiB", "1.5GB". Raises ValueError naming the option."""
    try:
        return parse_bytes(text)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{option}: expected a number of bytes such as 256MiB, got {text!r}") from error


def parse_mix(text: str) -> Mix:
    """Read "prefill=1,decode=20": how often a step is of a kind, as weights. Raises ValueError."""
    mix: Mix = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        kind = next((kind for kind in KINDS if kind == name), None)
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if kind is None or kind in mix or not 0 <= value <= _MAX_WEIGHT:
            raise ValueError(f"--mix: expected KIND=WEIGHT,... of {', '.join(KINDS)}, each once, got {text!r}")
        if value:
            mix[kind] = value
    if not mix:
        raise ValueError(f"--mix: expected a weight above 0, got {text!r}")
    return mix


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: uniform in low .. high, or with the median `low` and the 99th percentile `high`."""

    low: int
    high: int
    is_lognormal: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "512", "16:4096" or "lognormal:512,4096". Raises ValueError."""
        name, _, sizes = text.rpartition("lognormal:")
        is_lognormal = name == "" and text != sizes
        low, mark, high = sizes.partition("," if is_lognormal else ":")
        try:
            made = cls(int(low), int(high) if mark else int(low), is_lognormal)
        except ValueError:
            raise ValueError(f"{_LENGTHS}, got {text!r}") from None
        if not 1 <= made.low <= made.high <= MAX_TOKENS or (is_lognormal and made.high == made.low):
            raise ValueError(f"{_LENGTHS}, got {text!r}")
        return made

    def draw(self, rng: np.random.Generator) -> int:
        """Return one length, 1 .. MAX_TOKENS."""
        if not self.is_lognormal:
            return int(rng.integers(self.low, self.high + 1))
        sigma = math.log(self.high / self.low) / _Z99
        return min(max(1, round(self.low * math.exp(sigma * rng.standard_normal()))), MAX_TOKENS)

    def __str__(self) -> str:
        if self.is_lognormal:
            return f"lognormal:{self.low},{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class BenchOptions:
    """A run. Raises ValueError naming the option that makes no sense.

    clients at once, each with `rows` sequences. duration_s: seconds that are measured; or steps: how many are, by all
    clients together. rate: steps per second that arrive in an open loop, None for a closed one. prefill_output: those
    of a prefill's outputs that come back. timeout_s: for a step with all its retries. tls: how the server is
    known, its metrics too. token, token_file: who the clients are.
    """

    clients: int = 4
    rows: int = 8
    duration_s: float = 10.0
    steps: int | None = None
    rate: float | None = None
    mix: Mix = field(default_factory=lambda: {"prefill": 1.0, "decode": 20.0, "verify": 5.0})
    prefill_tokens: Lengths = Lengths(64, 512, is_lognormal=True)
    prefill_output: Output = "all"
    drafts: int = 4
    ramp_up_s: float = 1.0
    processes: int = 1
    shared_memory_bytes: int = 0
    metrics_url: str | None = None
    output: Path | None = None
    timeout_s: float = 10.0
    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                flag = name.removesuffix("_s").replace("_", "-")
                raise ValueError(f"--{flag}: expected {low:.15g} .. {high:.15g}, got {value}")
        if self.processes > self.clients:
            raise ValueError(f"--processes: expected at most one per client, {self.clients}, got {self.processes}")
        if self.output is not None and (self.output.suffix != ".json" or not _can_be_made(self.output)):
            raise ValueError(f"--output: expected FILE.json in a folder that exists, got {str(self.output)!r}")

    @property
    def sequences(self) -> int:
        """Sequences of one client: its rows, and one more that takes the prefills."""
        return self.rows + ("prefill" in self.mix)

    @property
    def longest(self) -> int:
        """Tokens of the longest step; of lognormal lengths one in a hundred is longer."""
        rows = self.rows * (self.drafts if "verify" in self.mix else 1)
        return max(rows, self.prefill_tokens.high if "prefill" in self.mix else 0)

    def room(self, info: ServerInfo) -> float:
        """Most tokens of a sequence: what the server takes, and a share of its pages that all can have at once."""
        if not info.kv_pages:
            return math.inf
        return min(info.max_context, info.kv_pages // (self.sequences * self.clients) * info.kv_page_tokens)

    def check(self, info: ServerInfo) -> None:
        """Raise ValueError if the server can't take a run of these sizes."""
        if "verify" in self.mix and self.drafts > info.max_draft_tokens:
            raise ValueError(f"--drafts: the server verifies at most {info.max_draft_tokens} tokens, got {self.drafts}")
        if "prefill" in self.mix and self.prefill_tokens.high > (info.max_context or math.inf):
            most = f"the server's sequences have at most {info.max_context} tokens (its --max-context)"
            raise ValueError(f"--prefill-tokens: {most}, got {self.prefill_tokens}")
        if self.sequences * self.clients > info.max_sequences:
            prefills = " and 1 for prefills" if "prefill" in self.mix else ""
            raise ValueError(
                f"--rows: the server holds at most {info.max_sequences} sequences, got "
                f"{self.sequences * self.clients}: {self.rows} rows{prefills} for each of {self.clients} clients; "
                "ask for fewer --rows or --clients, or start it with more --max-sequences"
            )
        if (asked := self.shared_memory_bytes * self.clients) > info.shared_memory_bytes:
            raise ValueError(
                f"--shared-memory-bytes: the server shares at most {info.shared_memory_bytes} bytes (its option of the "
                f"same name), got {asked} for {self.clients} clients"
            )


def _can_be_made(path: Path) -> bool:
    """Whether there may be a file at a path, as far as its folder and the length of its name tell."""
    try:
        path.stat()
    except FileNotFoundError:
        return path.parent.is_dir()
    except OSError:
        return False
    return path.is_file()
