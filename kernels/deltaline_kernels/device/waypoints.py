"""Waypoints, in Triton: lines that the states of a row go to on its way, as `Rows.waypoints` has them.

Kernels take None where a launch has none, and then are what they would be without a word of this.
"""

import triton
import triton.language as tl

from deltaline_kernels.device.lines import find_written
from deltaline_kernels.rows import WAYPOINT_TOKENS

TOKENS = tl.constexpr(WAYPOINT_TOKENS)


@triton.jit
def find_waypoint(waypoints, begin, n, i_row, done):
    """Return the line, int64, for what a row of n tokens is behind `done` of them, or a number below 1 for none.

    `done` is a multiple of TOKENS, at least 1 of them; behind the row's end it has no line.
    """
    return tl.load(waypoints + begin // TOKENS + i_row + done // TOKENS - 1, mask=done <= n, other=-1).to(tl.int64)


@triton.jit
def find_stop(waypoints, begin, n, i_row, done, end):
    """Return the first of a row's places behind `done` tokens that has a line, and the line; else `end` and a number
    below 1. All are multiples of TOKENS, and `end` comes after `done`.
    """
    stop = done + TOKENS
    line = find_waypoint(waypoints, begin, n, i_row, stop)
    while (line < 1) & (stop < end):
        stop += TOKENS
        line = find_waypoint(waypoints, begin, n, i_row, stop)
    return stop, line


@triton.jit
def keep_state(
    line, lines, tile, offsets, mask, i_head, HEAD: tl.constexpr, LINE_SHIFT: tl.constexpr, APART: tl.constexpr
):
    """Store a tile of a head's state at its offsets in a waypoint's line, if there is one."""
    if line > 0:
        p_kept = find_written(lines, line - LINE_SHIFT, i_head, HEAD, APART) + offsets
        tl.store(p_kept, tile.to(p_kept.dtype.element_ty), mask=mask)
