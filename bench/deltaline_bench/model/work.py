"""The least that a batch of a model must do: its products, and the bytes that it must read and write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deltaline_kernels import FP8_BLOCK
from deltaline_server.layers.expert_shape import ExpertsShape
from deltaline_server.layers.kv_cache import kept_values
from deltaline_server.layers.shapes import MixerShape, PagedShape, RecurrentShape
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.parts import LayerKind, MlpKind
from deltaline_server.models.servable import layer_kinds
from deltaline_server.models.weights import expected_tensors, served_modules

STATE_ITEMSIZE = 4
# Of a value in FP8, its part of its block's scale included.
FP8_ITEMSIZE = 1 + 4 / FP8_BLOCK**2


@dataclass(frozen=True)
class LayerWork:
    """The products of one layer: `[out, in]` of each that all tokens have, and its experts if it has any."""

    dense: tuple[tuple[int, int], ...]
    experts: ExpertsShape | None


@dataclass(frozen=True)
class Work:
    """What the layers of a model must do. itemsize: bytes of a weight that is not in FP8 and of a hidden state's
    value. num_layers: the first ones; None for all."""

    config: ModelConfig
    itemsize: int
    num_layers: int | None = None

    @property
    def kinds(self) -> list[LayerKind]:
        """The kinds of its layers."""
        layers = range(len(self.config.layers))[: self.num_layers]
        return list(layer_kinds(self.config, layers, Scope.BLOCK).values())

    def layers(self, world_size: int = 1) -> Iterator[LayerWork]:
        """The products of each layer, of one of so many ranks."""
        config = self.config
        for kind in self.kinds:
            sizes: dict[str, tuple[int, int]] = {}
            for module in served_modules(config, kind, Scope.BLOCK):
                rows, columns = module.served_shape(world_size)
                before, _ = sizes.get(module.packed, (0, columns))
                sizes[module.packed] = before + rows, columns
            dense = [*sizes.values()]
            experts = config.experts if kind.mlp is MlpKind.MIXTURE_OF_EXPERTS else None
            if experts is not None:
                hidden, shared = config.hidden_size, experts.shared_size // world_size
                gates = experts.num_experts + experts.has_shared_gate
                dense += [(gates, hidden), *([(2 * shared, hidden), (hidden, shared)] if shared else [])]
            yield LayerWork(tuple(dense), experts)

    def weight_bytes(self, tokens: int) -> int:
        """Bytes of all weights that so many tokens need: of experts those that are touched, on average, if each token
        chooses evenly."""
        config, total = self.config, 0
        for kind in self.kinds:
            for name, shape in expected_tensors(config, kind, Scope.BLOCK).items():
                values = math.prod(shape)
                if config.experts is not None and name in config.family.blocks.experts.stacks:
                    values = round(values * touched_share(config.experts, tokens))
                is_fp8 = config.quantization is not None and config.quantization.covers(name, shape)
                total += round(values * FP8_ITEMSIZE) if is_fp8 else values * self.itemsize
        return total

    def state_bytes(self) -> int:
        """Bytes of the conv and recurrent states of one sequence, which a step reads and writes."""
        total = 0
        for shape in self._shapes:
            if isinstance(shape, RecurrentShape):
                total += math.prod(shape.state) * STATE_ITEMSIZE
                total += (shape.conv_width - 1) * shape.conv_channels * self.itemsize
        return total

    def token_kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return sum(kept_values(shape) * self.itemsize for shape in self._shapes if isinstance(shape, PagedShape))

    @property
    def _shapes(self) -> list[MixerShape]:
        """Of all mixers."""
        return [self.config.shapes[mixer] for kind in self.kinds for mixer in kind.mixers]

    def decode_bytes(self, rows: int, context: int) -> int:
        """The least that a decode of so many rows moves: weights once, each row's state in and out, the keys and values
        of its context, its hidden state in and out."""
        row = 2 * self.state_bytes() + context * self.token_kv_bytes() + 2 * self.config.hidden_size * self.itemsize
        return self.weight_bytes(rows) + rows * row

    def flops(self, tokens: int) -> int:
        """Multiplications and additions of all products of so many tokens."""
        values = 0
        for layer in self.layers():
            values += sum(rows * columns for rows, columns in layer.dense)
            if layer.experts is not None:
                values += 3 * layer.experts.top_k * layer.experts.intermediate_size * self.config.hidden_size
        return 2 * tokens * values


def touched_share(experts: ExpertsShape, tokens: int) -> float:
    """The share of the experts that so many tokens choose, on average, if each chooses evenly."""
    return float(1 - (1 - experts.top_k / experts.num_experts) ** tokens)
