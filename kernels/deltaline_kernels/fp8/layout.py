"""How weights in FP8 lie in memory: in words of four values, so that kernels read words and find inputs in a row.

Word i of a row's block of 128 inputs holds inputs i, i + 32, i + 64 and i + 96, the first in its lowest byte: byte j of
a block's words are 32 inputs in a row, as the tokens have them.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltaline_kernels.checks import FP8, FP8_BLOCK, check_tensor
from deltaline_kernels.device.sizes import cdiv

# Values of a word, and words of a block of inputs.
BYTES = 4
WORDS = FP8_BLOCK // BYTES


def pack_fp8(weight: Tensor) -> Tensor:
    """Return a weight `[N, K]` e4m3 as `multiply_fp8` takes it: `[N, 32 * ceil(K / 128)]` int32, zeros behind K.

    Raises:
        TypeError, ValueError: it is not `[N, K]` e4m3, has no values, or holds NaN, which kernels do not know.
    """
    check_tensor("weight", weight, (None, None), (FP8,), None)
    if weight.numel() == 0:
        raise ValueError(f"weight: expected shape [N, K], none of them 0, got {list(weight.shape)}")
    values = weight.view(torch.uint8)
    if bool((values & 0x7F == 0x7F).any()):
        raise ValueError("weight: expected numbers, got NaN")
    outputs, inputs = weight.shape
    blocks = cdiv(inputs, FP8_BLOCK)
    whole = pad(values, (0, blocks * FP8_BLOCK - inputs)).view(outputs, blocks, BYTES, WORDS)
    return whole.transpose(2, 3).contiguous().view(torch.int32).view(outputs, blocks * WORDS)


def unpack_fp8(words: Tensor, inputs: int) -> Tensor:
    """Return the weight `[N, inputs]` e4m3 of the words that `pack_fp8` made of it."""
    values = words.view(torch.uint8).view(len(words), -1, WORDS, BYTES).transpose(2, 3)
    return values.reshape(len(words), -1)[:, :inputs].view(FP8)
