"""Kernels that write down which chunk each slot has, in Triton and in Gluon: for where triton is installed."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deltaline_kernels.device.chunks import find_chunk
from deltaline_kernels.kda.hopper_transform import find_chunk as find_chunk_in_gluon


@triton.jit  # type: ignore[untyped-decorator]
def write_chunks(control, found, num_rows, first_slot, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write first token, end of the row and whether there is a chunk to found `[slots, 3]`, from first_slot on."""
    i = tl.program_id(0)
    first, end, is_here = find_chunk(control, num_rows, first_slot + i, CHUNK)
    tl.store(found + 3 * i, first)
    tl.store(found + 3 * i + 1, end)
    tl.store(found + 3 * i + 2, is_here.to(tl.int32))


@gluon.jit  # type: ignore[untyped-decorator]
def write_chunks_in_gluon(  # type: ignore[no-untyped-def]
    control, found, num_rows, first_slot, CHUNK: gl.constexpr, WARPS: gl.constexpr
):
    """Do what `write_chunks` does."""
    i = gl.program_id(0)
    first, end, is_here = find_chunk_in_gluon(control, num_rows, first_slot + i, CHUNK, WARPS)
    gl.store(found + 3 * i, first.to(gl.int32))
    gl.store(found + 3 * i + 1, end.to(gl.int32))
    gl.store(found + 3 * i + 2, is_here.to(gl.int32))
