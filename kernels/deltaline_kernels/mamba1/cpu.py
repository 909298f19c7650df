"""The Mamba-1 recurrence over packed rows on the CPU: vectorised PyTorch, one step per token of all rows of a group.

What does not depend on the state, its decays and what is added to it, is computed for several tokens at once; so are
the outputs. A replayed draft goes through the same steps as a token that is committed at once.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.decay import exp_
from deltaline_kernels.cpu.elementwise import evenly_
from deltaline_kernels.cpu.recurrence import run_rows
from deltaline_kernels.cpu.row_groups import RowGroup
from deltaline_kernels.mamba1.inputs import ScanInputs, ScanSizes
from deltaline_kernels.rows import Rows, StateLines

# Tokens whose decays and states are there at once.
AT_ONCE = 8


def mamba1_cpu(inputs: ScanInputs, lines: StateLines, rows: Rows, y: Tensor) -> None:
    """Write the rows' outputs to y `[T, D]`; mutates `lines`. Validated by the caller."""
    rate, step = inputs.rate.float(), inputs.dt.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if inputs.dt_bias is not None:
        step += inputs.dt_bias.float()
    if inputs.softplus:
        evenly_(F.softplus, step)
    if inputs.log_rate:
        rate = -rate.exp()
    run_rows(rows, lines, y, partial(_fold, inputs.heads, rate), partial(_run_tokens, inputs, step, rate))


def _run_tokens(
    inputs: ScanInputs, step: Tensor, rate: Tensor, group: RowGroup, h: Tensor, out: Tensor
) -> Tensor | None:
    """Run the rows' tokens as `run_rows` asks for: h `[B, D, S]`, out `[B, n, D]`."""
    sizes, steps = inputs.heads, group.tokens(step)
    x = group.tokens(inputs.x).float()
    B, C = group.tokens(inputs.BC).float().split(sizes.key_channels, dim=-1)  # (B, n, G*S)
    u = x * steps
    last = h
    for begin in range(0, group.length, AT_ONCE):
        part = slice(begin, begin + AT_ONCE)
        states = _scan(last, steps[:, part], u[:, part], B[:, part], rate, sizes)  # (B, c, D, S)
        # Summed row by row: a product of matrices rounds by how many of them there are.
        keys = C[:, part].unflatten(-1, (sizes.num_groups, 1, sizes.state_dim))
        out[:, part] = (states.unflatten(2, (sizes.num_groups, -1)) * keys).sum(-1).flatten(2)
        last = states[:, -1]
    if group.committed > 0:
        h.copy_(last)
    if inputs.D is not None:
        out.addcmul_(x, inputs.D.float())
    if inputs.z is not None:
        z = group.tokens(inputs.z).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        out.mul_(evenly_(partial(F.silu, inplace=True), z))
    if group.committed > 0 or not group.writes:
        return None
    return torch.cat((B, u, steps), dim=-1)


def _scan(h: Tensor, step: Tensor, u: Tensor, B: Tensor, rate: Tensor, sizes: ScanSizes) -> Tensor:
    """Return the states `[B, c, D, S]` after each of c tokens, c at least 1, before which they are h `[B, D, S]`.

    step and u `[B, c, D]`, B `[B, c, G*S]`, rate `[D, S]`.
    """
    decays = exp_(step[..., None] * rate)
    keys = B.unflatten(-1, (sizes.num_groups, 1, sizes.state_dim))
    states: Tensor = (u.unflatten(-1, (sizes.num_groups, -1))[..., None] * keys).flatten(2, 3)
    for t in range(states.shape[1]):
        h = states[:, t].addcmul_(decays[:, t], h)
    return states


def _fold(sizes: ScanSizes, rate: Tensor, h: Tensor, records: Tensor) -> None:
    """Fold records `[B, r, G*S + 2*D]` into h `[B, D, S]`, in place."""
    B, u, step = records.split((sizes.key_channels, sizes.channels, sizes.channels), dim=-1)
    h.copy_(_scan(h, step, u, B, rate, sizes)[:, -1])
