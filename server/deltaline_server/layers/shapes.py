"""Sizes and constants of mixers: what the config says, and what follows for projections and state."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.layers.rope_scaling import RopeScaling


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of a mixer with a convolution and a recurrent state, of the whole layer or of one rank's share.

    The state may be empty (ShortConvShape).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def key_channels(self) -> int:
        """Channels of all keys, H * K; queries have as many."""
        return self.num_key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        """Channels of all values, HV * V."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, D = 2 * H * K + HV * V."""
        return 2 * self.key_channels + self.value_channels

    @property
    def state(self) -> tuple[int, int, int]:
        """The recurrent state, `[HV, V, K]`."""
        return self.num_value_heads, self.value_dim, self.key_dim

    @property
    def record(self) -> int:
        """Values that a draft token is kept as: its key, its update, its gates."""
        return self.key_channels + self.value_channels + self.num_value_heads * self.head_gates

    @property
    def head_gates(self) -> int:
        """Gates of one head in the record of a draft token."""
        return 1


@dataclass(frozen=True)
class GatedDeltaNetShape(RecurrentShape):
    """Sizes of a Gated DeltaNet mixer. doubles_updates: whether the strength of an update is twice a sigmoid."""

    doubles_updates: bool = False

    def test_sizes(self) -> dict[str, Any]:
        """The arguments of the kernels' self-test for a model with such mixers."""
        sizes = asdict(self)
        return sizes | {"raw_gates": sizes.pop("doubles_updates")}

    def shard(self, world_size: int) -> Self:
        """Return one rank's share: whole key heads and their value heads. Raises ModelError if that can't be done."""
        key_heads = _share(self.num_key_heads, "key heads", world_size)
        return replace(self, num_key_heads=key_heads, num_value_heads=self.num_value_heads // world_size)


@dataclass(frozen=True)
class KdaShape(RecurrentShape):
    """Sizes of a KDA mixer, whose key heads are its value heads. lower_bound: of the log decay of a key channel, None
    for none."""

    lower_bound: float | None = None

    @property
    def head_gates(self) -> int:
        """A decay of each key channel."""
        return self.key_dim

    @property
    def gate_rank(self) -> int:
        """Channels that decays are made of, and the gates of outputs."""
        return self.value_dim

    def test_sizes(self) -> dict[str, Any]:
        """The arguments of the kernels' self-test for a model with such mixers."""
        return asdict(self) | {"recurrence": "kda"}

    def shard(self, world_size: int) -> Self:
        """Return one rank's share: whole heads. Raises ModelError if that can't be done."""
        heads = _share(self.num_value_heads, "heads", world_size)
        return replace(self, num_key_heads=heads, num_value_heads=heads)


@dataclass(frozen=True)
class Mamba2Shape(RecurrentShape):
    """Sizes and constants of a Mamba2 mixer: the key heads are its groups G, with B and C of S = key_dim channels; the
    value heads are its heads, with x of P = value_dim channels.

    norm_groups: parts of the channels that the gated norm takes one by one, 0 where there is only a gate. dt_limit:
    least and greatest time step. has_conv_bias, has_bias: whether the convolution has a bias, and whether both
    projections have; has_out_bias: whether the second one has, None for as the first. norms_first: whether the norm is
    before the gate. input_scale, output_scale: what input and output are multiplied by; section_scales: what the parts
    z, x, B, C and dt of the first projection are, None where nothing.
    """

    norm_groups: int
    dt_limit: tuple[float, float]
    has_conv_bias: bool
    has_bias: bool
    has_out_bias: bool | None = None
    norms_first: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0
    section_scales: tuple[float, ...] | None = None

    @property
    def projected(self) -> tuple[int, int, int, int, int]:
        """Channels of the parts z, x, B, C and dt of the first projection."""
        return self.value_channels, self.value_channels, self.key_channels, self.key_channels, self.num_value_heads

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether either projection has a bias."""
        return self.has_bias, self.has_bias if self.has_out_bias is None else self.has_out_bias

    def test_sizes(self) -> dict[str, Any]:
        """The arguments of the kernels' self-test for a model with such mixers."""
        own = ("has_bias", "has_out_bias", "input_scale", "output_scale", "section_scales")
        sizes = {name: value for name, value in asdict(self).items() if name not in own}
        return sizes | {"recurrence": "mamba2", "norm_groups": self.norm_groups or None}

    def shard(self, world_size: int) -> Self:
        """Return one rank's share: whole heads with their groups, and the norm's channels.

        Of fewer groups than ranks several ranks have the same one; of fewer groups of the norm, parts of one.
        Raises ModelError if that can't be done.
        """
        return replace(
            self,
            num_key_heads=_share_or_copy(self.num_key_heads, "groups", world_size),
            num_value_heads=_share(self.num_value_heads, "heads", world_size),
            norm_groups=self.norm_groups and _share_or_copy(self.norm_groups, "groups of the mixer's norm", world_size),
        )


@dataclass(frozen=True)
class Mamba1Shape(RecurrentShape):
    """Sizes and constants of a Mamba-1 mixer: the channels are the values, in heads that ranks share out; B and C of
    S = key_dim states are one key head's, which all ranks have. A draft token's gates are the channels' time steps.

    step_rank: channels that time steps are projected from. norm_eps: of the norms of those, B and C, 0 where there is
    none; has_norm_weights: whether these have weights. has_conv_bias, has_bias: whether the convolution has a bias, and
    whether the first and the last projection have.
    """

    step_rank: int
    norm_eps: float
    has_norm_weights: bool
    has_conv_bias: bool
    has_bias: bool

    @classmethod
    def of(cls, channels: int, state_dim: int, conv_width: int, **more: Any) -> Self:
        """Of so many channels, in heads as those of ShortConvShape."""
        size = math.gcd(channels, 16)
        return cls(1, channels // size, state_dim, size, conv_width, **more)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: the values alone."""
        return self.value_channels

    @property
    def head_gates(self) -> int:
        """A time step of each channel."""
        return self.value_dim

    @property
    def projected(self) -> tuple[int, int, int]:
        """Channels of the parts of the second projection: time steps' rank, B and C."""
        return self.step_rank, self.key_dim, self.key_dim

    def test_sizes(self) -> dict[str, Any]:
        """The arguments of the kernels' self-test for a model with such mixers."""
        return {
            "recurrence": "mamba1",
            "num_key_heads": 0,
            "num_value_heads": 1,
            "key_dim": self.key_dim,
            "value_dim": self.value_channels,
            "conv_width": self.conv_width,
            "has_conv_bias": self.has_conv_bias,
        }

    def shard(self, world_size: int) -> Self:
        """Return one rank's share: whole heads of channels. Raises ModelError if that can't be done."""
        what = f"heads of {self.value_dim} channels"
        return replace(self, num_value_heads=_share(self.num_value_heads, what, world_size))


@dataclass(frozen=True)
class ShortConvShape(RecurrentShape):
    """Sizes of a mixer whose only state is that of its convolution: the channels are the values, in heads that ranks
    share out; there are no keys, so that the recurrent state `[HV, V, 0]` is empty, and a draft token leaves no record.

    has_bias: whether the convolution and both projections have one.
    """

    has_bias: bool = False

    @classmethod
    def of(cls, channels: int, conv_width: int, *, has_bias: bool) -> Self:
        """Of so many channels, in heads of 16 or of the largest power of two below it that divides them: 32 bytes of a
        captured state lie together where an element has 16 bits."""
        size = math.gcd(channels, 16)
        return cls(0, channels // size, 0, size, conv_width, has_bias)

    @property
    def record(self) -> int:
        """Nothing: the line has the drafts themselves."""
        return 0

    def test_sizes(self) -> dict[str, Any]:
        """The arguments of the kernels' self-test for a model with such mixers."""
        return {
            "recurrence": "short_conv",
            "num_key_heads": 0,
            "num_value_heads": self.num_value_heads,
            "value_dim": self.value_dim,
            "conv_width": self.conv_width,
            "has_conv_bias": self.has_bias,
        }

    def shard(self, world_size: int) -> Self:
        """Return one rank's share: whole heads. Raises ModelError if that can't be done."""
        what = f"heads of {self.value_dim} channels"
        return replace(self, num_value_heads=_share(self.num_value_heads, what, world_size))


class QkNorm(StrEnum):
    """What the queries of an attention mixer are normalised over, and its keys."""

    NONE = "none"
    HEAD = "head"
    """Each head by itself, all with one weight."""
    WHOLE = "whole"
    """The channels of all heads."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and constants of an attention mixer, of the whole layer or of one rank's share.

    rotary_dim: the first channels of a head, which are rotated, 0 for none; rope_theta: the base of their wavelengths;
    rope_scaling: what is made of these, None for nothing. max_positions: most tokens of a sequence. has_bias: whether
    all projections have one. is_gated: whether the output has a gate. scale: of the products of queries and keys, None
    for head_dim ** -0.5. input_scale, output_scale: what input and output are multiplied by.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    max_positions: int
    has_bias: bool = False
    is_gated: bool = True
    qk_norm: QkNorm = QkNorm.HEAD
    scale: float | None = None
    input_scale: float = 1.0
    output_scale: float = 1.0
    rope_scaling: RopeScaling | None = None

    @property
    def query_channels(self) -> int:
        """Channels of all queries, HQ * D; an output gate has as many."""
        return self.num_heads * self.head_dim

    @property
    def key_channels(self) -> int:
        """Channels of all keys, HKV * D; values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def page_parts(self) -> int:
        """Tensors of pages: keys and values."""
        return 2

    @property
    def table_channels(self) -> int:
        """Values that the table of rotations has of a position: where none are rotated, those of a pair that stays."""
        return max(2, self.rotary_dim)

    def test_sizes(self) -> dict[str, Any]:
        """The arguments of the kernels' self-test for a model with such mixers."""
        return {
            "recurrence": "attention",
            "num_key_heads": self.num_kv_heads,
            "num_value_heads": self.num_heads,
            "key_dim": self.head_dim,
            "value_dim": self.head_dim,
            "rotary_dim": self.table_channels,
            "is_gated": self.is_gated,
            "norms_heads": self.qk_norm is QkNorm.HEAD,
        }

    def shard(self, world_size: int) -> AttentionShape:
        """Return one rank's share: whole query heads and their key heads, of fewer than ranks the same one as others.

        Raises ModelError if that can't be done.
        """
        if self.qk_norm is QkNorm.WHOLE and world_size > 1:
            raise ModelError(
                f"--tensor-parallel: expected 1, as queries are normalised over all heads, got {world_size}"
            )
        return replace(
            self,
            num_kv_heads=_share_or_copy(self.num_kv_heads, "key-value heads", world_size),
            num_heads=_share(self.num_heads, "query heads", world_size),
        )


PagedShape = AttentionShape | LatentShape
"""The sizes of a mixer whose state is in pages: of a token num_kv_heads of head_dim channels in each of page_parts."""
MixerShape = GatedDeltaNetShape | KdaShape | Mamba1Shape | Mamba2Shape | ShortConvShape | PagedShape
"""The sizes of any mixer."""


def _share(count: int, what: str, world_size: int) -> int:
    """One rank's share of so many heads. Raises ModelError if they can't be dealt out."""
    if count % world_size:
        raise ModelError(f"--tensor-parallel: expected a divisor of {count} {what}, got {world_size}")
    return count // world_size


def _share_or_copy(count: int, what: str, world_size: int) -> int:
    """Likewise, where several ranks may have the same one."""
    if count % world_size and world_size % count:
        raise ModelError(f"--tensor-parallel: expected a divisor or a multiple of {count} {what}, got {world_size}")
    return max(count // world_size, 1)
