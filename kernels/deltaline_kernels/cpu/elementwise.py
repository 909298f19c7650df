"""Functions of single values on the CPU, whose bits do not depend on where a value stands among others."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# PyTorch gives a thread no less than so many values, and computes so many at once or a divisor of it.
GRAIN, VECTORS = 32768, 32


def evenly_(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Put function's results in the place of contiguous fp32 values, each computed the same way wherever it stands.

    PyTorch computes what does not fill a vector of each thread's share in another way, which differs in the last place:
    the rest is padded to whole vectors. Should a release share the work out otherwise, only that last place is lost.
    function: of each value by itself; may write in place. Returns `values`.
    """
    count = values.numel()
    threads = max(1, min(torch.get_num_threads(), -(-count // GRAIN)))
    even = max(count - count % (threads * VECTORS), (threads - 1) * GRAIN)
    flat = values.view(-1)
    if even > 0:
        flat[:even].copy_(function(flat[:even]))
    if even < count:
        flat[even:] = function(F.pad(flat[even:], (0, -(count - even) % VECTORS)))[: count - even]
    return values
