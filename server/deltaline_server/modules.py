"""The linear modules of a layer family: what a checkpoint stores, and how its rows become those of a served projection.

Data, and one rule that orders rows. The rows of a weight, of a LoRA's B and of a DoRA's magnitude are ordered alike.
Knows no file and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from deltaline_server.model_config import ModelConfig, Scope
from deltaline_server.placement import Placement

MIXER = "linear_attn."
MLP = "mlp."
ALL = slice(None)


class Packed(StrEnum):
    """A served projection: modules that are multiplied as one, their rows one after the other."""

    IN_PROJ = "in_proj"
    OUT_PROJ = "out_proj"
    GATE_UP = "gate_up"
    DOWN = "down"


@dataclass(frozen=True)
class Module:
    """A linear module `[rows, columns]` as it is stored, of the whole layer.

    name: without the prefix and the layer's number. packed: the served projection that it is a part of.
    sections: its rows are `groups` times these, one after the other; served, each section comes whole, over all groups.
    shares_columns: ranks share its columns; else they share the groups, or each section where there is one group.
    """

    name: str
    packed: Packed
    rows: int
    columns: int
    sections: tuple[int, ...]
    groups: int = 1
    shares_columns: bool = False

    def served_shape(self, world_size: int) -> tuple[int, int]:
        """Return rows and columns of one rank's share."""
        if self.shares_columns:
            return self.rows, self.columns // world_size
        return self.rows // world_size, self.columns

    def columns_of(self, placement: Placement) -> slice:
        """Return the columns of a rank."""
        return placement.share(self.columns) if self.shares_columns else ALL

    def order(self, read: Callable[[slice], Tensor], placement: Placement) -> Tensor:
        """Return a rank's rows in the served order, `[served rows, ...]`; `read` gives rows as they are stored."""
        if self.shares_columns:
            return read(ALL)
        if self.groups == 1:
            return whole_sections(self.sections, read, placement)
        part = read(placement.share(self.rows)).unflatten(0, (self.groups // placement.world_size, -1))
        return torch.cat([section.flatten(0, 1) for section in part.split(self.sections, dim=1)])


def whole_sections(sections: Sequence[int], read: Callable[[slice], Tensor], placement: Placement) -> Tensor:
    """Return a rank's rows of sections that are stored one after the other, each shared out by itself."""
    slices, start = [], 0
    for size in sections:
        slices.append(placement.share(size, start))
        start += size
    return torch.cat([read(rows) for rows in slices])


def served_modules(config: ModelConfig, scope: Scope) -> tuple[Module, ...]:
    """Return the modules of a layer with a Gated DeltaNet mixer, those of one projection in the order of its rows.

    The rows of in_proj are q | k | v | z | b | a, those of gate_up gate | up.
    """
    mixer = _mixer(config)
    return mixer if scope is Scope.MIXER else mixer + mlp_modules(config)


def mlp_modules(config: ModelConfig) -> tuple[Module, ...]:
    """Return the modules of a dense MLP."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        Module(MLP + "gate_proj", Packed.GATE_UP, inner, hidden, (inner,)),
        Module(MLP + "up_proj", Packed.GATE_UP, inner, hidden, (inner,)),
        Module(MLP + "down_proj", Packed.DOWN, hidden, inner, (hidden,), shares_columns=True),
    )


def _mixer(config: ModelConfig) -> tuple[Module, ...]:
    shape, hidden = config.gated_delta_net, config.hidden_size
    keys, values, heads = shape.keys, shape.values, shape.num_value_heads
    out_proj = Module(MIXER + "out_proj", Packed.OUT_PROJ, hidden, values, (hidden,), shares_columns=True)
    if not config.interleaves_projections:
        return (
            Module(MIXER + "in_proj_qkv", Packed.IN_PROJ, 2 * keys + values, hidden, (keys, keys, values)),
            Module(MIXER + "in_proj_z", Packed.IN_PROJ, values, hidden, (values,)),
            Module(MIXER + "in_proj_b", Packed.IN_PROJ, heads, hidden, (heads,)),
            Module(MIXER + "in_proj_a", Packed.IN_PROJ, heads, hidden, (heads,)),
            out_proj,
        )
    # For each key head its q | k | v | z, and its b | a.
    group_values = shape.group * shape.value_dim
    qkvz = (shape.key_dim, shape.key_dim, group_values, group_values)
    ba = (shape.group, shape.group)
    groups = shape.num_key_heads
    return (
        Module(MIXER + "in_proj_qkvz", Packed.IN_PROJ, groups * sum(qkvz), hidden, qkvz, groups),
        Module(MIXER + "in_proj_ba", Packed.IN_PROJ, groups * sum(ba), hidden, ba, groups),
        out_proj,
    )
