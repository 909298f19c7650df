"""The weights of a served layer: which tensors a checkpoint must hold for it, and how they become ours.

Checks names and shapes against the config, takes one rank's share and packs it for few large products. Knows no state
and computes no layer (layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from deltaline_server.checkpoint import DTYPES, RandomTensors, TensorSource
from deltaline_server.model_config import LayerConfig, MixerKind, MlpKind, ModelConfig, ModelError, Scope
from deltaline_server.modules import ALL, MIXER, Module, Packed, served_modules, whole_sections
from deltaline_server.placement import Placement

# What transformers writes before a layer's number: in whole models, then in models saved without their head.
PREFIXES = ("model.layers.", "model.language_model.layers.", "layers.", "language_model.layers.")
# The rest of a block: checked in block scope, passed over in mixer scope.
REST = ("input_layernorm.", "post_attention_layernorm.", "mlp.")


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


def expected_tensors(config: ModelConfig, scope: Scope) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one served layer, without the prefix and the layer's number."""
    shape, hidden = config.gated_delta_net, config.hidden_size
    tensors: dict[str, tuple[int, ...]] = {
        MIXER + "conv1d.weight": (shape.conv_channels, 1, shape.conv_width),
        MIXER + "A_log": (shape.num_value_heads,),
        MIXER + "dt_bias": (shape.num_value_heads,),
        MIXER + "norm.weight": (shape.value_dim,),
    }
    tensors |= {f"{module.name}.weight": (module.rows, module.columns) for module in served_modules(config, scope)}
    if scope is Scope.BLOCK:
        tensors |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
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
        self._modules = served_modules(config, scope)
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
        sections = (whole.keys, whole.keys, whole.values)
        conv = whole_sections(sections, partial(self._read, f"{name}conv1d.weight"), place)
        return MixerWeights(
            in_proj=self._projection(layer, Packed.IN_PROJ),
            conv=self._put(conv.squeeze(1).t()),
            A_log=self._put(self._read(f"{name}A_log", place.share(whole.num_value_heads)), torch.float32),
            dt_bias=self._put(self._read(f"{name}dt_bias", place.share(whole.num_value_heads)), torch.float32),
            norm=self._put(self._read(f"{name}norm.weight"), torch.float32),
            out_proj=self._projection(layer, Packed.OUT_PROJ),
        )

    def block(self, layer: int) -> BlockWeights:
        """Load what surrounds the mixer of a layer."""
        name = f"{self._prefix}{layer}."
        return BlockWeights(
            input_norm=self._put(1 + self._read(f"{name}input_layernorm.weight").float(), torch.float32),
            post_norm=self._put(1 + self._read(f"{name}post_attention_layernorm.weight").float(), torch.float32),
            gate_up=self._projection(layer, Packed.GATE_UP),
            down=self._projection(layer, Packed.DOWN),
        )

    def rows(self, layer: int, module: Module) -> Tensor:
        """Read a module's weight, this rank's rows in the served order and all columns, as its file has it."""
        return module.order(partial(self._read, f"{self._prefix}{layer}.{module.name}.weight"), self._placement)

    def _projection(self, layer: int, packed: Packed) -> Tensor:
        """Load the modules of a served projection, their rows one after the other."""
        place = self._placement
        parts = []
        for module in self._modules:
            if module.packed is packed:
                read = partial(
                    self._read, f"{self._prefix}{layer}.{module.name}.weight", columns=module.columns_of(place)
                )
                parts.append(module.order(read, place))
        return self._put(torch.cat(parts))

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
