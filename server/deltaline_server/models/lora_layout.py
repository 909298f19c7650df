"""Where the tensors of an adapter belong: the modules of the served layers, and those that are served elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Module, Packed, Placement
from deltaline_server.errors import shown
from deltaline_server.layers import hybrid
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.parts import LayerKind, MixerKind, MlpKind
from deltaline_server.models.servable import layer_kinds
from deltaline_server.models.weights import PREFIXES, block_family, mixer_family, served_modules

PEFT_PREFIX = "base_model.model."
# The modules of an attention mixer, where the config does not say their shapes.
ATTENTION_MODULES = frozenset(f"{mixer}.{name}_proj" for mixer in ("self_attn", "mixer") for name in "qkvo") | {
    "self_attn.out_proj"
}
# The layer of what a model has beside its layers.
BESIDE = -1


class LoraPart(StrEnum):
    """What a tensor is to its module; the ends of the names that PEFT writes."""

    A = "lora_A.weight"
    B = "lora_B.weight"
    MAGNITUDE = "lora_magnitude_vector"


@dataclass(frozen=True)
class TensorName:
    """What a tensor belongs to. prefix: what stands before the layer's number; module: the name behind it.

    Of what is no layer's, layer is BESIDE, prefix is empty and module is the whole name.
    """

    prefix: str
    layer: int
    module: str
    part: LoraPart

    @property
    def module_name(self) -> str:
        """The module's whole name in the model."""
        return self.module if self.layer == BESIDE else f"{self.prefix}{self.layer}.{self.module}"


def parse_name(name: str) -> TensorName:
    """Read the name of a tensor. Raises ModelError naming it, if PEFT gives no tensor of LoRA's such a name."""
    stem, part = next(
        ((name.removesuffix(f".{part}"), part) for part in LoraPart if name.endswith(f".{part}")), (name, None)
    )
    inner = stem.removeprefix(PEFT_PREFIX)
    prefix = next((prefix for prefix in PREFIXES if inner.startswith(prefix)), None)
    if part is None or inner == stem:
        raise _no_match(name)
    if prefix is None:
        return TensorName("", BESIDE, inner, part)
    number, _, module = inner.removeprefix(prefix).partition(".")
    if not (number.isascii() and number.isdecimal() and len(number) <= 4 and str(int(number)) == number and module):
        raise _no_match(name)
    return TensorName(prefix, int(number), module, part)


@dataclass(frozen=True)
class Slices:
    """A served projection on one rank: its inputs, and the outputs of each of its modules, one after the other."""

    inputs: int
    sizes: tuple[int, ...]


class AdapterLayout:
    """The served layers of a model, as an adapter sees them. Constant."""

    def __init__(self, config: ModelConfig, scope: Scope, layers: Sequence[int], placement: Placement) -> None:
        self.placement = placement
        self.layers = tuple(sorted(layers))
        self._kinds = layer_kinds(config, self.layers, scope)
        kinds = dict.fromkeys(self._kinds.values())
        self._modules = {
            kind: tuple(module for module in served_modules(config, kind, scope) if module.takes_adapters)
            for kind in kinds
        }
        self._mixers = {
            kind: {module.name: module for module in mixer_family(config, kind).modules}
            for kind in dict.fromkeys(layer.mixer for layer in config.layers if layer.mixer is not None)
            if all(part in config.shapes for part in kind.parts)
        }
        any_dense = LayerKind(MixerKind.ATTENTION, MlpKind.DENSE)  # they are the same beside all mixers
        self._mlp = {module.name: module for module in block_family(config, any_dense).modules}
        self._config, self._scope = config, scope
        self._projections = {kind: self._slices_of(kind) for kind in kinds}

    def of_all_ranks(self) -> list[AdapterLayout]:
        """The same layers as each rank has them."""
        layouts = [copy.copy(self) for _ in range(self.placement.world_size)]
        for rank, layout in enumerate(layouts):
            layout.placement = replace(self.placement, rank=rank)
        return layouts

    def modules(self, layer: int) -> tuple[Module, ...]:
        """The modules of a served layer, in the order of their projections' rows."""
        return self._modules[self._kinds[layer]]

    def projections(self, layer: int) -> Mapping[Packed, Slices]:
        """The projections of a served layer that an adapter may change."""
        return self._projections[self._kinds[layer]]

    def slice_of(self, layer: int, module: Module) -> tuple[int, slice]:
        """The index of a module among those of its served projection, and its rows there, on this rank."""
        sizes = self.projections(layer)[module.packed].sizes
        index = [other for other in self.modules(layer) if other.packed is module.packed].index(module)
        start = sum(sizes[:index])
        return index, slice(start, start + sizes[index])

    def served(self, tensor: TensorName) -> Module | None:
        """The served module that a tensor belongs to, None where it is not served here."""
        if tensor.layer not in self.layers:
            return None
        name = self.stored(tensor.module)
        return next((module for module in self.modules(tensor.layer) if module.name == name), None)

    def check(self, tensor: TensorName, name: str) -> tuple[int, int] | None:
        """Return rows and columns of the module that a tensor belongs to, None where the config does not say.

        Raises ModelError naming the tensor, if the model has no such module.
        """
        if tensor.layer == BESIDE and tensor.module.startswith(self._config.family.beside):
            return None
        if not 0 <= tensor.layer < len(self._config.layers):
            raise _no_match(name)
        layer = self._config.layers[tensor.layer]
        if layer.mixer is MixerKind.MAMBA2_BEHIND_ATTENTION and not tensor.module.startswith(hybrid.MAMBA2):
            raise ModelError(f"{shown(name)}: expected no tensor of a shared block, which takes no adapters")
        mixer = {} if layer.mixer is None else self._mixers.get(layer.mixer)
        if mixer is None and tensor.module in ATTENTION_MODULES:
            return None
        blocks = self._config.family.blocks
        of_mlp = tensor.module.startswith((blocks.mlp.name, blocks.experts.name))
        if layer.mlp is MlpKind.MIXTURE_OF_EXPERTS and of_mlp:
            if self._scope is Scope.BLOCK and tensor.layer in self.layers:
                raise ModelError(f"{shown(name)}: expected no tensor of a mixture of experts, which takes no adapters")
            return None
        module = (mixer or {}).get(self.stored(tensor.module))
        if module is None and layer.mlp is MlpKind.DENSE:
            module = self._mlp.get(tensor.module)
        if module is None:
            raise _no_match(name)
        if not module.takes_adapters and tensor.layer in self.layers:
            raise ModelError(f"{shown(name)}: expected no tensor of {module.name}, which takes no adapters")
        return module.rows, module.columns

    def stored(self, name: str) -> str:
        """The name by which a module is stored that an adapter names so."""
        return self._config.family.adapters_spell.get(name, name)

    def _slices_of(self, kind: LayerKind) -> dict[Packed, Slices]:
        """The projections of a layer of this kind."""
        shapes: dict[Packed, list[tuple[int, int]]] = {}
        for module in self._modules[kind]:
            shapes.setdefault(module.packed, []).append(module.served_shape(self.placement.world_size))
        return {packed: Slices(sizes[0][1], tuple(rows for rows, _ in sizes)) for packed, sizes in shapes.items()}


def _no_match(name: str) -> ModelError:
    return ModelError(f"{shown(name)}: expected a tensor of a linear module of the model, found no such module")
