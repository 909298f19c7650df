"""The walk of chunk.py for Hopper, in Gluon: the same steps, each begun before it is waited for.

The tiles of the next chunk are on their way while a chunk is computed, and the warps turn C B^T into scores
while the matrix unit is at the products with the state. Only for sizes that fit: S of 64 or 128, P a multiple of 64,
rows of xBC at multiples of 16 bytes.

A program has a block of one head's state, or two of one group with four warps each, so that B and C, most of what is
copied, are copied once for both.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from deltaline_kernels.device.hopper import barrier, make_tiles, on_hopper
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.mamba2.hopper_block import walk_block
from deltaline_kernels.mamba2.inputs import MambaInputs
from deltaline_kernels.mamba2.plan import BLOCK_P, CHUNK, MANY_BLOCKS
from deltaline_kernels.rows import Rows, StateLines

# Of one block of a state.
WARPS = 4
# Chunks whose tiles are in shared memory or on their way, by the blocks of a program: of those with one, more leave no
# room for two programs on a multiprocessor.
STAGES = {1: 2, 2: 3}
# Of a thread, where programs have two blocks: all that a multiprocessor has.
REGISTERS = 256
STATE_DIMS = (64, 128)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "num_parts", "part_length", "ends_length"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def walk_kernel(
    xBC,
    x_tiles,
    s_tiles,
    y_tiles,
    steps,
    D,
    ends,
    lines,
    y,
    control,
    control_stride,
    num_parts,
    part_length,
    ends_length,
    xBC_stride,
    waypoints,
    H: gl.constexpr,
    G: gl.constexpr,
    P: gl.constexpr,
    S: gl.constexpr,
    BLOCK_P: gl.constexpr,
    CHUNK: gl.constexpr,
    PADDING: gl.constexpr,
    HAS_D: gl.constexpr,
    LINE_SHIFT: gl.constexpr,
    APART: gl.constexpr,
    # Blocks of states of a program.
    SIDES: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Walk through the chunks of a row, or of a part of one, with some rows of the state of a head, or of two."""
    dtype: gl.constexpr = x_tiles.dtype
    b_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, S], s_tiles.layout)
    c_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, S], s_tiles.layout)
    x_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, SIDES * BLOCK_P], x_tiles.layout)
    f_s = gl.allocate_shared_memory(gl.float32, [2 * SIDES, 2 * CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    h_s = gl.allocate_shared_memory(dtype, [SIDES, BLOCK_P, S], s_tiles.layout)
    y_s = gl.allocate_shared_memory(dtype, [SIDES, CHUNK, BLOCK_P], y_tiles.layout)
    b_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(b_bars.index(i), count=1)
        mbarrier.init(c_bars.index(i), count=1)
        mbarrier.init(x_bars.index(i), count=1)
        mbarrier.init(free.index(i), count=SIDES)
    mbarrier.init(done, count=SIDES)
    fence_async_shared()
    barrier()
    tiles, buffers = (s_tiles, x_tiles), (b_s, c_s, x_s, b_bars, c_bars, x_bars, free)
    cut = (num_parts, part_length, ends_length)
    told = (xBC, y_tiles, steps, D, ends, lines, y, control, control_stride, cut, xBC_stride)
    own = (f_s, h_s.index(0), y_s.index(0), done)
    if SIDES == 1:
        walk_block(
            told,
            tiles,
            buffers,
            own,
            waypoints,
            0,
            SIDES,
            H,
            G,
            P,
            S,
            BLOCK_P,
            CHUNK,
            PADDING,
            HAS_D,
            LINE_SHIFT,
            APART,
            STAGES,
            WARPS,
        )
    else:
        other = (f_s, h_s.index(1), y_s.index(1), done)
        gl.warp_specialize(
            [
                (
                    walk_block,
                    (
                        told,
                        tiles,
                        buffers,
                        own,
                        waypoints,
                        0,
                        SIDES,
                        H,
                        G,
                        P,
                        S,
                        BLOCK_P,
                        CHUNK,
                        PADDING,
                        HAS_D,
                        LINE_SHIFT,
                        APART,
                        STAGES,
                        WARPS,
                    ),
                ),
                (
                    walk_block,
                    (
                        told,
                        tiles,
                        buffers,
                        other,
                        waypoints,
                        1,
                        SIDES,
                        H,
                        G,
                        P,
                        S,
                        BLOCK_P,
                        CHUNK,
                        PADDING,
                        HAS_D,
                        LINE_SHIFT,
                        APART,
                        STAGES,
                        WARPS,
                    ),
                ),
            ],
            [WARPS],
            [REGISTERS],
        )


def can_walk(inputs: MambaInputs, y: Tensor) -> bool:
    """Return whether `launch_walk` runs on this device with heads of this size, given that tiles are copied whole."""
    fits = inputs.heads.state_dim in STATE_DIMS and y.dtype == inputs.xBC.dtype
    return fits and on_hopper(inputs.device)


def launch_walk(
    inputs: MambaInputs,
    lines: StateLines,
    rows: Rows,
    y: Tensor,
    steps: Tensor,
    ends: Tensor,
    plan: RowSplits,
    ends_length: int,
    *,
    padding: int,
) -> None:
    """Walk through all rows; `ends` has what the first walk left of those in parts. Mutates `lines` and `y`."""
    xBC, heads = inputs.xBC, inputs.heads
    blocks = heads.num_heads * (heads.head_dim // BLOCK_P)
    is_many = rows.num_rows * plan.num_parts * blocks >= MANY_BLOCKS
    sides = 2 if is_many and blocks // heads.num_groups % 2 == 0 else 1
    walk_kernel[(rows.num_rows * plan.num_parts * blocks // sides,)](
        xBC,
        make_tiles(xBC, sides * BLOCK_P, CHUNK),
        make_tiles(xBC, heads.state_dim, CHUNK),
        make_tiles(y.flatten(1), BLOCK_P, CHUNK),
        steps,
        steps if inputs.D is None else inputs.D,
        ends,
        *lines.arguments(rows, y),
        plan.num_parts,
        plan.part_length,
        ends_length,
        xBC.stride(0),
        rows.waypoints,
        **inputs.sizes,
        BLOCK_P=BLOCK_P,
        CHUNK=CHUNK,
        PADDING=padding,
        HAS_D=inputs.D is not None,
        **lines.constants,
        SIDES=sides,
        STAGES=STAGES[sides],
        WARPS=WARPS,
        REGISTERS=REGISTERS,
        num_warps=WARPS,
    )
