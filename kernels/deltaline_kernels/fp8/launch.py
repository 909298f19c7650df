"""Products with FP8 weights on a GPU: in the way that is fastest for so many tokens."""

from torch import Tensor

from deltaline_kernels.fp8.few_rows import multiply_few_rows
from deltaline_kernels.fp8.many_rows import multiply_many_rows
from deltaline_kernels.fp8.one_row import multiply_one_row
from deltaline_kernels.fp8.plan import FewRows, OneRow, choose_plan


def multiply_fp8_triton(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write out `[T, N]`; arguments are validated by `multiply_fp8`. T is at least 1."""
    plan = choose_plan(len(x), x.dtype)
    if isinstance(plan, OneRow):
        multiply_one_row(x, weight, scales, out, plan)
    elif isinstance(plan, FewRows):
        multiply_few_rows(x, weight, scales, out, plan)
    else:
        multiply_many_rows(x, weight, scales, out, plan)
