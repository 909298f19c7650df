"""Conversations over one system prompt: turns go on from stored states, branches fork, and nothing is computed twice.

    deltaline-server --model DIR &
    python examples/chat.py DIR --server 127.0.0.1:50051 --compare

A turn's prompt is all that was said before and a question. Who answers it need not know what the server has: the open
is given the keys of the prompt (`Prefix`), and begins with the deepest state that is stored of it. The first prefill
leaves the state behind the system prompt (`Waypoints`), for other conversations; each reply ends with a snapshot under
the key of what was said, for the next turn. DIR is a checkpoint as for generate.py, all of whose layers one server has.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from generate import Ends, Prompt, check_servers, expected_tokens
from safetensors import SafetensorError

from deltaline_client import Client, DeltalineError, Prefix, Sequence, Waypoints

SYSTEM_TOKENS, QUESTION_TOKENS, REPLY_TOKENS = 100, 12, 24


@dataclass(frozen=True)
class Talk:
    """What was said so far as token ids, and the positions at which states of it are stored."""

    tokens: list[int]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """A reply to a prompt, of whose tokens so many were not computed again; talk: with the reply."""

    name: str
    prompt: list[int]
    reused: int
    reply: list[int]
    talk: Talk


def keys(tokens: list[int], places: tuple[int, ...]) -> Prefix:
    """Keys at the end, and where states are stored; without such places in mind, every 64 tokens will do."""
    return Prefix.of_tokens(tokens, every=len(tokens), at=places)


def generate(sequence: Sequence, ends: Ends, prompt: list[int], streams: int, waypoints: Waypoints) -> list[int]:
    """Compute what the sequence lacks of a prompt, then its likeliest continuation."""
    missing = ends.embed(prompt[sequence.position :], streams)
    reply = ends.greedy(sequence.prefill(missing, output="last", waypoints=waypoints))
    while len(reply) < REPLY_TOKENS:
        reply += ends.greedy(sequence.decode(ends.embed(reply[-1:], streams)))
    return reply


def ask(client: Client, ends: Ends, name: str, talk: Talk, *questions: list[int]) -> list[Turn]:
    """Ask questions after what was said; several are branches, each of which goes on without the others."""
    streams, turns = client.info().spans[0].input_streams, list[Turn]()
    with client.open(prefix=keys(talk.tokens + questions[0], talk.places)) as sequence:
        begin, branches = sequence.position, [sequence]
        if len(questions) > 1:
            branches += sequence.fork(len(questions) - 1)
        for branch, question in zip(branches, questions, strict=True):
            prompt = talk.tokens + question
            waypoints = Waypoints(tokens=talk.places, prefix=keys(prompt, talk.places))
            reply = generate(branch, ends, prompt, streams, waypoints)
            said = prompt + reply
            # The reply's last token is not computed yet: it goes with the next question.
            place = branch.position
            branch.snapshot(key=keys(said[:place], ()).keys[-1])
            after = Talk(said, (*talk.places, place))
            turns.append(Turn(name if branch is sequence else f"{name}, branch", prompt, begin, reply, after))
        client.close(branches[1:])
    return turns


def converse(client: Client, ends: Ends, seed: int = 0) -> list[Turn]:
    """Two conversations over one system prompt; the first one branches in its third turn."""
    rng, vocabulary = np.random.default_rng(seed), len(ends.embedding)
    system = Talk(rng.integers(0, vocabulary, SYSTEM_TOKENS).tolist(), (SYSTEM_TOKENS,))
    questions = [rng.integers(0, vocabulary, QUESTION_TOKENS).tolist() for _ in range(7)]
    first = ask(client, ends, "A, turn 1", system, questions[0])
    other = ask(client, ends, "B, turn 1", system, questions[1])
    second = ask(client, ends, "A, turn 2", first[0].talk, questions[2])
    third = ask(client, ends, "A, turn 3", second[0].talk, *questions[3:6])
    later = ask(client, ends, "B, turn 2", other[0].talk, questions[6])
    return [*first, *other, *second, *third, *later]


def print_table(turns: list[Turn]) -> None:
    """Print what each turn's prompt has, and how much of it was computed."""
    print(f"{'turn':20}{'prompt':>8}{'reused':>8}{'computed':>10}")
    for turn in turns:
        print(f"{turn.name:20}{len(turn.prompt):8}{turn.reused:8}{len(turn.prompt) - turn.reused:10}")
    prompts, reused = sum(len(turn.prompt) for turn in turns), sum(turn.reused for turn in turns)
    print(f"{'all':20}{prompts:8}{reused:8}{prompts - reused:10}")


def are_as_expected(directory: Path, ends: Ends, turns: list[Turn]) -> bool:
    """Whether replies are those of transformers, each up to its first near tie."""
    prompts = [Prompt(turn.prompt, len(turn.reply)) for turn in turns]
    expected = expected_tokens(directory, prompts, ends.end_tokens)
    return all(turn.reply[: len(own)] == own for turn, own in zip(turns, expected, strict=True))


def main() -> int:
    """Print what came of a run; return 1 after an error, or if the replies are not what they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="checkpoint that the server serves")
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT", help="[%(default)s]")
    parser.add_argument("--compare", action="store_true", help="compare with transformers")
    options = parser.parse_args()
    try:
        ends = Ends(options.directory)
        check_servers([options.server], ends.num_layers, ends.streams)
        with Client(options.server) as client:
            turns = converse(client, ends)
        print_table(turns)
        if options.compare:
            if not are_as_expected(options.directory, ends, turns):
                print("the replies are not those of transformers", file=sys.stderr)
                return 1
            print("the replies are those of transformers, each up to its first near tie")
    except (DeltalineError, OSError, SafetensorError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
