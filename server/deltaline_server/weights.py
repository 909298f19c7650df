"""The weights of a served layer: which tensors a checkpoint must hold for it, and how they become ours.

Checks names and shapes against the config, takes one rank's share and packs it for few large products. Knows no state
and computes no layer (layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaline_server.checkpoint import DTYPES, RandomTensors, TensorSource
from deltaline_server.model_config import LayerConfig, MixerKind, MlpKind, ModelConfig, ModelError, Scope

# What transformers writes before a layer's number: in whole models, then in models saved without their head.
PREFIXES = ("model.layers.", "model.language_model.layers.", "layers.", "language_model.layers.")
MIXER = "linear_attn."
# The rest of a block: checked in block scope, passed over in mixer scope.
REST = ("input_layernorm.", "post_attention_layernorm.", "mlp.")
ALL = slice(None)


@dataclass(frozen=True)
class MixerWeights:
    """A Gated DeltaNet mixer, one rank's share of its heads.

    in_proj `[2*H*K + 2*HV*V + 2*HV, hidden]`: rows q | k | v | z | b | a. conv `[W, D]`. out_proj `[hidden, HV*V]`.
    A_log, dt_bias `[HV]` and norm `[V]` are fp32; the others have the model's dtype.
    """

    in_proj: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out_proj: Tensor


@dataclass(frozen=True)
class BlockWeights:
    """What a block adds to its mixer: norms `[hidden]` fp32 as 1 + w, gate_up `[2*I, hidden]`, down `[hidden, I]`."""

    input_norm: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Placement:
    """Where weights go: device and dtype, and the share of the heads that rank `rank` of `world_size` holds."""

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ModelError(f"world_size: expected at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ModelError(f"rank: expected 0..{self.world_size - 1}, got {self.rank}")

    def share(self, size: int, start: int = 0) -> slice:
        """Return this rank's part of `size` rows or columns that begin at `start`; world_size divides size."""
        part = size // self.world_size
        return slice(start + self.rank * part, start + (self.rank + 1) * part)


def expected_tensors(config: ModelConfig, scope: Scope) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one served layer, without the prefix and the layer's number."""
    shape, hidden = config.gated_delta_net, config.hidden_size
    heads = shape.num_value_heads
    tensors: dict[str, tuple[int, ...]] = {
        "conv1d.weight": (shape.conv_channels, 1, shape.conv_width),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (shape.value_dim,),
        "out_proj.weight": (hidden, shape.values),
    }
    if config.interleaves_projections:
        tensors["in_proj_qkvz.weight"] = (shape.conv_channels + shape.values, hidden)
        tensors["in_proj_ba.weight"] = (2 * heads, hidden)
    else:
        tensors["in_proj_qkv.weight"] = (shape.conv_channels, hidden)
        tensors["in_proj_z.weight"] = (shape.values, hidden)
        tensors["in_proj_b.weight"] = (heads, hidden)
        tensors["in_proj_a.weight"] = (heads, hidden)
    tensors = {MIXER + name: size for name, size in tensors.items()}
    if scope is Scope.BLOCK:
        inner = config.intermediate_size
        tensors |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        tensors |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
        tensors |= {"mlp.down_proj.weight": (hidden, inner)}
    return tensors


def random_init(config: ModelConfig, layers: Sequence[int], scope: Scope, seed: int) -> RandomTensors:
    """Return weights drawn from `seed` for these layers, to be loaded as a checkpoint is."""
    names = expected_tensors(config, scope)
    return RandomTensors({f"{PREFIXES[0]}{i}.{name}": size for i in layers for name, size in names.items()}, seed)


class LayerLoader:
    """Loads served layers from a source, one at a time, for one rank.

    Raises ModelError at construction: a layer is not servable in this scope; a tensor is missing, extra or misshapen;
    its dtype is not one of checkpoint.DTYPES; the heads can't be dealt out to the ranks.
    """

    def __init__(
        self, source: TensorSource, config: ModelConfig, layers: Sequence[int], scope: Scope, placement: Placement
    ) -> None:
        self._source = source
        self._config = config
        self._placement = placement
        self.shape = config.gated_delta_net.shard(placement.world_size)
        inner = config.intermediate_size
        if scope is Scope.BLOCK and inner % placement.world_size:
            raise ModelError(f"world_size: expected a divisor of intermediate_size {inner}, got {placement.world_size}")
        for i in layers:
            _check_servable(config.layers[i], scope)
        self._prefix = _check_tensors(source, config, layers, scope)

    def mixer(self, layer: int) -> MixerWeights:
        """Load the mixer of a layer."""
        name = f"{self._prefix}{layer}.{MIXER}"
        whole, place = self._config.gated_delta_net, self._placement
        project = self._interleaved if self._config.interleaves_projections else self._separate
        conv = torch.cat(self._qkv_rows(f"{name}conv1d.weight"))
        return MixerWeights(
            in_proj=self._put(torch.cat(project(name))),
            conv=self._put(conv.squeeze(1).t()),
            A_log=self._put(self._read(f"{name}A_log", place.share(whole.num_value_heads)), torch.float32),
            dt_bias=self._put(self._read(f"{name}dt_bias", place.share(whole.num_value_heads)), torch.float32),
            norm=self._put(self._read(f"{name}norm.weight"), torch.float32),
            out_proj=self._put(self._read(f"{name}out_proj.weight", ALL, place.share(whole.values))),
        )

    def block(self, layer: int) -> BlockWeights:
        """Load what surrounds the mixer of a layer."""
        name = f"{self._prefix}{layer}."
        part = self._placement.share(self._config.intermediate_size)
        gate_up = [self._read(f"{name}mlp.{half}_proj.weight", part) for half in ("gate", "up")]
        return BlockWeights(
            input_norm=self._put(1 + self._read(f"{name}input_layernorm.weight").float(), torch.float32),
            post_norm=self._put(1 + self._read(f"{name}post_attention_layernorm.weight").float(), torch.float32),
            gate_up=self._put(torch.cat(gate_up)),
            down=self._put(self._read(f"{name}mlp.down_proj.weight", ALL, part)),
        )

    def _separate(self, name: str) -> list[Tensor]:
        """Read q, k, v, z, b, a from one tensor for q | k | v and one for each of the others."""
        whole, place = self._config.gated_delta_net, self._placement
        heads = place.share(whole.num_value_heads)
        return [
            *self._qkv_rows(f"{name}in_proj_qkv.weight"),
            self._read(f"{name}in_proj_z.weight", place.share(whole.values)),
            self._read(f"{name}in_proj_b.weight", heads),
            self._read(f"{name}in_proj_a.weight", heads),
        ]

    def _interleaved(self, name: str) -> list[Tensor]:
        """Read q, k, v, z, b, a from tensors whose rows are, for each key head, its q | k | v | z and its b | a."""
        whole, place, shape = self._config.gated_delta_net, self._placement, self.shape
        qkvz = self._read(f"{name}in_proj_qkvz.weight", place.share(whole.conv_channels + whole.values))
        ba = self._read(f"{name}in_proj_ba.weight", place.share(2 * whole.num_value_heads))
        values = shape.group * shape.value_dim
        parts = (
            *qkvz.unflatten(0, (shape.num_key_heads, -1)).split((shape.key_dim, shape.key_dim, values, values), dim=1),
            *ba.unflatten(0, (shape.num_key_heads, -1)).split((shape.group, shape.group), dim=1),
        )
        return [part.flatten(0, 1) for part in parts]

    def _qkv_rows(self, name: str) -> list[Tensor]:
        """Read this rank's rows of q, k and v from a tensor whose rows are q | k | v."""
        whole, place = self._config.gated_delta_net, self._placement
        sections = ((whole.keys, 0), (whole.keys, whole.keys), (whole.values, 2 * whole.keys))
        return [self._read(name, place.share(size, start)) for size, start in sections]

    def _read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self._source.read(name, rows, columns)

    def _put(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the device, contiguous, in `dtype` or the model's, sharing no memory with a file."""
        place = self._placement
        return tensor.to(place.device, dtype or place.dtype, copy=True).contiguous()


def _check_servable(layer: LayerConfig, scope: Scope) -> None:
    if layer.mixer is MixerKind.ATTENTION:
        raise ModelError(f"layer {layer.index}: expected linear_attention, got {layer.mixer} (not served yet)")
    if scope is Scope.BLOCK and layer.mlp is MlpKind.MIXTURE_OF_EXPERTS:
        raise ModelError(
            f"layer {layer.index}: expected a dense MLP in block scope, got a mixture of experts "
            "(its mixer can be served in mixer scope)"
        )


def _check_tensors(source: TensorSource, config: ModelConfig, layers: Sequence[int], scope: Scope) -> str:
    """Return the prefix of the layers' tensors. Raises ModelError on the first tensor that is not as expected."""
    found: dict[str, set[str]] = {}
    for name in source.names:
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            found.setdefault(prefix, set()).add(name.removeprefix(prefix))
    if len(found) != 1:
        raise ModelError(f"layers: expected tensors named {' or '.join(PREFIXES)}N, got {sorted(found) or 'none'}")
    [(prefix, names)] = found.items()
    expected = expected_tensors(config, scope)
    passed_over = () if scope is Scope.BLOCK else REST
    for i in layers:
        held = {name.removeprefix(f"{i}.") for name in names if name.startswith(f"{i}.")}
        missing, extra = sorted(expected.keys() - held), sorted(held - expected.keys())
        if missing:
            raise ModelError(f"{prefix}{i}.{missing[0]}: expected shape {list(expected[missing[0]])}, found nothing")
        extra = [name for name in extra if not name.startswith(passed_over)]
        if extra:
            raise ModelError(f"{prefix}{i}.{extra[0]}: expected no such tensor in a served layer, found one")
        for name, shape in expected.items():
            info = source.info(f"{prefix}{i}.{name}")
            if info.shape != shape:
                raise ModelError(f"{prefix}{i}.{name}: expected shape {list(shape)}, got {list(info.shape)}")
            if info.dtype not in DTYPES:
                raise ModelError(f"{prefix}{i}.{name}: expected dtype {' or '.join(DTYPES)}, got {info.dtype}")
    return prefix
