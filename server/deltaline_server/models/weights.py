"""The weights of a served layer: which tensors a checkpoint must hold for it, and how they are loaded.

Names and shapes are checked against the config; one rank's share is packed for few large products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels import LoraWeights, can_multiply_fp8
from deltaline_server.checkpoints import random_tensors
from deltaline_server.checkpoints.checkpoint import DTYPES, TensorSource
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.expert_shares import fp8_blocks
from deltaline_server.checkpoints.fp8 import drawn
from deltaline_server.checkpoints.fp8.dequantised import DequantisedTensors
from deltaline_server.checkpoints.fp8.drawn import DrawnFp8
from deltaline_server.checkpoints.layer_reader import LayerReader, Piece
from deltaline_server.checkpoints.modules import Module, Packed, Placement
from deltaline_server.checkpoints.random_tensors import RandomTensors
from deltaline_server.checkpoints.respelled import RespelledTensors
from deltaline_server.checkpoints.shared_blocks import SharedBlocks
from deltaline_server.errors import shown
from deltaline_server.layers import hybrid
from deltaline_server.layers.block import Block, Blocks, Layer
from deltaline_server.layers.expert_shape import ExpertsShape
from deltaline_server.layers.experts import expert_test_sizes, one_by_one, shares_of_ranks
from deltaline_server.layers.hybrid import ParallelFamily, SharedBlock, SharedBlockFamily
from deltaline_server.layers.hyper_connection import HyperBlock, HyperBlocks, HyperHead, MeanHead, head_tensors
from deltaline_server.layers.latent_shape import LatentShape
from deltaline_server.layers.mixers.attention import AttentionFamily
from deltaline_server.layers.mixers.gated_delta_net import GatedDeltaNetFamily
from deltaline_server.layers.mixers.kda import KdaFamily
from deltaline_server.layers.mixers.latent_attention import LatentAttentionFamily
from deltaline_server.layers.mixers.mamba1 import Mamba1Family
from deltaline_server.layers.mixers.mamba2 import Mamba2Family
from deltaline_server.layers.mixers.short_conv import ShortConvFamily
from deltaline_server.layers.shapes import (
    AttentionShape,
    GatedDeltaNetShape,
    KdaShape,
    Mamba1Shape,
    Mamba2Shape,
    MixerShape,
    ShortConvShape,
)
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.keys.attention import AttentionKeys
from deltaline_server.models.keys.gated_delta_net import GatedDeltaNetKeys
from deltaline_server.models.keys.kda import KdaKeys
from deltaline_server.models.keys.latent_attention import LatentKeys
from deltaline_server.models.keys.mamba1 import Mamba1Keys
from deltaline_server.models.keys.mamba2 import Mamba2Keys, MambaSsmKeys
from deltaline_server.models.parts import LayerKind, MixerKind, MlpKind
from deltaline_server.models.servable import layer_kinds

# What transformers writes before a layer's number: in whole models, then in models saved without their head.
PREFIXES = ("model.layers.", "model.language_model.layers.", "layers.", "language_model.layers.", "backbone.layers.")

CPU = torch.device("cpu")
# What old checkpoints have of a layer's rotary embedding, which follows from the config.
FREQUENCIES = "rotary_emb.inv_freq"

MixerFamily = (
    AttentionFamily
    | GatedDeltaNetFamily
    | KdaFamily
    | LatentAttentionFamily
    | Mamba1Family
    | Mamba2Family
    | ParallelFamily
    | ShortConvFamily
)
BlockFamily = Blocks | HyperBlocks | SharedBlockFamily


def mixer_family(config: ModelConfig, kind: MixerKind) -> MixerFamily:
    """Return the family of a model's mixers of a kind. Raises KeyError where the config has no shape of it."""
    if len(kind.parts) > 1:
        mamba2, attention = (mixer_family(config, part) for part in kind.parts)
        assert isinstance(mamba2, Mamba2Family) and isinstance(attention, AttentionFamily)
        attention = replace(attention, packed=(Packed.ATTENTION_IN, Packed.ATTENTION_OUT))
        if kind is MixerKind.MAMBA2_BEHIND_ATTENTION:
            mamba2 = replace(mamba2, name=hybrid.MAMBA2)
            inputs = 2 * config.hidden_size
            attention = replace(attention, name=hybrid.ATTENTION, input_size=inputs, takes_adapters=False)
        return ParallelFamily(mamba2, attention)
    shape, keys = config.shapes[kind], config.family.mixers[kind]
    hidden, eps = config.hidden_size, config.rms_norm_eps
    if isinstance(shape, Mamba2Shape) and isinstance(keys, Mamba2Keys | MambaSsmKeys):
        own = keys.eps if isinstance(keys, Mamba2Keys) else None
        return Mamba2Family(shape, hidden, eps if own is None else own, keys.name)
    if isinstance(shape, Mamba1Shape) and isinstance(keys, Mamba1Keys):
        return Mamba1Family(shape, hidden, keys.name)
    if isinstance(shape, AttentionShape) and isinstance(keys, AttentionKeys):
        offset = config.family.blocks.norm_offset
        return AttentionFamily(shape, hidden, eps, keys.name, offset, out=keys.out, norms=keys.norms)
    if isinstance(shape, KdaShape) and isinstance(keys, KdaKeys):
        return KdaFamily(shape, hidden, eps if keys.eps is None else keys.eps, keys.has_wide_rates)
    if isinstance(shape, LatentShape) and isinstance(keys, LatentKeys):
        return LatentAttentionFamily(shape, hidden, eps if keys.eps is None else keys.eps)
    if isinstance(shape, ShortConvShape):
        return ShortConvFamily(shape, hidden)
    assert isinstance(shape, GatedDeltaNetShape) and isinstance(keys, GatedDeltaNetKeys)
    return GatedDeltaNetFamily(shape, hidden, eps if keys.eps is None else keys.eps, keys.layout)


def block_family(config: ModelConfig, kind: LayerKind) -> BlockFamily:
    """Return the family of the blocks of a kind of layers."""
    if kind.mixer is MixerKind.MAMBA2_BEHIND_ATTENTION:
        eps, has_bias = config.rms_norm_eps, config.has_mlp_bias
        return SharedBlockFamily(config.hidden_size, config.intermediate_size, eps, has_bias)
    blocks = Blocks(
        config.family.blocks_of(kind),
        config.hidden_size,
        config.intermediate_size,
        config.rms_norm_eps,
        config.residual_in_fp32,
        config.experts if kind.mlp is MlpKind.MIXTURE_OF_EXPERTS else None,
        config.has_mlp_bias,
        config.residual_multiplier,
        mlp_scales=config.mlp_scales or (1.0, 1.0),
        mlp_limit=config.mlp_limit,
        has_mixer=kind.mixer is not None,
        has_mlp=kind.mlp is not None,
    )
    return blocks if config.streams is None else HyperBlocks(blocks, config.streams)


def served_modules(config: ModelConfig, kind: LayerKind, scope: Scope) -> tuple[Module, ...]:
    """Return the modules of a served layer of a kind, those of one projection in the order of its rows."""
    mixer = () if kind.mixer is None else mixer_family(config, kind.mixer).modules
    return mixer if scope is Scope.MIXER else mixer + block_family(config, kind).modules


def expected_tensors(config: ModelConfig, kind: LayerKind, scope: Scope) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one served layer, without the prefix and the layer's number.

    Those of experts are stacked; a checkpoint may have them one by one.
    """
    tensors = {} if kind.mixer is None else mixer_family(config, kind.mixer).tensors
    if scope is Scope.BLOCK:
        tensors |= block_family(config, kind).tensors
    modules = served_modules(config, kind, scope)
    return tensors | {f"{module.name}.weight": (module.rows, module.columns) for module in modules}


def random_init(
    config: ModelConfig, layers: Sequence[int], scope: Scope, seed: int, device: torch.device = CPU
) -> RandomTensors | DrawnFp8:
    """Return weights drawn from `seed` for these layers on a device, to be loaded as a checkpoint is, in FP8 where the
    config says so. Raises as layer_kinds."""
    kinds = layer_kinds(config, layers, scope)
    names = {kind: expected_tensors(config, kind, scope) for kind in dict.fromkeys(kinds.values())}
    shapes = {f"{PREFIXES[0]}{i}.{name}": size for i, kind in kinds.items() for name, size in names[kind].items()}
    if config.streams is not None:
        head = head_tensors(config.streams, config.hidden_size)
        shapes |= {_beside(PREFIXES[0], name): size for name, size in head.items()}
    plain = RandomTensors(shapes, seed, device)
    if config.quantization is None:
        return plain
    return DrawnFp8(plain, config.quantization, stays=can_multiply_fp8(device))


def opened(
    source: TensorSource, config: ModelConfig, placement: Placement
) -> tuple[DequantisedTensors | SharedBlocks, ...]:
    """Return what makes weights for a placement of each layer of a checkpoint's tensors: each a source around the one
    before it, the first around `source`; none where these are plain."""
    made: list[DequantisedTensors | SharedBlocks] = []
    if config.quantization is not None:
        block, usual = config.quantization.weight_block_size, config.quantization.usual_block_size
        stays = can_multiply_fp8(placement.device)
        made.append(DequantisedTensors(source, block, usual=usual, stays=stays, dtype=placement.dtype))
    if config.shared_blocks is not None:
        made.append(config.shared_blocks.of(made[-1] if made else source, config.layers))
    return tuple(made)


class LayerLoader:
    """Loads served layers from a source, one at a time, for one rank.

    shapes: of each layer's mixers on this rank, those with a state of their own. mlp_dim: inner channels of the MLPs on
    this rank, 0 where no layer is served with one. experts: of the layers that are served with them, None where none
    is.

    Raises ModelError at construction: a layer is not servable in this scope; a tensor is missing, extra or misshapen;
    its dtype is not one of checkpoint.DTYPES; the heads can't be dealt out to the ranks.
    """

    def __init__(
        self, source: TensorSource, config: ModelConfig, layers: Sequence[int], scope: Scope, placement: Placement
    ) -> None:
        self._source, self._config = RespelledTensors(source, config.family.spellings), config
        self._kinds = kinds = layer_kinds(config, layers, scope)
        distinct = dict.fromkeys(kinds.values())
        # Streams have another thing than a sum behind a branch; a norm there, and the middle of a shared block, want
        # the whole.
        is_plain = config.streams is None and not config.family.blocks.norms_outputs
        is_plain = is_plain and all(kind.mixer is not MixerKind.MAMBA2_BEHIND_ATTENTION for kind in distinct)
        self._placement = replace(placement, leaves_summands=scope is Scope.BLOCK and is_plain)
        self._modules = {kind: served_modules(config, kind, scope) for kind in distinct}
        mixers = dict.fromkeys(kind.mixer for kind in distinct if kind.mixer is not None)
        self._mixers = {kind: mixer_family(config, kind) for kind in mixers}
        self._blocks = {kind: block_family(config, kind) for kind in distinct}
        shares = {
            kind: tuple(config.shapes[mixer].shard(placement.world_size) for mixer in kind.mixers) for kind in distinct
        }
        self.shapes: dict[int, tuple[MixerShape, ...]] = {i: shares[kind] for i, kind in kinds.items()}
        mlps = {kind.mlp for kind in distinct}
        self.experts = _share_mlps(config, mlps, placement.world_size)
        self.mlp_dim = config.intermediate_size // placement.world_size if MlpKind.DENSE in mlps else 0
        self._prefix, self._names = _check_tensors(self._source, config, kinds, scope)

    def mixer(self, layer: int, adapters: Mapping[Packed, LoraWeights]) -> Layer:
        """Load the mixer of a layer that has one, with these adapters' slots."""
        kind = self._kinds[layer].mixer
        assert kind is not None
        return self._mixers[kind].mixer(self.reader(layer), adapters)

    def block(self, layer: int, adapters: Mapping[Packed, LoraWeights]) -> Block | HyperBlock | SharedBlock:
        """Load a layer and what surrounds its mixer, with these adapters' slots."""
        kind = self._kinds[layer]
        mixer = None if kind.mixer is None else self.mixer(layer, adapters)
        return self._blocks[kind].block(self.reader(layer), mixer, adapters)

    def stored(self, layer: int) -> list[str]:
        """The names of the source's tensors of which a layer is loaded."""
        return [part for name in self._names[layer] for part in self._source.stored(name)]

    def check_head(self) -> None:
        """Raise ModelError unless the source has the head of a model with streams."""
        assert self._config.streams is not None
        for name, shape in head_tensors(self._config.streams, self._config.hidden_size).items():
            name = _beside(self._prefix, name)
            if name not in self._source.names:
                raise ModelError(f"{name}: expected shape {list(shape)}, found nothing")
            _check_tensor(self._source, name, shape)

    def head(self) -> HyperHead | MeanHead:
        """Load the head of a model with streams."""
        assert self._config.streams is not None
        if self._config.streams.averages:
            return MeanHead()
        reader = LayerReader(self._source, _beside(self._prefix, ""), (), self._placement)
        return HyperHead(reader, self._config.streams, self._config.rms_norm_eps)

    def reader(self, layer: int) -> LayerReader:
        """What reads the tensors of a layer."""
        modules = self._modules[self._kinds[layer]]
        return LayerReader(self._source, f"{self._prefix}{layer}.", modules, self._placement)

    def pieces(self, layer: int) -> list[Piece]:
        """What the projections of a layer are made of."""
        reader, modules = self.reader(layer), self._modules[self._kinds[layer]]
        return [piece for packed in dict.fromkeys(one.packed for one in modules) for piece in reader.pieces(packed)]

    @property
    def drawn(self) -> str:
        """How weights are drawn that are no checkpoint's; another name is another model."""
        quantization = self._config.quantization
        if quantization is None:
            return random_tensors.ALGORITHM
        return " ".join((random_tensors.ALGORITHM, drawn.ALGORITHM, *sorted(quantization.left)))

    def experts_in_fp8(self, layer: int) -> bool:
        """Whether the experts of a layer that has them stay in FP8."""
        if self._config.quantization is None:
            return False
        names, shape = self._config.family.blocks_of(self._kinds[layer]).experts, self._config.experts
        reader = self.reader(layer)
        assert shape is not None
        return fp8_blocks(reader, shares_of_ranks(reader, names, shape, self._config.hidden_size)) is not None

    def test_sizes(self) -> dict[str, Any]:
        """The self-test's arguments for MLPs, experts and weights in FP8, beside the channels of hidden states."""
        sizes: dict[str, Any] = {"mlp_dim": self.mlp_dim}
        if self._config.mlp_limit:
            sizes["mlp_limit"] = self._config.mlp_limit
        if self.experts is not None:
            mixtures = [i for i, kind in self._kinds.items() if kind.mlp is MlpKind.MIXTURE_OF_EXPERTS]
            sizes |= expert_test_sizes(self.experts, sorted({self.experts_in_fp8(layer) for layer in mixtures}))
        in_fp8 = [piece for layer in self._kinds for piece in self.pieces(layer) if piece.in_fp8]
        if in_fp8:
            sizes["fp8_sizes"] = tuple(dict.fromkeys((piece.rows, piece.columns) for piece in in_fp8))
        return sizes

    def rows(self, layer: int, module: Module) -> Tensor:
        """Read a module's weight, this rank's rows in the served order and all columns, as its file has it."""
        return self.reader(layer).weight(module)


def _share_mlps(config: ModelConfig, mlps: Collection[MlpKind | None], world_size: int) -> ExpertsShape | None:
    """Return one rank's share of the experts, None where no layer has any.

    Raises ModelError unless what the layers have beside their mixers can be dealt out to ranks.
    """
    inner = config.intermediate_size
    if MlpKind.DENSE in mlps and inner % world_size:
        raise ModelError(f"--tensor-parallel: expected a divisor of intermediate_size {inner}, got {world_size}")
    if config.experts is None or MlpKind.MIXTURE_OF_EXPERTS not in mlps:
        return None
    return config.experts.shard(world_size)


def _check_tensors(
    source: TensorSource, config: ModelConfig, kinds: Mapping[int, LayerKind], scope: Scope
) -> tuple[str, dict[int, list[str]]]:
    """Return the prefix of the layers' tensors, and the names of each layer's. Raises ModelError on the first tensor
    that is not as expected."""
    found: dict[str, defaultdict[str, set[str]]] = {}  # by prefix and number of a layer
    for name in source.names:
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            number, dot, own = name.removeprefix(prefix).partition(".")
            found.setdefault(prefix, defaultdict(set))[number + dot].add(own)
    if len(found) != 1:
        others = ", ".join(shown(name) for name in sorted(source.names)[:2])
        got = sorted(found) or (f"none, but {others}" if others else "no tensors at all")
        raise ModelError(f"layers: expected tensors named {' or '.join(PREFIXES)}N, got {got}")
    [(prefix, of_layer)] = found.items()
    of_kind = {kind: expected_tensors(config, kind, scope) for kind in dict.fromkeys(kinds.values())}
    stored, found_names = config.family.blocks.experts, dict[int, list[str]]()
    for i, kind in kinds.items():
        held = of_layer[f"{i}."]
        is_stacked = stored.stacks[0] in held or not any(".experts.0." in name for name in held)
        expected = of_kind[kind] if is_stacked else one_by_one(of_kind[kind], stored)
        missing, extra = sorted(expected.keys() - held), sorted(held - expected.keys())
        if missing:
            name = missing[0]
            raise ModelError(f"{prefix}{i}.{name}: expected shape {list(expected[name])}, found nothing{_reason(name)}")
        passed_over = () if scope is Scope.BLOCK else block_family(config, kind).names
        extra = [name for name in extra if not name.startswith((*passed_over, *config.family.unread))]
        extra = [name for name in extra if not name.endswith(FREQUENCIES)]
        if extra:
            name = extra[0]
            raise ModelError(f"{prefix}{i}.{name}: expected no such tensor in a served layer, found one{_reason(name)}")
        for name, shape in expected.items():
            _check_tensor(source, f"{prefix}{i}.{name}", shape)
        found_names[i] = [f"{prefix}{i}.{name}" for name in expected]
    return prefix, found_names


def _reason(name: str) -> str:
    """What decides that there is a tensor, where a reader may not think of it."""
    return " (hc_mult in config.json says whether there are streams)" if "_hc." in name else ""


def _check_tensor(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless a tensor has this shape and a dtype that is read."""
    info = source.info(name)
    if info.shape != shape:
        raise ModelError(f"{name}: expected shape {list(shape)}, got {list(info.shape)}")
    if info.dtype not in DTYPES:
        raise ModelError(f"{name}: expected dtype {' or '.join(DTYPES)}, got {info.dtype}")


def _beside(prefix: str, name: str) -> str:
    """A name in the module that has the layers; prefix: what stands before their numbers."""
    return prefix.removesuffix("layers.") + name
