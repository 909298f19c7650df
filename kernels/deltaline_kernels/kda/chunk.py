"""KDA in chunks of 64 tokens, for long rows of 16-bit values, in Triton.

With what chunks are without a state (transform.py), and the state h before one:

    U = T (V + keys h^T);  o = queries h^T + scores U;  h = total h + U^T rests

`_advance` walks through the chunks of a row with a block of its state in registers. It computes the transpose of what
stands above: then each product's left operand is what the last one left in registers. No product has more than 32 rows:
below 64 Triton uses the synchronous matrix instruction, which the assembler (ptxas 12.8 in Triton 3.6 and 3.7) gets
right with operands in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltaline_kernels.device.delta_rule.inputs import DeltaInputs
from deltaline_kernels.device.delta_rule.parts import empty_ends, join_parts
from deltaline_kernels.device.lines import find_drafts, find_state, find_written, is_elsewhere
from deltaline_kernels.device.replay import fold_drafts
from deltaline_kernels.device.row import load_row
from deltaline_kernels.device.waypoints import TOKENS, find_waypoint, keep_state
from deltaline_kernels.kda.hopper_chunk import fits_walk, launch_walk
from deltaline_kernels.kda.hopper_transform import fits_hopper
from deltaline_kernels.kda.plan import CHUNK, choose_plan
from deltaline_kernels.kda.transform import SMALLEST_KEY, launch_transform
from deltaline_kernels.rows import Rows, StateLines

# Rows of a head's state per program. Chosen by reasoning, not measured.
BLOCK_V, WARPS, STAGES = 32, 4, 2
# Of larger keys a program's part of the state would not fit in its registers.
LARGEST_KEY = 128


# One compiled variant whatever rows a batch has: nothing is compiled while serving.
@triton.jit(do_not_specialize=["control_stride"], do_not_specialize_on_alignment=["control", "waypoints"])
def _advance(
    chunks,
    v,
    v_stride,
    lines,
    o,
    control,
    control_stride,
    waypoints,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LINE_SHIFT: tl.constexpr,
    APART: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    queries, keys, rests, all_scores, transforms, total = chunks
    i_v = tl.program_id(0) % BLOCKS
    i_hv = tl.program_id(0) // BLOCKS % HV
    i_row = tl.program_id(0) // (BLOCKS * HV)
    i_h = i_hv // (HV // H)
    begin, n, read, write, _, replayed, half = load_row(control, control_stride, i_row)
    live = (read != -1) | (write != -1)

    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_c = tl.arange(0, CHUNK)
    in_k, in_v = o_k < K, o_v < V
    in_h = in_v[:, None] & in_k[None, :]
    o_h = o_v[:, None] * K + o_k[None, :]
    p_state = find_state(lines, read - LINE_SHIFT, i_hv, V * K)
    b_h = tl.load(p_state + o_h, mask=in_h & (read > 0), other=0.0).to(tl.float32)
    p_drafts = find_drafts(lines, read - LINE_SHIFT, half)
    b_h = fold_drafts(b_h, p_drafts, replayed, i_h, i_hv, o_k, o_v, H, HV, K, V, KEYED=True)

    o_x = o_c[:, None] * K + o_k[None, :]
    in_x = (o_c[:, None] >= 0) & in_k[None, :]
    o_m = o_c[:, None] * CHUNK + o_c[None, :]
    slot = (begin // CHUNK + i_row) * HV + i_hv
    for done in tl.range(0, tl.where(live, n, 0), CHUNK, num_stages=STAGES):
        place = slot + done // CHUNK * HV
        b_k = tl.load(keys + place * (CHUNK * K) + o_x, mask=in_x, other=0.0)  # (CHUNK, BLOCK_K)
        b_q = tl.load(queries + place * (CHUNK * K) + o_x, mask=in_x, other=0.0)
        b_r = tl.load(rests + place * (CHUNK * K) + o_x, mask=in_x, other=0.0)
        b_t = tl.load(transforms + place * (CHUNK * CHUNK) + o_m)  # (CHUNK, CHUNK)
        b_s = tl.load(all_scores + place * (CHUNK * CHUNK) + o_m)
        b_total = tl.load(total + place * K + o_k, mask=in_k, other=0.0)
        o_t = begin + done + o_c[None, :]
        inside = in_v[:, None] & (done + o_c < n)[None, :]
        b_v = tl.load(v + o_t * v_stride + i_hv * V + o_v[:, None], mask=inside, other=0.0)  # (BLOCK_V, CHUNK)

        b_hd = b_h.to(b_k.dtype)
        b_new = b_v.to(tl.float32) + tl.dot(b_hd, tl.trans(b_k))
        b_u = tl.dot(b_new.to(b_k.dtype), tl.trans(b_t)).to(b_k.dtype)
        b_o = tl.dot(b_u, tl.trans(b_s), acc=tl.dot(b_hd, tl.trans(b_q)))
        tl.store(o + (o_t * HV + i_hv) * V + o_v[:, None], b_o.to(o.dtype.element_ty), mask=inside)
        b_h = tl.dot(b_u, b_r, acc=b_h * b_total[None, :])
        if waypoints is not None:
            reached = done + CHUNK
            if reached % TOKENS == 0:
                line = find_waypoint(waypoints, begin, n, i_row, reached)
                keep_state(line, lines, b_h, o_h, in_h, i_hv, V * K, LINE_SHIFT, APART)

    for done in range(0, tl.where(live, 0, n), CHUNK):
        p_o = o + ((begin + done + o_c[None, :]) * HV + i_hv) * V + o_v[:, None]
        dead = in_v[:, None] & (done + o_c < n)[None, :]
        tl.store(p_o, tl.zeros((BLOCK_V, CHUNK), o.dtype.element_ty), mask=dead)
    # An empty row changes its line only by a replay or by a move.
    if (write > 0) & ((n > 0) | (replayed > 0) | is_elsewhere(read, write, APART)):
        p_new = find_written(lines, write - LINE_SHIFT, i_hv, V * K, APART) + o_h
        # Other threads than those that store a value may have loaded it.
        tl.debug_barrier()
        tl.store(p_new, b_h.to(p_new.dtype.element_ty), mask=in_h)


def launch_chunk(inputs: DeltaInputs, lines: StateLines, rows: Rows, o: Tensor) -> None:
    """Run `rows` of 16-bit values with keys of at most 128, none of which is a VERIFY, in chunks.

    Mutates `lines` and `o`.
    """
    if rows.num_rows == 0:
        return
    heads = inputs.heads
    chunks = launch_transform(inputs, rows)
    if fits_hopper(inputs) and fits_walk(inputs, o):
        plan = choose_plan(heads, rows.num_rows, inputs.num_tokens, rows.max_length)
        ends = empty_ends(inputs, plan)
        if plan.num_parts > 1:
            launch_walk(inputs, lines, rows, o, chunks, ends, plan, ends_only=True)
            join_parts(ends, heads, rows, plan)
        launch_walk(inputs, lines, rows, o, chunks, ends, plan, ends_only=False)
        return
    _advance[(rows.num_rows * heads.num_value_heads * triton.cdiv(heads.value_dim, BLOCK_V),)](
        tuple(chunks),
        inputs.v,
        inputs.v.stride(0),
        *lines.arguments(rows, o),
        rows.waypoints,
        **inputs.sizes,
        BLOCK_K=max(SMALLEST_KEY, triton.next_power_of_2(heads.key_dim)),
        BLOCK_V=BLOCK_V,
        CHUNK=CHUNK,
        **lines.constants,
        STAGES=STAGES,
        num_warps=WARPS,
    )
