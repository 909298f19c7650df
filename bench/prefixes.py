"""Hit rates of the policy by which stored snapshots give way, beside plain LRU of whole paths; simulated, on the CPU.

Conversations take turns. A prompt is a system prompt, which many share, all earlier turns, and the user's new tokens;
the turn begins with the deepest snapshot that the index of prefix keys finds. Snapshots are stored at the end of the
prompt, at the end of what was generated, and where the index says that an earlier prompt was the same up to there. All
policies see the same turns and store at the same places; they only choose what gives way. Compared are

  path LRU     what was used and all that it continues is refreshed; the oldest gives way
  node LRU     only what was used is refreshed
  ours         deltaline_server.tables.prefixes.eviction

Judged is the share of all prompts' tokens that were restored. Beside it stand the share of turns that restored
anything, and of those that restored tokens of their own conversation.

    python bench/prefixes.py [--load NAME]... [--seeds N] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltaline_bench.device import describe_cpu, provenance
from deltaline_server.tables.prefixes.cost import StoredPrefix, Tier
from deltaline_server.tables.prefixes.eviction import Eviction
from deltaline_server.tables.prefixes.index import Origin, PrefixIndex
from deltaline_server.tables.prefixes.keys import PrefixKeys

BAR = 0.15
JUDGED = "chat"
ORIGIN, SECRET = Origin(b"simulated"), bytes(16)
KEY_BYTES, KEY_TOKENS = 16, 64


@dataclass(frozen=True)
class Load:
    """What is asked of the cache.

    zipf: how unevenly conversations, in a random order, get their turns, by Zipf's law; one that had all of its turns
    gets no more. system_prompts: how many there are; which one a conversation has is uneven too, with exponent 1.
    edited: share of turns that go on from an earlier turn of the conversation, drawn evenly, in place of the last one.
    rewritten: share of conversations of which later prompts hold what was generated in another form, as when reasoning
    is left out, so that no state behind it is of use.
    """

    conversations: int = 1024
    turns: int = 8
    lines: int = 512
    zipf: float = 1.0
    system_prompts: int = 16
    edited: float = 0.0
    rewritten: float = 0.0


LOADS: Mapping[str, Load] = {
    "chat": Load(),
    "even": Load(zipf=0.0),
    "uneven": Load(zipf=1.5),
    "edits": Load(edited=0.1),
    "reasoning": Load(rewritten=1.0),
    "mixed": Load(edited=0.1, rewritten=0.3),
    "many-systems": Load(system_prompts=256, edited=0.1),
    "few-lines": Load(lines=128),
    "many-lines": Load(lines=2048),
}


@dataclass(frozen=True)
class Turn:
    """A prompt and what follows. prefixes: the number and the position of the prefix at the end of each part of it, the
    system prompt's first. generated: those of the prompt with what was generated."""

    prefixes: tuple[tuple[int, int], ...]
    generated: tuple[int, int]


@dataclass(frozen=True)
class Rates:
    """Shares of what could have been restored, and how often each reason of a miss was given."""

    tokens: float
    turns: float
    own_turns: float
    misses: Mapping[str, int]


class Policy(Protocol):
    """What chooses who gives way."""

    def stored(self, snapshot: bytes, position: int, continues: bytes | None) -> None: ...

    def consumed(self, snapshot: bytes) -> None: ...

    def gone(self, snapshot: bytes) -> None: ...

    def victim(self) -> bytes | None: ...


class NodeLru:
    """The one that was not stored or used for the longest time gives way."""

    def __init__(self) -> None:
        self._parents: dict[bytes, bytes | None] = {}  # the least recently used first

    def stored(self, snapshot: bytes, position: int, continues: bytes | None) -> None:
        self._parents[snapshot] = continues
        self.consumed(snapshot)

    def consumed(self, snapshot: bytes) -> None:
        self._parents[snapshot] = self._parents.pop(snapshot)

    def gone(self, snapshot: bytes) -> None:
        parent = self._parents.pop(snapshot)
        for child, its in self._parents.items():
            if its == snapshot:
                self._parents[child] = parent

    def victim(self) -> bytes | None:
        return next(iter(self._parents), None)


class PathLru(NodeLru):
    """The same, but that use of one is use of all that it continues; of a path the beginning gives way first."""

    def consumed(self, snapshot: bytes) -> None:
        path: list[bytes] = []
        at: bytes | None = snapshot
        while at is not None:
            path.append(at)
            at = self._parents.get(at)
        for each in reversed(path):
            super().consumed(each)


class Ours(Eviction):
    """The one that it costs least to lose gives way: the server's own choice where a line is all that is short."""

    def victim(self) -> bytes | None:
        costs = self.costs(by_size=False)
        place = int(costs.argmin())
        return self.snapshot_at(place) if np.isfinite(costs[place]) else None


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "path LRU": lambda lines: PathLru(),
    "node LRU": lambda lines: NodeLru(),
    "ours": Ours,
}


def turns_of(load: Load, seed: int) -> Iterator[Turn]:
    """The turns of a load in the order in which they come."""
    random = np.random.default_rng(seed)
    system_tokens = random.integers(512, 4096, load.system_prompts)
    of_system = _zipf(load.system_prompts, 1.0)
    system = random.choice(load.system_prompts, load.conversations, p=of_system / of_system.sum())
    is_rewritten = random.random(load.conversations) < load.rewritten
    share = random.permutation(_zipf(load.conversations, load.zipf))
    left = np.full(load.conversations, load.turns)
    # System prompts are prefixes 0, 1 ...; a prefix that no other prompt has gets the next number.
    history = [[(int(i), int(system_tokens[i]))] for i in system]
    num_prefixes = load.system_prompts
    for _ in range(load.conversations * load.turns):
        chances = np.where(left > 0, share, 0.0)
        i = int(random.choice(load.conversations, p=chances / chances.sum()))
        left[i] -= 1
        past = history[i]
        if len(past) > 1 and random.random() < load.edited:
            past = past[: 1 + 2 * int(random.integers(0, len(past) // 2))]
        user, generated, rewritten = (8 + int(random.lognormal(np.log(tokens), 1.0)) for tokens in (150, 300, 100))
        prompt = [*past, (num_prefixes, past[-1][1] + user)]
        after = num_prefixes + 1, prompt[-1][1] + generated
        yield Turn(tuple(prompt), after)
        later = (num_prefixes + 2, prompt[-1][1] + rewritten) if is_rewritten[i] else after
        history[i] = [*prompt, later]
        num_prefixes += 3


def simulate(turns: Iterable[Turn], lines: int, policy: Policy) -> Rates:
    """Run turns through an index of so many snapshots, of which a policy chooses who gives way."""
    index = PrefixIndex(lines, SECRET)
    num_tokens = num_restored = num_turns = num_hits = num_own = num_stored = 0
    misses: Counter[str] = Counter()
    for turn in turns:
        later_keys = keys_of((*turn.prefixes, turn.generated))
        keys = PrefixKeys(later_keys.positions[:-1], later_keys.words[:-1], turn.prefixes[-1][1])
        found = index.find(keys, 0, ORIGIN)
        index.notice(keys, 0, ORIGIN)
        num_turns += 1
        num_tokens += keys.prompt_tokens
        source: bytes | None = None
        if found.prefixes:
            source = found.prefixes[0].snapshot
            num_restored += found.prefixes[0].position
            num_hits += 1
            num_own += found.prefixes[0].position > turn.prefixes[0][1]
            policy.consumed(source)
        elif found.miss is not None:
            misses[found.miss.name] += 1
        for position in (found.shared_position, keys.prompt_tokens, later_keys.prompt_tokens):
            if position == 0:
                continue
            if len(index) == lines:
                victim = policy.victim()
                assert victim is not None  # none is pinned
                index.forget(victim, is_evicted=True)
                policy.gone(victim)
                source = None if victim == source else source
            num_stored += 1
            snapshot = num_stored.to_bytes(16, "little")
            index.register(later_keys, 0, ORIGIN, StoredPrefix(position, snapshot, Tier.DEVICE, 1))
            policy.stored(snapshot, position, source)
            source = snapshot
    return Rates(num_restored / num_tokens, num_hits / num_turns, num_own / num_turns, dict(misses))


def keys_of(prefixes: tuple[tuple[int, int], ...]) -> PrefixKeys:
    """Keys as an orchestrator would send them for the ends of a prompt's parts; within the system prompt, which is read
    together with what follows, it has one for every KEY_TOKENS."""
    numbers, ends = zip(*prefixes, strict=True)
    keys = [number.to_bytes(KEY_BYTES, "little") for number in numbers]
    return PrefixKeys.of(keys, [ends[0] // KEY_TOKENS * KEY_TOKENS, *ends[1:]], ends[-1])


def compare(load: Load, seed: int) -> dict[str, Rates]:
    """All policies on the same turns."""
    turns = list(turns_of(load, seed))
    return {name: simulate(turns, load.lines, make(load.lines)) for name, make in POLICIES.items()}


def margin(rates: Mapping[str, Rates]) -> float:
    """How much more of the tokens ours restores than path LRU does."""
    return rates["ours"].tokens - rates["path LRU"].tokens


def _zipf(count: int, exponent: float) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = np.arange(1, count + 1, dtype=np.float64) ** np.float64(-exponent)
    return shares


def main() -> int:
    """Run, print the table, and return 1 when the judged load misses the bar with any seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", choices=LOADS, help="a load, may be repeated [all]")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 .. N of each load [%(default)s]")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    names, seeds = options.load or list(LOADS), range(1, options.seeds + 1)
    runs: dict[str, dict[int, dict[str, Rates]]] = {name: {} for name in names}
    print(f"{'':13}{'seed':>5}" + "".join(f"{name:>22}" for name in POLICIES) + f"{'margin':>10}")
    for name in names:
        for seed in seeds:
            rates = runs[name][seed] = compare(LOADS[name], seed)
            shares = "".join(f"{r.tokens:>9.3f}{r.turns:>7.3f}{r.own_turns:>6.2f}" for r in rates.values())
            print(f"{name:13}{seed:>5}{shares}{margin(rates):>+10.3f}", flush=True)
    print(f"\n{'':13}path LRU, node LRU, ours: means of {len(seeds)} seeds; the smallest margin")
    for name, of_seed in runs.items():
        print(f"{name:13}" + told(of_seed))
    if options.output:
        record = provenance(describe_cpu(), np) | {"loads": {name: asdict(LOADS[name]) for name in names}}
        rates_of = {
            name: {seed: {side: asdict(each) for side, each in rates.items()} for seed, rates in of_seed.items()}
            for name, of_seed in runs.items()
        }
        options.output.write_text(json.dumps(record | {"runs": rates_of}, indent=2) + "\n")
    return 0 if all(margin(rates) >= BAR for rates in runs.get(JUDGED, {}).values()) else 1


def told(of_seed: Mapping[int, Mapping[str, Rates]]) -> str:
    """A load's line: each policy's mean share of tokens as a bar and a number, and whether the bar is met."""
    means = {side: float(np.mean([rates[side].tokens for rates in of_seed.values()])) for side in POLICIES}
    least = min(margin(rates) for rates in of_seed.values())
    bars = "".join(f"{'#' * round(16 * mean):.<16} {mean:.3f}  " for mean in means.values())
    return f"{bars}{least:+.3f} {'met' if least >= BAR else 'below the bar'}"


if __name__ == "__main__":
    sys.exit(main())
