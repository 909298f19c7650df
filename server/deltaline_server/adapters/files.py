"""An adapter's two files become an Adapter: names and shapes are checked first, then tensors are read one at a time.

Every tensor has to belong to a module of the model, and every module that the config names has to have its tensors.
Tensors of modules that are not served here are skipped and counted, but are a part of the content hash too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from deltaline_server.adapters.peft_config import AdapterConfig, ModuleConfig
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Module, Packed
from deltaline_server.checkpoints.tensor_file import TensorFile
from deltaline_server.errors import shown
from deltaline_server.models.lora_layout import AdapterLayout, LoraPart, TensorName, parse_name
from deltaline_server.models.lora_weights import Adapter, AdapterShape, AdapterWeights

_HASH_VERSION = b"deltaline adapter 1"
# Rows whose direction is held at a time, of DoRA.
ROWS_AT_ONCE = 1024


class BaseRows(Protocol):
    """The weights that an adapter changes; LayerLoader (weights.py) has them."""

    def rows(self, layer: int, module: Module) -> Tensor:
        """Read a module's weight: this rank's rows in the served order, all columns."""


@dataclass
class _Group:
    """The tensors of one module, by part; `module` is None where it is not served here."""

    target: TensorName
    config: ModuleConfig
    module: Module | None
    names: dict[LoraPart, str] = field(default_factory=dict)


class AdapterPlan:
    """An adapter whose names, shapes and sizes are checked and whose tensors are not read yet.

    Attributes: num_bytes, of host memory that it will take; rank, its largest; needs_base, whether `load` reads rows of
    the base.
    """

    def __init__(self, config: AdapterConfig, file: TensorFile, layout: AdapterLayout) -> None:
        """Raises ModelError naming the tensor or module: it matches nothing, is missing, misshapen, or not meant by the
        config; nothing is left for the served layers."""
        self._file, self._layout = file, layout
        groups: dict[tuple[int, str], _Group] = {}
        prefix = ""
        for name in file.names:
            tensor = parse_name(name)
            if "" not in (prefix, tensor.prefix) and prefix != tensor.prefix:
                raise ModelError(f"{shown(name)}: expected layers named {prefix}N, as others are")
            prefix = prefix or tensor.prefix
            shape = layout.check(tensor, name)
            key = (tensor.layer, layout.stored(tensor.module))
            if key not in groups:
                module_config = config.module(tensor.module_name)
                if module_config is None:
                    raise ModelError(f"{shown(name)}: expected no tensor of a module that target_modules leaves out")
                groups[key] = _Group(tensor, module_config, layout.served(tensor))
            _check_shape(name, file.info(name).shape, tensor.part, groups[key].config, shape)
            groups[key].names[tensor.part] = name
        self._groups = [groups[key] for key in sorted(groups)]
        for group in self._groups:
            _check_parts(group, file)
        self._check_complete(config, prefix, groups.keys())
        served = [group for group in self._groups if group.module is not None]
        if not served:
            raise ModelError("adapter: expected tensors of at least one served layer, found none")
        self.rank = max(group.config.rank for group in served)
        self.needs_base = any(group.config.has_magnitude for group in served)
        self._shapes = self._plan_shapes()
        self.num_bytes = sum(shape.num_bytes for shape in self._shapes.values())

    def load(self, base: BaseRows | None, allocate: Callable[[int], Tensor]) -> Adapter:
        """Read the tensors. allocate: takes a number of bytes, returns host memory uint8 that the adapter keeps.

        base: may be None unless `needs_base`.

        Raises ModelError naming the tensor: it can't be read, or has a value that is not finite in the model's dtype.
        """
        memory = allocate(self.num_bytes)
        parts = memory.split([shape.num_bytes for shape in self._shapes.values()])
        weights = {
            place: shape.lay_out(*place, part) for (place, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        digest = hashlib.sha256(_HASH_VERSION)
        for group in self._groups:
            contents = self._digest(group, digest, is_kept=group.module is not None)
            if group.module is not None:
                tensors = {part: self._file.tensor(group.names[part], content) for part, content in contents.items()}
                place = group.target.layer, group.module.packed
                self._convert(group, group.module, tensors, weights[place], base)
        num_elsewhere = sum(group.module is None for group in self._groups)
        return Adapter(digest.digest(), self.rank, tuple(weights.values()), num_elsewhere, memory)

    def content_hash(self) -> bytes:
        """Return the hash that the adapter will have, keeping nothing. Raises ModelError if a tensor can't be read."""
        digest = hashlib.sha256(_HASH_VERSION)
        for group in self._groups:
            self._digest(group, digest, is_kept=False)
        return digest.digest()

    def _check_complete(self, config: AdapterConfig, prefix: str, found: Collection[tuple[int, str]]) -> None:
        """Raise ModelError unless every served module that the config names has tensors."""
        for layer in self._layout.layers:
            for module in self._layout.modules(layer):
                name = f"{prefix}{layer}.{module.name}"
                is_meant = config.module(name) is not None
                if is_meant and (layer, module.name) not in found:
                    raise ModelError(f"{name}: expected tensors, as target_modules names it, found none")

    def _plan_shapes(self) -> dict[tuple[int, Packed], AdapterShape]:
        """The sizes of what is added to each served projection, by layer and place in the layer."""
        layout, shapes = self._layout, {}
        served = {
            (group.target.layer, group.module): group.config for group in self._groups if group.module is not None
        }
        for layer in layout.layers:
            for packed, slices in layout.projections(layer).items():
                modules = [module for module in layout.modules(layer) if module.packed is packed]
                configs = [served.get((layer, module)) for module in modules]
                if any(config is not None for config in configs):
                    ranks = tuple(0 if config is None else config.rank for config in configs)
                    has_factors = any(config is not None and config.has_magnitude for config in configs)
                    dtype = layout.placement.dtype
                    shapes[layer, packed] = AdapterShape(slices.inputs, slices.sizes, ranks, has_factors, dtype)
        return shapes

    def _digest(self, group: _Group, digest: hashlib._Hash, is_kept: bool) -> dict[LoraPart, bytearray]:
        """Feed what a module's tensors do to the digest, each item with its length, so nothing runs into the next.

        Returns the bytes of the tensors if they are kept; else no more than a piece of one is in memory at a time.
        """
        target, config = group.target, group.config
        _feed(digest, struct.pack("<q", target.layer), target.module.encode(), struct.pack("<d", config.scale))
        contents = {}
        for part in LoraPart:
            if part in group.names:
                info = self._file.info(group.names[part])
                shape = struct.pack(f"<{len(info.shape)}Q", *info.shape)
                _feed(digest, part.encode(), info.dtype.encode(), shape)
                digest.update(struct.pack("<Q", self._file.num_bytes(group.names[part])))
                content = bytearray()
                for piece in self._file.pieces(group.names[part]):
                    digest.update(piece)
                    if is_kept:
                        content += piece
                contents[part] = content
        return contents

    def _convert(
        self,
        group: _Group,
        module: Module,
        tensors: dict[LoraPart, Tensor],
        weights: AdapterWeights,
        base: BaseRows | None,
    ) -> None:
        """Put a served module's tensors into the weights of its projection, in the served order."""
        placement, scale = self._layout.placement, torch.tensor(group.config.scale, dtype=torch.float32)
        index, rows = self._layout.slice_of(group.target.layer, module)
        a = tensors[LoraPart.A]
        b = module.order(tensors[LoraPart.B].__getitem__, placement)
        weights.scales[index] = scale
        _keep(a[:, module.columns_of(placement)], weights.a[index], group.names[LoraPart.A])
        _keep(b.t(), weights.b[: group.config.rank, rows], group.names[LoraPart.B])
        if LoraPart.MAGNITUDE in tensors:
            assert base is not None and weights.factors is not None
            magnitude = module.order(tensors[LoraPart.MAGNITUDE].__getitem__, placement)
            factors = row_factors(base.rows(group.target.layer, module), a, b, scale.item(), magnitude)
            _keep(factors, weights.factors[rows], group.names[LoraPart.MAGNITUDE])


def _check_shape(
    name: str, got: tuple[int, ...], part: LoraPart, config: ModuleConfig, module: tuple[int, int] | None
) -> None:
    """Raise ModelError unless a tensor has the rank of the config and the sizes of its module, where they are known."""
    rows, columns = module or (got[0], got[-1])
    expected = {
        LoraPart.A: (config.rank, columns),
        LoraPart.B: (rows, config.rank),
        LoraPart.MAGNITUDE: (rows,),
    }[part]
    if got != expected:
        raise ModelError(f"{shown(name)}: expected shape {list(expected)}, got {list(got)}")


def _check_parts(group: _Group, file: TensorFile) -> None:
    """Raise ModelError unless a module has just the tensors that its config asks for."""
    required = {LoraPart.A, LoraPart.B} | ({LoraPart.MAGNITUDE} if group.config.has_magnitude else set())
    for part in LoraPart:
        if (part in required) != (part in group.names):
            found = "nothing" if part in required else "it"
            expected = "a tensor" if part in required else "none, as use_dora is off"
            raise ModelError(f"{group.target.module_name}.{part}: expected {expected}, found {found}")
    if group.config.has_magnitude:
        rows = file.info(group.names[LoraPart.B]).shape[0]
        _check_shape(
            group.names[LoraPart.MAGNITUDE],
            file.info(group.names[LoraPart.MAGNITUDE]).shape,
            LoraPart.MAGNITUDE,
            group.config,
            (rows, 0),
        )


def _keep(tensor: Tensor, kept: Tensor, name: str) -> None:
    """Copy a tensor to where it is kept, in its dtype. Raises ModelError if a value is not finite then."""
    kept.copy_(tensor)
    if not kept.isfinite().all():
        raise ModelError(f"{shown(name)}: expected finite values in {kept.dtype}, found others")


def _feed(digest: hashlib._Hash, *items: bytes) -> None:
    for item in items:
        digest.update(struct.pack("<Q", len(item)))
        digest.update(item)


def row_factors(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """Return DoRA's factor m / ||W + s B A|| of each row, `[out]` fp32; not finite where the norm is zero.

    It learns the magnitude m and the direction V = W + s B A of each row apart (arXiv 2402.09353, section 4), and the
    norm of V is constant at inference.
    weight `[out, in]`, a `[R, in]`, b `[out, R]`, magnitude `[out]`, of any floating dtype; computed in fp32.
    """
    factors = torch.empty(weight.shape[0], dtype=torch.float32)
    a = a.float()
    for begin in range(0, weight.shape[0], ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        direction = torch.addmm(weight[rows].float(), b[rows].float(), a, alpha=scale)
        torch.div(magnitude[rows].float(), direction.norm(dim=1), out=factors[rows])
    return factors
