"""How far a bf16 state drifts: one row decoded token by token beside fp64, with an fp32 and with a bf16 state.

Every token is a launch of its own, so a bf16 state is rounded once per token, as it is when serving. Both states start
from zero and see the same bf16 tokens; the heads are 2/4 of 128. After 100, 1,000, ... tokens the outputs of the last
100 and the state are compared with the recurrence in fp64, which is carried along in chunks of 64.

Three kinds of inputs: random ones; gates near 1, so that nothing is forgotten but what is overwritten; and gates near 1
with beta near 0, so that little is overwritten either. Outputs are bf16 themselves: an error of 1.7e-3 in them is their
own rounding.

    python bench/drift.py --device cuda
    python bench/drift.py --device cpu --steps 1000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from deltaline_bench.device import name_device
from deltaline_bench.error import compare
from deltaline_bench.gated_delta.batch import Batch
from deltaline_bench.gated_delta.shape import Inputs, Shape
from deltaline_bench.lines import Mode
from deltaline_bench.report import table
from deltaline_kernels import Rows, gated_delta

HEADS = (2, 4)
# Tokens between two looks; on a GPU their launches are one graph.
SEGMENT = 100
STATES = (torch.float32, torch.bfloat16)
INPUTS = {
    "random": Inputs(),
    "gates near 1": Inputs(step=(1e-7, 1e-5)),
    "gates near 1, beta near 0": Inputs(step=(1e-7, 1e-5), write=-6.0),
}
COLUMNS = ("inputs", "tokens", "o, fp32 state", "o, bf16 state", "fp32 state", "bf16 state")


class Decoder:
    """One row that starts from the zero state. state: `[HV, V, K]` after the tokens so far."""

    def __init__(self, batch: Batch, dtype: torch.dtype) -> None:
        shape = batch.shape
        self._batch = batch
        # The tokens of a segment, at addresses that a graph may hold.
        self._qkv, self._a, self._b = (x[:SEGMENT].clone() for x in batch.packed)
        size = (2, shape.num_value_heads, shape.value_dim, shape.key_dim)
        self._lines = torch.zeros(size, dtype=dtype, device=batch.device)
        self._drafts = torch.zeros(2, 2, 1, shape.record, device=batch.device)
        self._rows = Rows.build([1], [1], [1], [1], [0], [0], max_short=1, device=batch.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if batch.device.type == "cuda":
            # Compiles what the capture then finds.
            self._launch()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._o = self._launch()
            self._lines.zero_()

    @property
    def state(self) -> Tensor:
        return self._lines[1]

    def decode(self, first: int) -> Tensor:
        """Decode the SEGMENT tokens from `first` on; return their outputs `[SEGMENT, HV, V]`, valid until the next."""
        tokens = slice(first, first + SEGMENT)
        for buffer, source in zip((self._qkv, self._a, self._b), self._batch.packed, strict=True):
            buffer.copy_(source[tokens])
        if self._graph is None:
            return self._launch()
        self._graph.replay()
        return self._o

    def _launch(self) -> Tensor:
        """Launch once per token of the segment."""
        batch = self._batch
        outputs = [
            gated_delta(
                self._qkv[t : t + 1],
                self._a[t : t + 1],
                self._b[t : t + 1],
                batch.A_log,
                batch.dt_bias,
                self._lines,
                self._drafts,
                self._rows,
                num_key_heads=batch.shape.num_key_heads,
            )
            for t in range(SEGMENT)
        ]
        return torch.cat(outputs)


def measure(name: str, steps: int, device: torch.device) -> Iterator[tuple[int, list[float]]]:
    """Decode `steps` tokens of INPUTS[name]; yield at each power of ten and at the end the errors of COLUMNS."""
    batch = Batch(Shape(Mode.PREFILL, (steps,), *HEADS, inputs=INPUTS[name]), f"drift {name}", device)
    decoders = [Decoder(batch, dtype) for dtype in STATES]
    tokens = batch.tokens()
    truth = torch.zeros((1, *decoders[0].state.shape), dtype=torch.float64, device=device)
    marks = {steps} | {10**power for power in range(2, len(str(steps)))}
    for first in range(0, steps, SEGMENT):
        part = tokens.map(itemgetter((None, slice(first, first + SEGMENT))))
        o, truth = part.advance(truth)
        outputs = [decoder.decode(first) for decoder in decoders]
        if first + SEGMENT in marks:
            states = [decoder.state for decoder in decoders]
            yield first + SEGMENT, [*_errors(outputs, o[0]), *_errors(states, truth[0])]


def _errors(tensors: Sequence[Tensor], expected: Tensor) -> list[float]:
    """Return the relative norm of each tensor's difference to `expected`."""
    return [compare({"": tensor}, {"": expected.float()}).relative for tensor in tensors]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="a torch device: cuda (default), cuda:1, cpu, ...")
    parser.add_argument(
        "--steps", type=int, default=100_000, help=f"tokens, a multiple of {SEGMENT} (default 100000); few on a CPU"
    )
    options = parser.parse_args(arguments)
    if options.steps < SEGMENT or options.steps % SEGMENT:
        parser.error(f"--steps: expected a multiple of {SEGMENT}, got {options.steps}")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch finds no CUDA device; try --device cpu --steps 1000")
    rows = []
    with torch.no_grad():
        for name in INPUTS:
            for tokens, errors in measure(name, options.steps, device):
                rows.append([name, f"{tokens:,}", *(f"{error:.1e}" for error in errors)])
    print("\n".join((name_device(device), "", *table(COLUMNS, rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
