"""Linear modules: what a checkpoint stores, which share of it a rank holds, and how its rows become those of a served
projection. The rows of a weight, of a LoRA's B and of a DoRA's magnitude are ordered alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from deltaline_server.checkpoints.activation import Activation
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.ranks.ways import Ranks

ALL = slice(None)


@dataclass(frozen=True)
class Placement:
    """Where weights go: device and dtype, and the share of the heads that rank `rank` of `world_size` holds.

    ranks: what joins the ranks' outputs; None where there is one rank, or where each is left with its summand.
    leaves_summands: whether what projects back leaves them to the branch around it, which sums.
    """

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1
    ranks: Ranks | None = None
    leaves_summands: bool = False

    @property
    def summing(self) -> Ranks | None:
        """What sums where a mixer, an MLP or a mixture of experts ends; None where nothing does."""
        return None if self.leaves_summands else self.ranks

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ModelError(f"world_size: expected at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ModelError(f"rank: expected 0..{self.world_size - 1}, got {self.rank}")

    def share(self, size: int, start: int = 0) -> slice:
        """Return this rank's part of `size` rows or columns that begin at `start`; world_size divides size."""
        part = size // self.world_size
        return slice(start + self.rank * part, start + (self.rank + 1) * part)

    def among(self, heads: int) -> Placement:
        """Return the same place where there are only so many heads: with more ranks, several hold the same one."""
        if heads >= self.world_size:
            return self
        return replace(self, rank=self.rank * heads // self.world_size, world_size=heads)


class Packed(StrEnum):
    """A served projection: modules that are multiplied as one, their rows one after the other."""

    IN_PROJ = "in_proj"
    OUT_PROJ = "out_proj"
    STEP_AND_KEYS = "step_and_keys"
    """Of Mamba-1: from its channels to the low rank of their time steps, B and C."""
    STEP = "step"
    """From that rank to the time steps."""
    DECAY = "decay"
    """Of KDA: from a low rank to the decays of all key channels."""
    OUT_GATE = "out_gate"
    """Of KDA: from a low rank to the gates of its outputs."""
    ATTENTION_IN = "attention_in"
    """Of attention beside another mixer."""
    ATTENTION_OUT = "attention_out"
    QUERY_UP = "query_up"
    """Of latent attention, queries of their low rank."""
    LATENT_UP = "latent_up"
    """Keys and values of latents."""
    LINEAR = "linear"
    """Behind a block that layers share."""
    GATE_UP = "gate_up"
    DOWN = "down"
    LATENTS_IN = "latents_in"
    """Before experts that compute on latents, and behind them."""
    LATENTS_OUT = "latents_out"

    @property
    def is_taken_apart(self) -> bool:
        """Whether heads have its parts by themselves, in the model's dtype."""
        return self is Packed.LATENT_UP


@dataclass(frozen=True)
class Module:
    """A linear module `[rows, columns]` as it is stored, of the whole layer.

    name: without the prefix and the layer's number. packed: the served projection that it is a part of.
    sections: its rows are `groups` times these, one after the other; served, each section comes whole, over all groups.
    shares_columns: ranks share its columns; else they share the groups, or each section where there is one group.
    heads: of each section, where ranks may be more than these (Placement.among); empty where they are not. is_whole:
    every rank has all of it. takes_adapters: whether an adapter may change it.
    """

    name: str
    packed: Packed
    rows: int
    columns: int
    sections: tuple[int, ...]
    groups: int = 1
    shares_columns: bool = False
    heads: tuple[int, ...] = ()
    is_whole: bool = False
    takes_adapters: bool = True

    def served_shape(self, world_size: int) -> tuple[int, int]:
        """Return rows and columns of one rank's share."""
        if self.is_whole:
            return self.rows, self.columns
        if self.shares_columns:
            return self.rows, self.columns // world_size
        if self.heads:
            rows = zip(self.sections, self.heads, strict=True)
            return sum(size // min(world_size, heads) for size, heads in rows), self.columns
        return self.rows // world_size, self.columns

    def columns_of(self, placement: Placement) -> slice:
        """Return the columns of a rank."""
        return placement.share(self.columns) if self.shares_columns else ALL

    def order(self, read: Callable[[slice], Tensor], placement: Placement) -> Tensor:
        """Return a rank's rows in the served order, `[served rows, ...]`; `read` gives rows as they are stored."""
        if self.shares_columns or self.is_whole:
            return read(ALL)
        if self.groups == 1:
            return whole_sections(self.sections, read, placement, self.heads)
        part = read(placement.share(self.rows)).unflatten(0, (self.groups // placement.world_size, -1))
        return torch.cat([section.flatten(0, 1) for section in part.split(self.sections, dim=1)])


def without_adapters(modules: Iterable[Module]) -> tuple[Module, ...]:
    """The same modules, as such that take no adapters."""
    return tuple(replace(module, takes_adapters=False) for module in modules)


def whole_sections(
    sections: Sequence[int], read: Callable[[slice], Tensor], placement: Placement, heads: Sequence[int] = ()
) -> Tensor:
    """Return a rank's rows of sections that are stored one after the other, each shared out by itself.

    heads: as Module has them.
    """
    slices, start = [], 0
    for size, count in zip(sections, heads or [placement.world_size] * len(sections), strict=True):
        slices.append(placement.among(count).share(size, start))
        start += size
    return torch.cat([read(rows) for rows in slices])


@dataclass(frozen=True)
class MlpNames:
    """How a family stores an MLP. name: what stands before its modules' names. gate_up: the module, or the two modules,
    of gate and up, or of up alone where there is no gate; down: the one that projects back."""

    name: str = "mlp."
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: Activation = Activation.SILU


MLP = MlpNames()


def mlp_modules(names: MlpNames, hidden: int, inner: int) -> tuple[Module, ...]:
    """Return the modules of a dense MLP, the last of which projects back. The rows of gate_up are gate | up, or up."""
    sections = (inner,) * ((2 if names.activation.is_gated else 1) // len(names.gate_up))
    gate_up = (Module(names.name + one, Packed.GATE_UP, sum(sections), hidden, sections) for one in names.gate_up)
    down = Module(names.name + names.down, Packed.DOWN, hidden, inner, (hidden,), shares_columns=True)
    return *gate_up, down
