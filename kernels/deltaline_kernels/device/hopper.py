"""What the kernels for Hopper share, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def copy_rest(buffer, pointer, row_stride, num_rows, layout: gl.constexpr):
    """Copy the first num_rows rows of a tile to shared memory, and zeros behind them."""
    ROWS: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    buffer.store(gl.load(pointer + i * row_stride + j, mask=(i < num_rows) & (j >= 0), other=0.0))
