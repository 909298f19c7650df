"""What configs call the sizes and constants of mixers, and how they are read, as transformers reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import MAX_FLOAT, ConfigReader
from deltaline_server.layers.gated_delta_net import DeltaLayout
from deltaline_server.layers.shapes import AttentionShape, GatedDeltaNetShape, Mamba2Shape, QkNorm, ShortConvShape
from deltaline_server.models.parts import MAX_SIZE

MAX_HEADS = 4096
MAX_POSITIONS = 1 << 24
# Of Zamba2 where its config asks for a long context, whatever it says of positions.
LONG_POSITIONS = 16384
# What may stand beside the rope type. The sections are those of three-dimensional positions (mrope): of text, all three
# positions are the token's, and rotate as one does.
ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
# What `ssm_cfg` may say: what is read, what must be as it is served, and what concerns training alone.
SSM_FORM = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False}
SSM_READ = ("layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "dt_limit", "conv_bias", "bias")
SSM_TRAINING = ("A_init_range", "dt_min", "dt_max", "dt_init_floor", "conv_init", "chunk_size", "use_mem_eff_path")
SSM_KEYS = (*SSM_READ, *SSM_FORM, *SSM_TRAINING)


@dataclass(frozen=True)
class GatedDeltaNetKeys:
    """Gated DeltaNet mixers. layout: how they are stored. eps: of their norm, None for that of the other norms.
    doubles_updates: the key that says so, True where it is absent; None where none are doubled."""

    layout: DeltaLayout = DeltaLayout.TOGETHER
    eps: float | None = None
    doubles_updates: str | None = None

    def read(self, config: ConfigReader) -> GatedDeltaNetShape:
        """Read their sizes. Raises ModelError naming the key."""
        shape = GatedDeltaNetShape(
            num_key_heads=config.integer("linear_num_key_heads", 1, MAX_HEADS),
            num_value_heads=config.integer("linear_num_value_heads", 1, MAX_HEADS),
            key_dim=config.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
            value_dim=config.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
            conv_width=config.integer("linear_conv_kernel_dim", MIN_CONV_WIDTH, MAX_CONV_WIDTH),
            doubles_updates=self.doubles_updates is not None and config.flag(self.doubles_updates, default=True),
        )
        if shape.num_value_heads % shape.num_key_heads:
            raise config.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({shape.num_key_heads})")
        return shape


def has_rope_theta(config: ConfigReader) -> bool:
    """Whether the base of rotary embeddings is a number or absent; it is null in a config that has none of them."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    places = [config.nested(name), config] if config.get(name) else [config]
    saying = next((place for place in places if place.says("rope_theta")), None)
    return saying is None or saying.get("rope_theta") is not None


@dataclass(frozen=True)
class RotaryKeys:
    """Rotary embeddings of the default kind. share: of a head's channels, where a config says nothing. beside: whether
    `partial_rotary_factor` may stand in the config itself; within: whether it may where the kind stands. theta: the
    base of wavelengths where a config says nothing.
    """

    share: float = 1.0
    beside: bool = False
    within: bool = False
    theta: float = 10000.0

    def read(self, config: ConfigReader, head_dim: int) -> tuple[int, float]:
        """Channels that are rotated, and the base of their wavelengths.

        As `rope_scaling` says, else `rope_parameters`, else the config itself. Raises ModelError naming the key.
        """
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.nested(name) if config.get(name) else ConfigReader({}, "")
        kind = "rope_type" if rope.get("rope_type") is not None else "type"
        rope.require(kind, "default", default="default")
        rope.only(ROPE_KEYS)
        theta = rope if rope.get("rope_theta") is not None else config
        share, factor = self.share, config
        if self.within and rope.get("partial_rotary_factor") is not None:
            factor = rope
        if self.beside or factor is rope:
            share = factor.positive("partial_rotary_factor", default=share)
        rotary_dim = int(head_dim * share)
        if share > 1 or rotary_dim < 2 or rotary_dim % 2:
            raise factor.fail("partial_rotary_factor", f"an even number of rotated channels in 2..{head_dim}")
        return rotary_dim, theta.positive("rope_theta", default=self.theta)


@dataclass(frozen=True)
class AttentionKeys:
    """Attention mixers. heads, kv_heads, head_dim, positions: where a config says nothing. None: for heads it must say
    it, kv_heads are as many as heads, head_dim is hidden_size / heads.

    name: what stands before the names of a mixer's tensors. rotates: whether a config has rotary embeddings, None where
    all have; rotary: None where none has. scale: the key of what multiplies the products of queries and keys, None
    where the head's size says it. bias: the key of whether projections have biases, None where they have none.
    takes_embeddings: whether the input is hidden states and embeddings beside each other.
    key_scale, input_scale, output_scale: the keys of what keys, input and output are multiplied by, None where nothing
    is. out, norms: as AttentionFamily has them.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 32768
    name: str = "self_attn."
    is_gated: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    rotary: RotaryKeys | None = RotaryKeys()
    rotates: Callable[[ConfigReader], bool] | None = None
    scale: str | None = None
    bias: str | None = "attention_bias"
    key_scale: str | None = None
    input_scale: str | None = None
    output_scale: str | None = None
    takes_embeddings: bool = False
    out: str = "o_proj"
    norms: tuple[str, str] = ("q_norm.weight", "k_norm.weight")

    def read(self, config: ConfigReader) -> AttentionShape:
        """Read their sizes. Raises ModelError naming the key, also of a kind of rotary embedding that is not served."""
        heads = config.integer("num_attention_heads", 1, MAX_HEADS, default=self.heads)
        kv_heads, named = heads, config.says("num_key_value_heads")  # null: as many as heads
        if config.get("num_key_value_heads") is not None or (self.kv_heads is not None and not named):
            kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, default=self.kv_heads)
        if heads % kv_heads:
            raise config.fail("num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})")
        head_dim = self._head_dim(config, heads)
        rotary_dim, theta = 0, 1.0
        if self.rotary is not None and (self.rotates is None or self.rotates(config)):
            rotary_dim, theta = self.rotary.read(config, head_dim)
        scale = None if self.scale is None else config.positive(self.scale, default=1.0)
        positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS, default=self.positions)
        if self.takes_embeddings:
            scale = (head_dim / 2) ** -0.5
            positions = LONG_POSITIONS if config.flag("use_long_context", default=False) else positions
        if self.key_scale is not None and (keys := config.positive(self.key_scale, default=1.0)) != 1.0:
            scale = (head_dim**-0.5 if scale is None else scale) * keys
        return AttentionShape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            max_positions=positions,
            has_bias=self.bias is not None and config.flag(self.bias, default=False),
            is_gated=self.is_gated,
            qk_norm=self.qk_norm,
            scale=scale,
            input_scale=1.0 if self.input_scale is None else config.positive(self.input_scale, default=1.0),
            output_scale=1.0 if self.output_scale is None else config.positive(self.output_scale, default=1.0),
        )

    def _head_dim(self, config: ConfigReader, heads: int) -> int:
        """Channels of a head."""
        if self.takes_embeddings:
            head_dim = 2 * config.integer("hidden_size", 1, MAX_SIZE) // heads
            if not 2 <= head_dim <= MAX_HEAD_DIM:
                raise config.fail("num_attention_heads", f"twice hidden_size / 2..{MAX_HEAD_DIM}")
            return head_dim
        if self.head_dim is not None or config.get("head_dim") is not None:
            return config.integer("head_dim", 2, MAX_HEAD_DIM, default=self.head_dim)
        head_dim = config.integer("hidden_size", 1, MAX_SIZE) // heads
        if not 2 <= head_dim <= MAX_HEAD_DIM:
            raise config.fail("num_attention_heads", f"hidden_size / 2..{MAX_HEAD_DIM}, as there is no head_dim")
        return head_dim


@dataclass(frozen=True)
class Mamba2Keys:
    """Mamba2 mixers: the keys of their sizes; of several spellings the first that has a value counts.

    name: what stands before the names of a mixer's tensors. default_groups, default_state: where a config says nothing.
    head_dim: None where it follows from the channels. conv_bias: None where there always is one. eps: of the norm, None
    for that of the other norms.
    expand: of a model whose channels are this many times its hidden size, None where they need not be. least_dt: the
    key of the least time step, where there is no greatest one; None where `time_step_limit` has both. norms_groups:
    whether the gated norm takes groups one by one. channels: the key of their channels, where these need not be
    `expand` times the hidden size but where it is null. norm: the key of whether there is a norm, norms_first: of
    whether it is before the gate, None where it is behind. out_bias: the key of whether the second projection has a
    bias, None for as the first. input_scale, output_scale, section_scales: the keys of what input and output and the
    parts of the first projection are multiplied by, None where nothing is.
    """

    num_heads: str
    head_dim: str | None
    state: str
    groups: tuple[str, ...]
    conv_width: tuple[str, ...]
    conv_bias: tuple[str, ...] | None
    bias: str
    name: str = "mixer."
    default_groups: int = 8
    default_state: int = 128
    expand: str | None = None
    least_dt: tuple[str, ...] | None = None
    norms_groups: bool = False
    channels: str | None = None
    norm: str | None = None
    norms_first: str | None = None
    out_bias: str | None = None
    input_scale: str | None = None
    output_scale: str | None = None
    section_scales: str | None = None
    eps: float | None = None

    def read(self, config: ConfigReader) -> Mamba2Shape:
        """Read their sizes and constants. Raises ModelError naming the key."""
        num_heads, head_dim = self._heads(config)
        key = config.spelling(*self.groups)
        groups = config.integer(key, 1, MAX_HEADS, default=self.default_groups)
        if num_heads % groups:
            raise config.fail(key, f"a divisor of {num_heads} heads")
        if self.least_dt is None:
            limits = _time_step_limits(config, "time_step_limit")
        else:
            limits = config.positive(config.spelling(*self.least_dt), default=0.001), math.inf
        norm_groups = groups if self.norms_groups else 1
        if self.norm is not None and not config.flag(self.norm, default=False):
            norm_groups = 0
        return Mamba2Shape(
            num_key_heads=groups,
            num_value_heads=num_heads,
            value_dim=head_dim,
            key_dim=config.integer(self.state, 1, MAX_HEAD_DIM, default=self.default_state),
            conv_width=config.integer(config.spelling(*self.conv_width), MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=4),
            norm_groups=norm_groups,
            dt_limit=limits,
            has_conv_bias=self.conv_bias is None or config.flag(config.spelling(*self.conv_bias), default=True),
            has_bias=config.flag(self.bias, default=False),
            has_out_bias=None if self.out_bias is None else config.flag(self.out_bias, default=False),
            norms_first=norm_groups > 0
            and self.norms_first is not None
            and config.flag(self.norms_first, default=True),
            input_scale=1.0 if self.input_scale is None else config.positive(self.input_scale, default=1.0),
            output_scale=1.0 if self.output_scale is None else config.positive(self.output_scale, default=1.0),
            section_scales=None if self.section_scales is None else config.positives(self.section_scales, 5),
        )

    def _heads(self, config: ConfigReader) -> tuple[int, int]:
        """Heads, and channels of one. Raises ModelError unless they are together as many as the config says."""
        num_heads = config.integer(self.num_heads, 1, MAX_HEADS)
        if self.head_dim is None:
            assert self.expand is not None
            hidden = config.integer("hidden_size", 1, MAX_SIZE)
            channels = config.integer(self.expand, 1, MAX_HEADS, default=2) * hidden
            if channels % num_heads or not 1 <= channels // num_heads <= MAX_HEAD_DIM:
                raise config.fail(self.num_heads, f"a divisor of {channels} channels, with heads of 1..{MAX_HEAD_DIM}")
            return num_heads, channels // num_heads
        if self.channels is not None and (config.get(self.channels) is not None or not config.says(self.channels)):
            channels = config.integer(self.channels, 1, MAX_SIZE, default=1024)
            if config.get(self.head_dim) in (None, "auto"):
                head_dim = channels // num_heads
            else:
                head_dim = config.integer(self.head_dim, 1, MAX_HEAD_DIM)
            if channels != num_heads * head_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
                product = f"{self.num_heads} * {self.head_dim} ({num_heads} * {head_dim}, at most {MAX_HEAD_DIM})"
                raise config.fail(self.channels, product)
            return num_heads, head_dim
        head_dim = config.integer(self.head_dim, 1, MAX_HEAD_DIM)
        if self.expand is not None:
            hidden = config.integer("hidden_size", 1, MAX_SIZE)
            if config.integer(self.expand, 1, MAX_HEADS, default=2) * hidden != num_heads * head_dim:
                product = f"{self.num_heads} * {self.head_dim} / hidden_size ({num_heads} * {head_dim} / {hidden})"
                raise config.fail(self.expand, product)
        return num_heads, head_dim


@dataclass(frozen=True)
class MambaSsmKeys:
    """Mamba2 mixers as mamba-ssm's own configs tell them, under `ssm_cfg`. name: before the names of their tensors."""

    name: str = "mixer."

    def read(self, config: ConfigReader) -> Mamba2Shape:
        """Read their sizes and constants. Raises ModelError naming the key, also of what is not served."""
        own = config.nested("ssm_cfg")
        own.only(SSM_KEYS)
        own.require("layer", "Mamba2", default="Mamba1")
        for key, served in SSM_FORM.items():
            if own.flag(key, default=served) is not served:
                raise own.fail(key, str(served).lower())
        channels = own.integer("expand", 1, MAX_HEADS, default=2) * config.integer("d_model", 1, MAX_SIZE)
        head_dim = own.integer("headdim", 1, MAX_HEAD_DIM, default=64)
        heads, groups = channels // head_dim, own.integer("ngroups", 1, MAX_HEADS, default=1)
        if channels % head_dim or heads > MAX_HEADS:
            raise own.fail("headdim", f"a divisor of {channels} channels, for at most {MAX_HEADS} heads")
        if heads % groups:
            raise own.fail("ngroups", f"a divisor of {heads} heads")
        return Mamba2Shape(
            num_key_heads=groups,
            num_value_heads=heads,
            value_dim=head_dim,
            key_dim=own.integer("d_state", 1, MAX_HEAD_DIM, default=128),
            conv_width=own.integer("d_conv", MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=4),
            norm_groups=groups,
            dt_limit=_time_step_limits(own, "dt_limit"),
            has_conv_bias=own.flag("conv_bias", default=True),
            has_bias=own.flag("bias", default=False),
        )


@dataclass(frozen=True)
class ShortConvKeys:
    """Short convolutions, which have as many channels as hidden states."""

    def read(self, config: ConfigReader) -> ShortConvShape:
        """Read their sizes. Raises ModelError naming the key."""
        return ShortConvShape.of(
            config.integer("hidden_size", 1, MAX_SIZE),
            config.integer("conv_L_cache", MIN_CONV_WIDTH, MAX_CONV_WIDTH, default=3),
            has_bias=config.flag("conv_bias", default=False),
        )


MixerKeys = GatedDeltaNetKeys | AttentionKeys | Mamba2Keys | MambaSsmKeys | ShortConvKeys
"""What configs call the sizes of any mixer."""


def _time_step_limits(config: ConfigReader, key: str) -> tuple[float, float]:
    """The least and the greatest time step. JSON has no infinity: it is written in an object, or as Python does."""
    limits = config.get(key)
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise config.fail(key, "two numbers")
    least, greatest = (math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits)
    if not all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in (least, greatest)):
        raise config.fail(key, "two numbers")
    if not (0 <= least <= MAX_FLOAT and least <= greatest and (greatest <= MAX_FLOAT or greatest == math.inf)):
        raise config.fail(key, "0 <= least <= greatest, numbers that fp32 holds or infinity")
    return float(least), float(greatest)
