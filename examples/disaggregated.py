"""Prefill here, decode there: one server computes prompts, another one goes on from their states.

    deltaline-server --model DIR --host-state-bytes 1GiB &
    deltaline-server --model DIR --host-state-bytes 1GiB --port 50052 --metrics-port 9465 &
    python examples/disaggregated.py DIR --prefill 127.0.0.1:50051 --decode 127.0.0.1:50052 --compare

A prompt's state travels as a snapshot: captured behind the prefill, exported, loaded at the other server, and restored
there as a sequence. While one prompt is computed and travels, the others are decoded, so that no token waits for a
prefill. DIR is a checkpoint as for generate.py, all of whose layers each server has.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from generate import Ends, Prompt, Stream, check_servers, generate, random_prompts
from safetensors import SafetensorError

from deltaline_client import Client, DeltalineError


@dataclass
class Handed:
    """A prompt that one server computed, and that goes on as a stream of the other's.

    prefill_s, travel_s: what both took, the travel from the snapshot to the restored sequence; state_bytes: what
    travelled; first_decode_s: of the step that made the second token, 0 where none was wanted.
    """

    stream: Stream
    prefill_s: float
    travel_s: float
    state_bytes: int
    first_decode_s: float = 0.0


class Pair:
    """A server that computes prompts, and one that decodes what follows. Both have the same model and settings."""

    def __init__(self, prefiller: Client, decoder: Client, ends: Ends) -> None:
        self._prefiller, self._decoder, self._ends = prefiller, decoder, ends
        self._streams = decoder.info().spans[0].input_streams

    def generate(self, prompts: Sequence[Prompt], concurrency: int) -> list[Handed]:
        """Continue all prompts greedily, so many of them at a time; returns them in their order.

        Whatever it raises, it leaves nothing open at either server that can be reached.
        """
        waiting, coming = deque(prompts), deque[Future[Handed]]()
        handed, live = list[Handed](), list[Handed]()
        with ThreadPoolExecutor(1) as worker:
            try:
                while waiting or coming or live:
                    while waiting and len(coming) + len(live) < concurrency:
                        coming.append(worker.submit(self._hand_over, waiting.popleft()))
                    # Who has come joins the others; only where there are none is it waited for.
                    while coming and (coming[0].done() or not live):
                        handed.append(coming.popleft().result())
                        live = self._unfinished([*live, handed[-1]])
                    if live:
                        self._decode(live)
                        live = self._unfinished(live)
            finally:
                worker.shutdown(cancel_futures=True)
                live += [one.result() for one in coming if not one.cancelled() and one.exception() is None]
                with suppress(DeltalineError):  # there are some only after an error, which matters more
                    self._close(live)
        return handed

    def _hand_over(self, prompt: Prompt) -> Handed:
        """Compute a prompt at one server, and bring its state to the other."""
        begin_s = time.perf_counter()
        with self._prefiller.open() as sequence:
            output = sequence.prefill(self._ends.embed(prompt.tokens, self._streams), output="last")
            prefilled_s = time.perf_counter()
            with sequence.snapshot() as snapshot:
                state = snapshot.export()
        with self._decoder.snapshots.load(state) as arrived:
            stream = Stream(prompt, arrived.restore())
        travelled_s = time.perf_counter()
        stream.take(self._ends.greedy(output), self._ends.end_tokens)
        return Handed(stream, prefilled_s - begin_s, travelled_s - prefilled_s, len(state))

    def _decode(self, live: list[Handed]) -> None:
        """Make the next token of each, in one step."""
        begin_s = time.perf_counter()
        sequences = [sequence for one in live for sequence in one.stream.sequences]
        tokens = [one.stream.new_tokens[-1] for one in live]
        outputs = self._decoder.decode(sequences, self._ends.embed(tokens, self._streams))
        step_s = time.perf_counter() - begin_s
        for one, token in zip(live, self._ends.greedy(outputs), strict=True):
            one.stream.take([token], self._ends.end_tokens)
            one.first_decode_s = one.first_decode_s or step_s

    def _unfinished(self, live: list[Handed]) -> list[Handed]:
        """Those that lack tokens; the others are closed."""
        done = [one for one in live if one.stream.is_done(self._ends.end_tokens)]
        self._close(done)
        return [one for one in live if one not in done]

    def _close(self, done: list[Handed]) -> None:
        if done:
            self._decoder.close([sequence for one in done for sequence in one.stream.sequences])


def print_table(handed: list[Handed]) -> None:
    """Print what each prompt took until its first decode was done, and how many bytes travelled."""
    print(f"{'prompt':8}{'tokens':>8}{'new':>6}{'prefill ms':>12}{'travel ms':>12}{'bytes':>12}{'first decode ms':>17}")
    for number, one in enumerate(handed):
        print(f"{number:<8}{len(one.stream.prompt.tokens):8}{len(one.stream.new_tokens):6}", end="")
        print(f"{one.prefill_s * 1e3:12.1f}{one.travel_s * 1e3:12.1f}{one.state_bytes:12}", end="")
        print(f"{one.first_decode_s * 1e3:17.1f}")


def main() -> int:
    """Print what came of a run; return 1 after an error, or if the tokens are not those of one server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--prefill", default="127.0.0.1:50051", metavar="HOST:PORT", help="[%(default)s]")
    parser.add_argument("--decode", default="127.0.0.1:50052", metavar="HOST:PORT", help="[%(default)s]")
    parser.add_argument("--prompts", type=int, default=8, help="random ones [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of each [%(default)s]")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=6, help="prompts at a time [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts [%(default)s]")
    parser.add_argument("--compare", action="store_true", help="compare with the decode server doing all")
    options = parser.parse_args()
    try:
        ends = Ends(options.directory)
        for address in (options.prefill, options.decode):
            check_servers([address], ends.num_layers, ends.streams)
        prompts = random_prompts(
            len(ends.embedding), options.prompts, options.max_new_tokens, options.seed, options.prompt_tokens
        )
        with Client(options.prefill) as prefiller, Client(options.decode) as decoder:
            handed = Pair(prefiller, decoder, ends).generate(prompts, options.concurrency)
            print_table(handed)
            if not options.compare:
                return 0
            alone = generate([decoder], ends, prompts, 0, options.concurrency).tokens
        wrong = [n for n, one in enumerate(handed) if one.stream.new_tokens != alone[n]]
        print(
            f"{sum(map(len, alone))} tokens compared with one server's:",
            f"prompts {wrong} differ" if wrong else "equal",
        )
    except (DeltalineError, OSError, SafetensorError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
