"""The walk of chunk.py's `_advance` for Hopper, in Gluon, by groups of warps with roles.

Two groups of four warps have half of a head's state each in registers and do nothing but advance it. What each chunk
starts from and its updates they leave in shared memory, in 16 bits; a third group makes outputs of these, and one warp
copies the chunks to come. So between a chunk's state and the next one's are only the products that it needs, and a
chunk's tiles and scores serve the whole head. Only for sizes that fit: K of 64 or 128, V a multiple of 128, rows of q,
k and v at multiples of 16 bytes.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.hopper import barrier, make_tiles, on_hopper
from deltaline_kernels.device.row_splits import RowSplits
from deltaline_kernels.gated_delta.hopper_roles import advance_state, copy_chunks, make_outputs
from deltaline_kernels.gated_delta.plan import CHUNK
from deltaline_kernels.gated_delta.transform import FACTORS
from deltaline_kernels.rows import Rows, StateLines

WARPS = 4
# Rows of the state that a group of four warps has, and that a program has.
HALF = 64
BLOCK_V = 2 * HALF
# Chunks whose tiles are in shared memory or on their way: more leave no room.
STAGES = 3
# Of a thread of the second group with a half of the state, of that of the outputs, and of the warp that copies; the
# first group has as many as the second. All of a multiprocessor's 512 x 128, which threads have at first.
REGISTERS, FIRST_REGISTERS = (160, 168, 24), 128
KEYS = (64, 128)


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@gluon.jit(
    do_not_specialize=["control_stride", "num_parts", "part_length"],
    do_not_specialize_on_alignment=["control", "waypoints"],
)
def walk_kernel(
    q_tiles,
    k_tiles,
    x_tiles,
    t_tiles,
    o_tiles,
    factors,
    eps,
    ends,
    lines,
    o,
    control,
    control_stride,
    num_parts,
    part_length,
    waypoints,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_V: gl.constexpr,
    CHUNK: gl.constexpr,
    FACTORS: gl.constexpr,
    LINE_SHIFT: gl.constexpr,
    APART: gl.constexpr,
    NORMALIZE: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Walk through the chunks of a row, or of a part of one, with a head's state, or 128 rows of it."""
    RECORD: gl.constexpr = H * K + HV * V + HV
    BLOCKS: gl.constexpr = V // BLOCK_V
    END: gl.constexpr = (V + (K if K > V else V)) * K
    dtype: gl.constexpr = q_tiles.dtype
    state, written, drafts, line_stride, written_stride, draft_stride, half_stride = lines
    i_v = gl.program_id(0) % BLOCKS
    i_hv = gl.program_id(0) // BLOCKS % HV
    i_part = gl.program_id(0) // (BLOCKS * HV) % num_parts
    i_row = gl.program_id(0) // (BLOCKS * HV) // num_parts
    i_h = i_hv // (HV // H)
    begin = gl.load(control + i_row)
    n = gl.load(control + i_row + 1) - begin
    read = gl.load(control + control_stride + i_row).to(gl.int64)
    write = gl.load(control + 2 * control_stride + i_row).to(gl.int64)
    replayed = gl.load(control + 4 * control_stride + i_row)
    half = gl.load(control + 5 * control_stride + i_row).to(gl.int64)
    live = (read != -1) | (write != -1)
    replayed = gl.where(read > 0, replayed, 0)
    part_begin = i_part * part_length
    part_end = gl.minimum(n, part_begin + part_length)
    first_v = i_v * BLOCK_V
    if (part_begin < n) | (i_part == 0):
        if not live:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            o_i = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))[:, None]
            o_c = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, layout))[None, :]
            for done in range(part_begin, part_end, CHUNK):
                p_o = o + (begin + done).to(gl.int64) * (HV * V) + i_hv * V + first_v + o_i * (HV * V) + o_c
                gl.store(p_o, gl.zeros([CHUNK, BLOCK_V], dtype, layout), mask=(done + o_i < part_end) & (o_c >= 0))
        # The line, unless the row is in parts: then what stands before each of them.
        is_read = (read > 0) & (i_part == 0) & (part_end == n)
        state_at = i_hv.to(gl.int64) * (V * K) + first_v * K
        p_state = state + (read - LINE_SHIFT) * line_stride + state_at
        p_draft = drafts + (read - LINE_SHIFT) * draft_stride + half * half_stride
        draft_at = (i_h * K, H * K + i_hv * V + first_v, H * K + HV * V + i_hv)
        p_before = ends + ((begin + part_begin) // part_length * HV + i_hv).to(gl.int64) * END + first_v * K
        p_before += gl.where(i_part == 0, V * K, -HV * END)
        is_part = (i_part > 0) | (part_end < n)
        # An empty row changes its line only by a replay or by a move.
        is_final = (part_end == n) & (write > 0) & ((n > 0) | (replayed > 0) | (write != read) | APART)
        p_final = written + (write - LINE_SHIFT) * written_stride + state_at
        line_at = begin // CHUNK + i_row + part_begin // CHUNK

        k_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], k_tiles.layout)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, K], q_tiles.layout)
        x_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, BLOCK_V], x_tiles.layout)
        t_s = gl.allocate_shared_memory(dtype, [STAGES, CHUNK, CHUNK], t_tiles.layout)
        h_s = gl.allocate_shared_memory(dtype, [BLOCK_V, K], k_tiles.layout)
        u_s = gl.allocate_shared_memory(dtype, [BLOCK_V, CHUNK], t_tiles.layout)
        f_s = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        handed = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            # Tiles and factors; two groups with a half of the state and that of the outputs.
            mbarrier.init(full.index(i), count=2)
            mbarrier.init(empty.index(i), count=3)
        mbarrier.init(full.index(STAGES), count=2)
        h_full, h_empty, u_full, u_empty = handed.index(0), handed.index(1), handed.index(2), handed.index(3)
        mbarrier.init(h_full, count=2)
        mbarrier.init(h_empty, count=1)
        mbarrier.init(u_full, count=2)
        mbarrier.init(u_empty, count=1)
        fence_async_shared()
        barrier()
        first = begin + part_begin
        slot = (begin // CHUNK + i_row + part_begin // CHUNK) * HV + i_hv
        num_tokens = gl.where(live, gl.maximum(part_end - part_begin, 0), 0)
        num_chunks = (num_tokens + CHUNK - 1) // CHUNK
        tiles = (q_tiles, k_tiles, x_tiles, t_tiles)
        buffers = (k_s, q_s, x_s, t_s, f_s)
        bars = (full, empty, h_full, h_empty, u_full, u_empty)
        # v and the outputs have the same columns.
        place = (first, slot, i_h * K, i_hv * V + first_v)
        start = (p_state, is_read, p_draft, replayed, draft_at, RECORD)
        # A tuple holds no None.
        KEEPS: gl.constexpr = waypoints is not None
        table = control
        if waypoints is not None:
            table = waypoints
        num_whole = num_tokens // CHUNK
        kept = (table, line_at, num_whole, written - LINE_SHIFT * written_stride, written_stride, state_at)
        parts = (p_before, is_part)
        final = (p_final, is_final)
        shares = (h_s, u_s)
        begun = (factors, buffers, shares, bars, place, num_chunks, start, parts, kept, final)
        gl.warp_specialize(
            [
                (advance_state, (begun, 0, KEEPS, HV, HALF, FACTORS)),
                (advance_state, (begun, 1, KEEPS, HV, HALF, FACTORS)),
                (make_outputs, (o_tiles, o, buffers, shares, bars, place, num_tokens, eps, NORMALIZE, HV, V, BLOCK_V)),
                (copy_chunks, (tiles, factors, buffers, full, empty, place, num_tokens, HV, FACTORS)),
            ],
            [4, 4, 1],
            REGISTERS,
        )


def can_walk(inputs: DeltaInputs) -> bool:
    """Return whether `launch_walk` runs on this device with heads of this size, given that tiles are copied whole."""
    fits = inputs.heads.key_dim in KEYS and inputs.heads.value_dim % BLOCK_V == 0
    return fits and on_hopper(inputs.device)


def launch_walk(
    inputs: DeltaInputs,
    lines: StateLines,
    rows: Rows,
    o: Tensor,
    transforms: Tensor,
    factors: Tensor,
    ends: Tensor,
    plan: RowSplits,
) -> None:
    """Walk through all rows; `ends` has what stands before their parts. Mutates `lines` and `o`."""
    heads = inputs.heads
    programs = rows.num_rows * plan.num_parts * heads.num_value_heads * (heads.value_dim // BLOCK_V)
    walk_kernel[(programs,)](
        make_tiles(inputs.q, heads.key_dim, CHUNK),
        make_tiles(inputs.k, heads.key_dim, CHUNK),
        make_tiles(inputs.v, BLOCK_V, CHUNK),
        make_tiles(transforms.flatten(0, 2), CHUNK, CHUNK),
        make_tiles(o.flatten(1), BLOCK_V, CHUNK),
        factors,
        heads.eps,
        ends,
        *lines.arguments(rows, o),
        plan.num_parts,
        plan.part_length,
        rows.waypoints,
        **inputs.sizes,
        HALF=HALF,
        BLOCK_V=BLOCK_V,
        CHUNK=CHUNK,
        FACTORS=FACTORS,
        **lines.constants,
        NORMALIZE=inputs.normalize,
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        num_warps=WARPS,
        maxnreg=FIRST_REGISTERS,
    )
