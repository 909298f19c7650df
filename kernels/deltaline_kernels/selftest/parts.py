"""What one long row of a recurrence gives in parts, and whether it is computed so."""

import torch
from torch import Tensor

from deltaline_kernels.gated_delta import gated_delta
from deltaline_kernels.gated_delta.plan import choose_plan
from deltaline_kernels.kda import kda
from deltaline_kernels.kda.plan import choose_plan as choose_keyed_plan
from deltaline_kernels.mamba2 import mamba2
from deltaline_kernels.mamba2.inputs import MambaHeads
from deltaline_kernels.mamba2.plan import choose_plan as choose_mamba_plan
from deltaline_kernels.rows import WAYPOINT_TOKENS, Rows
from deltaline_kernels.selftest.shapes import Fill, Shapes, projected

# Tokens of a row that is computed in parts, where heads are few enough for that.
LONG = 4096


def has_parts(shapes: Shapes) -> bool:
    """Whether one long row is computed in parts; in fp32 those of KDA and Mamba2 never are."""
    heads = shapes.heads
    if shapes.recurrence in ("mamba1", "short_conv"):
        return False
    if shapes.recurrence == "kda":
        return shapes.dtype is not torch.float32 and choose_keyed_plan(heads, 1, LONG, LONG).num_parts > 1
    if shapes.recurrence == "gated_delta":
        return choose_plan(heads, 1, LONG, LONG).num_parts > 1
    sizes = MambaHeads(heads.num_key_heads, heads.num_value_heads, heads.value_dim, heads.key_dim)
    is_cut = shapes.dtype is not torch.float32 and choose_mamba_plan(sizes, 1, LONG, LONG).num_parts > 1
    return shapes.is_mamba and is_cut


def run_in_parts(fill: Fill, shapes: Shapes, device: torch.device | str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what one long row gave in parts, again beside a waypoint, and, for the slow reference, token by token."""
    heads = shapes.heads
    num_heads = heads.num_value_heads
    x, _, b, a = projected(fill, LONG, shapes).split((heads.channels, heads.value_channels, num_heads, num_heads), 1)
    x = x.contiguous()  # as the convolution leaves it
    A_log, dt_bias, D = fill(num_heads), fill(heads.num_decays), fill(num_heads)
    if heads.keyed:
        a = fill(LONG, heads.num_decays).to(shapes.dtype)
    state = fill(3, num_heads, heads.value_dim, heads.key_dim).to(shapes.state_dtype)
    drafts, results = torch.zeros(3, 2, 1, heads.record, device=device), []
    if shapes.is_mamba:
        x[:, heads.value_channels :] *= heads.scale**0.5
    waypoint = (0, WAYPOINT_TOKENS, 2)
    for max_short, waypoints in ((1, None), (1, [waypoint]), (LONG, None)):
        fields = ([LONG], [1], [1], [LONG], [0], [0])
        rows = Rows.build(*fields, max_short=max_short, device=device, waypoints=waypoints)
        own = state.clone()
        if shapes.is_mamba:
            o = mamba2(x, a, A_log, dt_bias, D, own, drafts, rows, num_groups=heads.num_key_heads)
        else:
            operation = kda if heads.keyed else gated_delta
            o = operation(x, a, b, A_log, dt_bias, own, drafts, rows, **shapes.options)
        results.append([o, own[1:2]])
    return results[0] + results[1], 2 * results[2]
