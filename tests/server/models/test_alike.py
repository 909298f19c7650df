"""Few layers launch what the whole model does: which they are, and that nothing is left out."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rigs.drawn_configs import draw
from rigs.layer_oracle import MAX_DRAFT, PAGE_SIZE
from rigs.small_models import HYBRID
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltaline_kernels import Rows
from deltaline_kernels.operators import Operator
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.layers.streams import StreamEnds
from deltaline_server.models.alike import distinct_layers
from deltaline_server.models.model import AdapterOptions, Model, ModelOptions, load_model

# As in Qwen3.5 of 27 billion parameters: every fourth layer is attention.
EVERY_FOURTH = HYBRID | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4, "num_hidden_layers": 16}
# What a layer calls once.
MIXERS = ("gated_delta", "flex_decode")


class Sizes(TorchDispatchMode):
    """What torch was asked to compute, and of what sizes: neither of which contents."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = set[Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(repr((function, sizes_of([*args, *(kwargs or {}).items()]))))
        return function(*args, **(kwargs or {}))


def sizes_of(value: Any) -> Any:
    """The same of values, by what kernels are compiled for."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16
    if isinstance(value, list | tuple):
        return [sizes_of(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        return [sizes_of(getattr(value, field.name)) for field in fields(value)]
    return value if isinstance(value, int | float | str | None) else type(value)


def make(folder: Path, raw: dict[str, Any], **options: Any) -> tuple[Model, StatePool]:
    """A model with weights that are drawn, in bf16, and its state."""
    (folder / "config.json").write_text(json.dumps(raw))
    ends = StreamEnds.BOTH if "hc_mult" in raw else StreamEnds.NONE
    told = ModelOptions(torch.device("cpu"), random_init=folder / "config.json", dtype=torch.bfloat16, stream_ends=ends)
    model = load_model(replace(told, **options))
    return model, model.make_pool(StateOptions(4, MAX_DRAFT, page_size=PAGE_SIZE))


class Launched(NamedTuple):
    """What of the kernels is called, and what torch computes, of what sizes; the mixers, in their order."""

    calls: set[str]
    computed: set[str]
    mixers: list[str]


def launched(
    monkeypatch: pytest.MonkeyPatch, model: Model, pool: StatePool, span: int, slots: list[int] | None = None
) -> Launched:
    """What a decode, a verify and a prefill of skipped rows launch. slots: of the rows' adapters."""
    calls, mixers, torches = set[str](), list[str](), Sizes()

    def record(self: Operator, *args: Any, **kwargs: Any) -> None:
        calls.add(repr((self.name, sizes_of(list(self.bind(args, kwargs).items())))))
        if self.name in MIXERS:
            mixers.append(self.name)

    with monkeypatch.context() as patch, torches:
        patch.setattr(Operator, "check_gradients", record)  # called with what the function is called with
        for lengths in ([1, 1], [MAX_DRAFT, 1], [20, 66]):
            skipped, zeros = [-1, -1], [0, 0]
            fields = (lengths, skipped, skipped, lengths, zeros, zeros)
            rows = Rows.build(*fields, max_short=MAX_DRAFT, device="cpu", waypoints=[])
            hidden = torch.ones(sum(lengths), model.ends[span].input_width, dtype=model.dtype)
            mixers.clear()
            places = None if slots is None else torch.tensor(slots, dtype=torch.int32)
            model.forward(span, hidden, rows, pool, places)
    return Launched(calls, torches.found, mixers)


def few_and_whole(monkeypatch: pytest.MonkeyPatch, model: Model, pool: StatePool, **options: Any) -> list[Any]:
    """The same of a model that is abridged, and of the whole, for each span."""
    made, spans = (model.abridged(pool), model), range(len(model.spans))
    return [[launched(monkeypatch, one, pool, span, **options) for one in made] for span in spans]


@pytest.mark.parametrize("seed", range(36))
def test_few_layers_launch_what_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of random models of all families, in one span and in two."""
    drawn = draw(seed)
    if drawn.refused is not None:
        return
    [whole] = make(tmp_path, drawn.raw)[0].spans
    spans: list[tuple[range, ...]] = [(whole,)]
    if drawn.raw["model_type"] != "zamba2" and len(whole) > 1:  # whose later layers take what the first was given
        spans.append((whole[:1], whole[1:]))
    for some in spans:
        for few, all_layers in few_and_whole(monkeypatch, *make(tmp_path, drawn.raw, spans=some)):
            assert few.calls == all_layers.calls
            if not any("experts" in key for key in drawn.raw):  # on a CPU tokens are grouped by whom they chose
                assert few.computed == all_layers.computed


@pytest.mark.parametrize("slots", [None, [0, -1]], ids=["bare", "adapters"])
@pytest.mark.parametrize("streams", [{}, {"hc_mult": 2}], ids=["sums", "streams"])
def test_of_layers_that_are_alike_few_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: list[int] | None, streams: dict[str, Any]
) -> None:
    model, pool = make(tmp_path, EVERY_FOURTH | streams, adapters=AdapterOptions(2, 4))
    assert model.distinct(pool) == ((0, 1, 2, 3, 4, 15),)
    [(few, whole)] = few_and_whole(monkeypatch, model, pool, slots=slots)
    assert few.calls == whole.calls and few.computed == whole.computed
    assert few.mixers == [name for i in (0, 1, 2, 3, 4, 15) for name in whole.mixers[i : i + 1]]
    assert len(whole.mixers) == 16


def test_a_layer_whose_weights_stay_in_fp8_is_like_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaline_server.models.weights.can_multiply_fp8", lambda device: True)
    left = {"modules_to_not_convert": ["lm_head", "model.layers.9.mlp.down_proj"]}
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], **left}}
    model, pool = make(tmp_path, EVERY_FOURTH | quantised)
    assert model.distinct(pool) == ((0, 1, 2, 3, 4, 8, 9, 10, 15),)


BIAS = torch.zeros(8)


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        ({"weight": torch.zeros(4, 8)}, {"weight": torch.ones(4, 8)}, True),
        ({"weight": torch.zeros(4, 8)}, {"weight": torch.zeros(4, 9)}, False),
        ({"weight": torch.zeros(4, 8)}, {"weight": torch.zeros(8, 4).t()}, False),
        ({"weight": torch.zeros(4, 8)}, {"weight": torch.zeros(4, 8, dtype=torch.bfloat16)}, False),
        ({"weight": torch.zeros(5)[:4]}, {"weight": torch.zeros(5)[1:]}, False),
        ({"bias": BIAS}, {"bias": None}, False),
        ({"scale": 1.0}, {"scale": 1}, False),
        ({"scale": 1.0}, {"scale": 0.5}, False),
        ({"kept": {1: BIAS}}, {"kept": {2: BIAS}}, True),
        ({"parts": [BIAS]}, {"parts": [BIAS, BIAS]}, False),
        ({"compute": torch.relu}, {"compute": torch.relu}, True),
        ({"compute": torch.relu}, {"compute": torch.tanh}, False),
    ],
)
def test_what_makes_layers_alike(one: dict[str, Any], other: dict[str, Any], is_alike: bool) -> None:
    """In what they hold, and in their states."""
    nothing = dict[str, Any]()
    for layers, states in (([one, one, other, other], [nothing] * 4), ([nothing] * 4, [one, one, other, other])):
        assert distinct_layers(layers, states) == ((0, 1, 3) if is_alike else (0, 1, 2, 3))


def test_neighbours_are_computed_as_neighbours() -> None:
    """Of what one leaves the next one's launches are made."""
    layers = [{"size": size} for size in "aabababbccaa"]
    few = distinct_layers(layers, [()] * len(layers))
    assert few == (0, 1, 2, 3, 6, 7, 8, 9, 10, 11)
    assert distinct_layers(layers[:1], [()]) == (0,)
