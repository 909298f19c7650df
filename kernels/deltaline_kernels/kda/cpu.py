"""KDA over packed rows on the CPU: the gates, and the delta rule."""

from torch import Tensor

from deltaline_kernels.cpu.delta_rule import delta_rule_cpu
from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.kda.reference import find_gates
from deltaline_kernels.rows import Rows, StateLines


def kda_cpu(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Write the rows' outputs to o `[T, HV, V]`; mutates `lines`. Validated by the caller."""
    num_heads = inputs.heads.num_value_heads
    g, beta = find_gates(inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, inputs.lower_bound, num_heads)
    delta_rule_cpu(inputs, g, beta, lines, rows, o)
