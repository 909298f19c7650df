"""What configs say of Mamba2 mixers: those of transformers, and those that mamba-ssm writes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deltaline_kernels import MAX_CONV_WIDTH, MAX_HEAD_DIM, MIN_CONV_WIDTH
from deltaline_server.checkpoints.config_reader import MAX_FLOAT, ConfigReader
from deltaline_server.layers.shapes import Mamba2Shape
from deltaline_server.models.parts import MAX_HEADS, MAX_SIZE

# What `ssm_cfg` may say: what is read, what must be as it is served, and what concerns training alone.
SSM_FORM = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False}
SSM_READ = ("layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "dt_limit", "conv_bias", "bias")
SSM_TRAINING = ("A_init_range", "dt_min", "dt_max", "dt_init_floor", "conv_init", "chunk_size", "use_mem_eff_path")
SSM_KEYS = (*SSM_READ, *SSM_FORM, *SSM_TRAINING)


@dataclass(frozen=True)
class Mamba2Keys:
    """Mamba2 mixers: the keys of their sizes; of several spellings the first that has a value counts.

    name: what stands before the names of a mixer's tensors. default_groups, default_state: where a config says nothing.
    derives_heads: whether head_dim may be absent, null or "auto", and follows from the channels then. conv_bias: None
    where there always is one. eps: of the norm, None for that of the other norms. expand: of a model whose channels are
    this many times its hidden size, None where they need not be. least_dt: the key of the least time step, where there
    is no greatest one; None where `time_step_limit` has both. norms_groups: whether the gated norm takes groups one by
    one. channels: the key of their channels, where these need not be `expand` times the hidden size but where it is
    null. norm: the key of whether there is a norm, norms_first: of whether it is before the gate, None where it is
    behind. out_bias: the key of whether the second projection has a bias, None for as the first. input_scale,
    output_scale, section_scales: the keys of what input and output and the parts of the first projection are multiplied
    by, None where nothing is.
    """

    num_heads: str
    head_dim: str
    state: str
    groups: tuple[str, ...]
    conv_width: tuple[str, ...]
    conv_bias: tuple[str, ...] | None
    bias: str
    name: str = "mixer."
    default_groups: int = 8
    default_state: int = 128
    expand: str | None = None
    derives_heads: bool = False
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
            limits = config.positive(config.spelling(*self.least_dt), default=0.001, or_zero=True), math.inf
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
        has_channels = self.channels is not None and (
            config.get(self.channels) is not None or not config.says(self.channels)
        )
        if self.channels is not None and has_channels:
            key, channels = self.channels, config.integer(self.channels, 1, MAX_SIZE, default=1024)
        elif self.expand is not None:
            hidden = config.integer("hidden_size", 1, MAX_SIZE)
            key, channels = self.expand, config.integer(self.expand, 1, MAX_HEADS, default=2) * hidden
        else:
            return num_heads, config.integer(self.head_dim, 1, MAX_HEAD_DIM)
        if self.derives_heads and config.get(self.head_dim) in (None, "auto"):
            if channels % num_heads or not 1 <= channels // num_heads <= MAX_HEAD_DIM:
                raise config.fail(self.num_heads, f"a divisor of {channels} channels, with heads of 1..{MAX_HEAD_DIM}")
            return num_heads, channels // num_heads
        head_dim = config.integer(self.head_dim, 1, MAX_HEAD_DIM)
        if channels != num_heads * head_dim:
            product = f"{self.num_heads} * {self.head_dim} ({num_heads} * {head_dim})"
            if key == self.expand:
                product = f"{self.num_heads} * {self.head_dim} / hidden_size ({num_heads} * {head_dim} / {hidden})"
            raise config.fail(key, product)
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
