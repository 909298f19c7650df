"""Where the states and drafts of a layer's lines are, in Triton: what `StateLines.arguments` passes as `lines`.

A tuple: the states that are read, those that are written, the drafts; then the distances of two lines of each, and of
the two halves of a line's drafts, in values. APART: the states that are written are not those that are read.
"""

import triton
import triton.language as tl


@triton.jit
def find_state(lines, line, i_head, HEAD: tl.constexpr):
    """Return a pointer to the state that is read of a line, of a head of HEAD values; `line` is int64."""
    return lines[0] + line * lines[3] + i_head.to(tl.int64) * HEAD


@triton.jit
def find_written(lines, line, i_head, HEAD: tl.constexpr, APART: tl.constexpr):
    """Return a pointer to the state that is written of a line, of a head of HEAD values; `line` is int64."""
    if APART:
        return lines[1] + line * lines[4] + i_head.to(tl.int64) * HEAD
    else:  # Triton reads on behind a return: what stands there may be of another dtype
        return find_state(lines, line, i_head, HEAD)


@triton.jit
def find_drafts(lines, line, half):
    """Return a pointer to the first record in a half of a line's drafts; both are int64."""
    return lines[2] + line * lines[5] + half * lines[6]


@triton.jit
def is_elsewhere(read, write, APART: tl.constexpr):
    """Return whether a row that writes does so elsewhere than where it reads."""
    return (write != read) | APART
