"""What the self-test computes with the Mamba-1 recurrence."""

from collections.abc import Iterator

from deltaline_kernels.mamba1 import mamba1, mamba1_reference
from deltaline_kernels.rows import Rows
from deltaline_kernels.selftest.shapes import Compared, Fill, Shapes


def compare_mamba1(fill: Fill, rows: Rows, shapes: Shapes) -> Iterator[Compared]:
    """Yield the recurrence's name, what it computed of rows and what its reference computed, with a gate."""
    heads, num_tokens, num_lines = shapes.heads, int(rows.query_start_loc[-1]), max(6, rows.num_rows + 1)
    channels, state_dim = heads.value_channels, heads.key_dim
    x, dt, z = (fill(num_tokens, channels).to(shapes.dtype) for _ in range(3))
    # B and C of moderate length: products of many large numbers would hide what is added to them.
    BC = fill(num_tokens, 2 * state_dim).mul_(heads.scale**0.5).to(shapes.dtype)
    weights = (fill(channels, state_dim), fill(channels), fill(channels))
    state = fill(num_lines, channels, state_dim).to(shapes.state_dtype)
    # Drafts as a VERIFY writes them: time steps of at least 0.
    drafts = fill(num_lines, 2, shapes.max_draft, state_dim + 2 * channels).mul_(heads.scale**0.5)
    drafts[..., -channels:].abs_()
    want_state, want_drafts = state.clone(), drafts.clone()
    y = mamba1(x, dt, BC, z, *weights, state, drafts, rows)
    want = mamba1_reference(x, dt, BC, z, *weights, want_state, want_drafts, rows)
    yield "mamba1", [y, state, drafts], [want, want_state, want_drafts]
