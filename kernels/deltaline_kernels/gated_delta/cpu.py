"""The gated delta rule over packed rows on the CPU: the gates, and the delta rule."""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_kernels.cpu.delta_rule import delta_rule_cpu
from deltaline_kernels.cpu.elementwise import evenly_
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.rows import Rows, StateLines


def gated_delta_cpu(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `lines`. Validated by the caller."""
    a, b, A_log, dt_bias = inputs.a, inputs.b, inputs.A_log, inputs.dt_bias
    if A_log is None or dt_bias is None:
        g, beta = a.float(), b.float()
    else:
        g = evenly_(F.softplus, a.float() + dt_bias.float()).mul_(A_log.float().exp().neg_())
        beta = evenly_(torch.sigmoid, b.to(torch.float32, copy=True, memory_format=torch.contiguous_format))
    delta_rule_cpu(inputs, g[..., None], beta, lines, rows, o)
