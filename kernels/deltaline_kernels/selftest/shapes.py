"""What the self-test computes with: sizes and dtypes of a model, and rows of every kind, few and many of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.attention.plan import AttentionHeads
from deltaline_kernels.device.delta_rule.inputs import MANY_HEADS as MANY_DELTA_HEADS
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads
from deltaline_kernels.kda.plan import MANY_HEADS as MANY_WALKED_HEADS
from deltaline_kernels.mamba2.plan import MANY_BLOCKS
from deltaline_kernels.mamba2.plan import MANY_HEADS as MANY_MAMBA_HEADS
from deltaline_kernels.rows import WAYPOINT_TOKENS, Rows

# From so many rows x heads on, both recurrences have kernels of their own.
MANY_HEADS = max(MANY_DELTA_HEADS, MANY_MAMBA_HEADS)
# And from so many heads of long rows on, these recurrences have walks of their own.
MANY_WALKED = {"kda": MANY_WALKED_HEADS, "mamba2": MANY_BLOCKS}
# Makes a tensor of a shape, in fp32, of some kind of contents.
Fill = Callable[..., Tensor]
# The name of a family and of what it ran on, what it computed and what its reference computed.
Compared = tuple[str, list[Tensor], list[Tensor]]
# What makes tensors of each kind of contents, by its name.
Fills = dict[str, Fill]
# Compares some families on inputs of these kinds.
Part = Callable[[Fills], Iterator[Compared]]


@dataclass(frozen=True)
class Shapes:
    """What `run_selftest` is told, by the same names; `heads` stand for those of other mixers too."""

    recurrence: str
    heads: DeltaHeads
    conv_width: int
    max_draft: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    norm_groups: int
    dt_limit: tuple[float, float]
    has_conv_bias: bool
    rotary_dim: int
    page_size: int
    is_gated: bool = True
    norms_heads: bool = True
    raw_gates: bool = False
    norms_first: bool = False
    lower_bound: float | None = None

    @property
    def is_mamba(self) -> bool:
        return self.recurrence == "mamba2"

    @property
    def is_paged(self) -> bool:
        """Whether the mixer's state is in pages."""
        return self.recurrence in ("attention", "latent_attention")

    @property
    def attention_heads(self) -> AttentionHeads:
        """The heads of an attention, whose own sizes stand for others here."""
        heads, is_latent = self.heads, self.recurrence == "latent_attention"
        value_dim = heads.value_dim if is_latent else heads.key_dim
        return AttentionHeads(
            heads.num_value_heads, heads.num_key_heads, heads.key_dim, value_dim, heads.scale, is_latent=is_latent
        )

    @property
    def conv_activation(self) -> str | None:
        """What follows the convolution."""
        return None if self.recurrence == "short_conv" else "silu"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the recurrence."""
        if self.is_mamba:
            return {"num_groups": self.heads.num_key_heads, "dt_limit": self.dt_limit}
        if self.recurrence == "kda":
            return {"num_key_heads": self.heads.num_key_heads, "lower_bound": self.lower_bound}
        return {"num_key_heads": self.heads.num_key_heads}


def batches(num_heads: int, max_draft: int, device: torch.device | str) -> dict[str, Rows]:
    """Rows of every kind, few and many of them; the long one has more than 128 tokens."""
    n, many = max_draft, -(-MANY_HEADS // num_heads)
    lines = list(range(1, many + 1))
    # On a GPU long enough that the memory of a walk's first chunks is used again.
    long = 130 if torch.device(device).type == "cpu" else 330
    control = {
        "decode": ([1, 1, 1], [1, 2, 0], [1, 2, 3], [1, 1, 1], [0, 0, 0], [0, 0, 0]),
        "verify": ([n, (n + 1) // 2], [1, 2], [1, 3], [0, 0], [n // 2, n], [0, 1]),
        "prefill": ([long, 37], [0, 1], [2, 3], [long, 37], [0, n], [0, 0]),
    }
    if torch.device(device).type != "cpu":
        # For many rows there are kernels of their own, and where heads are many, three rows are.
        control["one decode"] = ([1], [1], [1], [1], [0], [0])
        control["one verify"] = ([n], [1], [1], [0], [n], [1])
        control["many decodes"] = ([1] * many, lines, lines, [1] * many, [0] * many, [0] * many)
        control["many verifies"] = ([n] * many, lines, lines, [0] * many, [n] * many, [1] * many)
    return {kind: Rows.build(*fields, max_short=max_draft, device=device) for kind, fields in control.items()}


def waypoint_batch(max_draft: int, device: torch.device | str) -> Rows:
    """Return two long rows, the first of which leaves what it is on its way in lines 4 and 5."""
    lengths = [130, 37]
    waypoints = [(0, 64, 4), (0, 128, 5)] if max_draft < WAYPOINT_TOKENS else None
    fields = (lengths, [0, 1], [2, 3], lengths, [0, 0], [0, 0])
    return Rows.build(*fields, max_short=max_draft, device=device, waypoints=waypoints)


def one_and_many_prefills(least: int, num_heads: int, max_draft: int, device: torch.device | str) -> dict[str, Rows]:
    """A row, and rows of at least so many heads, both without a waypoint and with one, in the line behind theirs.

    The first is so long that the memory of a walk's first chunks is used again.
    """
    found = {}
    for name, num_rows in (("one prefill", 1), ("many prefills", -(-least // num_heads))):
        lengths, zeros, lines = [330] + [66] * (num_rows - 1), [0] * num_rows, list(range(1, num_rows + 1))
        fields = (lengths, lines, lines, lengths, zeros, zeros)
        found[name] = Rows.build(*fields, max_short=max_draft, device=device)
        waypoints = [(0, 128, num_rows + 1)] if max_draft < WAYPOINT_TOKENS else None
        kept = Rows.build(*fields, max_short=max_draft, device=device, waypoints=waypoints)
        found[f"{name} with a waypoint"] = kept
    return found


def short_batches(max_draft: int, device: torch.device | str) -> dict[str, Rows]:
    """Short rows of every length and number for which a kernel of its own is compiled."""
    found = {}
    for num_rows in (2, 128):
        for length in (1, 4, 8):
            n = min(length, max_draft)
            lines = list(range(1, num_rows + 1))
            lengths, zeros = [n] * num_rows, [0] * num_rows
            rows = Rows.build(lengths, lines, lines, lengths, zeros, zeros, max_short=max_draft, device=device)
            found[f"{num_rows} rows of {n}"] = rows
    return found


def projected(fill: Fill, num_tokens: int, shapes: Shapes) -> Tensor:
    """Make what the projection of a layer leaves, in its dtype: q, k, v, z, b and a side by side, `[T, *]`."""
    heads = shapes.heads
    return fill(num_tokens, heads.channels + heads.value_channels + 2 * heads.num_value_heads).to(shapes.dtype)
