"""A model's products alone: torch's own, all layers one after the other, each with weights of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaline_bench.model.work import LayerWork, Work
from deltaline_bench.timer import Timer, Times, time_in_turns


@dataclass(frozen=True)
class _Weights:
    """The weights of one layer's products: `[out, in]`, and of experts `[E, in, out]`."""

    dense: tuple[Tensor, ...]
    experts: tuple[Tensor, ...]


class Products:
    """The products of a model. Holds weights as large as the model's."""

    def __init__(self, work: Work, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self._hidden = work.config.hidden_size
        self._layers = [(layer, self._draw(layer)) for layer in work.layers()]

    def call(self, tokens: int) -> Callable[[], Tensor]:
        """What computes all products of so many tokens, and returns the last one."""
        inputs = {columns: self._normal(tokens, columns) for layer, _ in self._layers for _, columns in layer.dense}
        chosen: dict[int, tuple[Tensor, ...]] = {}
        for layer, _ in self._layers:
            if layer.experts is not None and not chosen:
                chosen[0] = self._choose(layer, tokens)

        def compute() -> Tensor:
            y = next(iter(inputs.values()))
            for _, weights in self._layers:
                for weight in weights.dense:
                    y = F.linear(inputs[weight.shape[1]], weight)
                if weights.experts:
                    outer, inner, ends = chosen[0]
                    for x, weight in zip((outer, inner), weights.experts, strict=True):
                        y = F.grouped_mm(x, weight, offs=ends)
            return y

        return compute

    def measure(self, tokens: int, timer: Timer, rounds: int) -> Times:
        """Time all products of so many tokens, from a graph."""
        launch = timer.prepare(self.call(tokens))
        if not launch.is_captured:
            raise RuntimeError(f"products: expected to be captured in a graph, got {launch.reason}")
        return time_in_turns(timer, {"products": launch.run}, rounds)["products"]

    def _draw(self, layer: LayerWork) -> _Weights:
        dense = tuple(self._normal(rows, columns) for rows, columns in layer.dense)
        if layer.experts is None:
            return _Weights(dense, ())
        count, inner = layer.experts.num_experts, layer.experts.intermediate_size
        gate_up, down = self._normal(count, 2 * inner, self._hidden), self._normal(count, self._hidden, inner)
        return _Weights(dense, (gate_up.transpose(1, 2), down.transpose(1, 2)))

    def _choose(self, layer: LayerWork, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows for the experts that tokens choose evenly, sorted by expert, before and between their products, and
        where the rows of each expert end."""
        assert layer.experts is not None
        count, top_k = layer.experts.num_experts, layer.experts.top_k
        order = torch.rand(tokens, count, generator=self._generator, device=self._device).argsort(dim=1)[:, :top_k]
        ends = torch.bincount(order.flatten(), minlength=count).cumsum(0).to(torch.int32)
        rows = tokens * top_k
        return self._normal(rows, self._hidden), self._normal(rows, layer.experts.intermediate_size), ends

    def _normal(self, *size: int) -> Tensor:
        """Random numbers: what a product takes depends on its values, by the power they draw."""
        values = torch.empty(size, dtype=self._dtype, device=self._device)
        return values.normal_(generator=self._generator).mul_(size[-1] ** -0.5)
