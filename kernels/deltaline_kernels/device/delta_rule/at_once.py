"""Which short rows of a delta rule are computed at once: by `verify.py` of its family, instead of token by token."""

import torch

from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.token_tile import has_room
from deltaline_kernels.rows import Rows, StateLines

KEYS = (64, 128)


def can_verify(inputs: DeltaInputs, lines: StateLines, rows: Rows) -> bool:
    """Say whether `launch_verify` takes these short rows: a few tokens of 16 bits, keys of a size that it has."""
    return has_room(lines, rows) and inputs.dtype != torch.float32 and inputs.heads.key_dim in KEYS
