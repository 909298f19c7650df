"""Runs the sequences of a chunk scan, each of which has the state of its number; picks the path by device.

On the CPU the states are copied to a pool of their own and back, as line 0 of the native operation is the zero state.
Does not know the engine's arguments.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_kernels.compat.rows import EngineRows
from deltaline_kernels.mamba2.cpu import mamba2_cpu
from deltaline_kernels.mamba2.heads import Heads
from deltaline_kernels.rows import Rows


@dataclass(frozen=True, eq=False)
class ScanTokens:
    """Packed tokens.

    Args:
        xBC: `[T, H*P + 2*G*S]`, any row stride. dt: `[T, H]`. A, D, dt_bias: `[H]`, the last two None for zero. All of
            xBC's dtype or fp32, contiguous but for xBC.
        softplus: False: the time step is dt + dt_bias itself.
    """

    xBC: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    heads: Heads
    softplus: bool


def scan(tokens: ScanTokens, states: Tensor, rows: EngineRows, y: Tensor) -> None:
    """Write the outputs of rows to y `[T, H, P]`, in xBC's dtype or fp32; mutates `states` `[N, H, P, S]` fp32 or bf16.

    Args:
        rows: row i has line i; `history` is one answer for all.
    """
    run = _scan_cpu if tokens.xBC.device.type == "cpu" else _scan_triton
    run(tokens, states, rows, y)


def _scan_cpu(tokens: ScanTokens, states: Tensor, rows: EngineRows, y: Tensor) -> None:
    assert rows.starts is not None
    n = rows.num_rows
    lengths = rows.starts.diff()
    control = torch.zeros((6, n + 1), dtype=torch.int32)
    control[0] = rows.starts
    control[1, :-1] = torch.arange(1, n + 1) if rows.history else 0
    control[2, :-1] = torch.arange(1, n + 1)
    control[3, :-1] = lengths
    pool = torch.cat((torch.zeros_like(states[:1]) if n else states, states))
    drafts = torch.empty((n + 1, 2, 0, tokens.heads.record), dtype=torch.float32)
    placed = Rows(control, 0, 1, int(lengths.max()) if n else 0)
    mamba2_cpu(
        tokens.xBC,
        tokens.dt,
        tokens.A.float(),
        tokens.D,
        tokens.dt_bias,
        pool,
        drafts,
        placed,
        y,
        tokens.heads,
        softplus=tokens.softplus,
    )
    states.copy_(pool[1 : n + 1])


def _scan_triton(tokens: ScanTokens, states: Tensor, rows: EngineRows, y: Tensor) -> None:
    # Imported here: only this path needs triton, which is installed on Linux alone.
    from deltaline_kernels.compat.chunk_scan_launch import scan_triton

    scan_triton(tokens, states, rows, y)
