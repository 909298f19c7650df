"""The served model: layers in spans, loaded at start."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from deltaline_kernels import LoraWeights, Rows, group_tokens, spread_slots
from deltaline_server.checkpoints.checkpoint import Checkpoint, TensorSource
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.fingerprint import HashedTensors, fingerprint
from deltaline_server.checkpoints.fp8.dequantised import DequantisedTensors
from deltaline_server.checkpoints.modules import Packed, Placement
from deltaline_server.checkpoints.read_ahead import ReadAhead
from deltaline_server.checkpoints.shared_blocks import SharedBlocks
from deltaline_server.checkpoints.staging import CudaStaging
from deltaline_server.layers.block import Block, Layer
from deltaline_server.layers.hybrid import SharedBlock
from deltaline_server.layers.hyper_connection import HyperBlock
from deltaline_server.layers.shapes import MixerShape, PagedShape
from deltaline_server.layers.stack import Stack, make_stack
from deltaline_server.layers.state_pool import StateOptions, StatePool, plan_state
from deltaline_server.layers.streams import StreamEnds, span_ends
from deltaline_server.memory.pinning import CudaPinning, HostMemory
from deltaline_server.models.alike import distinct_layers
from deltaline_server.models.config import CONFIG_FILE, ModelConfig, Scope
from deltaline_server.models.lora_layout import AdapterLayout
from deltaline_server.models.lora_places import AdapterStore, store_bytes
from deltaline_server.models.servable import Auto, auto_spans, check_spans, layer_kinds, left_out, spans_text
from deltaline_server.models.weights import CPU, LayerLoader, opened, random_init
from deltaline_server.ranks.ways import Ranks
from deltaline_server.step import SpanShapes

NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
}


@dataclass(frozen=True)
class AdapterOptions:
    """Room for adapters on the device: places, and the largest rank that one may have."""

    num_places: int
    max_rank: int


@dataclass(frozen=True)
class ModelOptions:
    """What to serve and where.

    model: a model directory; or random_init: a config.json whose weights are drawn from `seed`. Exactly one of them.
    layers: the layers that may be served, None for all of the checkpoint's.
    spans: what a step may address; None for one span of all `layers` in block scope, one for each in mixer scope;
        AUTO for spans of those among them that can be served. Layers of no span are not loaded.
    dtype: None for the checkpoint's, float32 where it names none.
    ranks: what joins the outputs of the ranks that share the model; None leaves each its summand.
    adapters: None for none. max_context: most tokens of a sequence of a model with attention, 0 for the checkpoint's.
    stream_ends: of a model with residual streams, which of its ends the spans have.
    """

    device: torch.device
    model: Path | None = None
    random_init: Path | None = None
    seed: int = 0
    layers: range | None = None
    spans: Sequence[range] | Auto | None = None
    scope: Scope = Scope.BLOCK
    dtype: torch.dtype | None = None
    rank: int = 0
    world_size: int = 1
    ranks: Ranks | None = None
    adapters: AdapterOptions | None = None
    max_context: int = 0
    stream_ends: StreamEnds = StreamEnds.NONE


class Model:
    """Layers in spans.

    Attributes: config; scope; spans (ranges of layer numbers, as in the checkpoint); ends (of each span: what a token
    is); hidden_size; dtype and numpy_dtype of hidden states; device; world_size (ranks that
    share it); shapes (of the layers' mixers on this rank, in the order of their states in a pool); block_sizes (the
    self-test's arguments for what blocks have beside mixers: residual streams, MLPs, experts); layout (of what adapters
    may change); adapters (their places, None where there are none); paged_spans (those with attention layers, which
    keep pages); left_out (what AUTO left to the orchestrator, and why, in one line; else empty).
    """

    def __init__(
        self,
        plan: ModelPlan,
        scope: Scope,
        stacks: Sequence[Stack],
        adapters: AdapterStore | None,
        weights: Mapping[str, Any],
    ) -> None:
        """stacks: of the plan's spans. weights: what they were, as JSON values: digests, or a seed."""
        config, shapes, placement = plan.config, plan.loader.shapes, plan.layout.placement
        self.config, self.scope = config, scope
        self.spans, self.ends = plan.spans, plan.ends
        self.hidden_size = config.hidden_size
        self.dtype = placement.dtype
        self.numpy_dtype = NUMPY_DTYPES[placement.dtype]
        self.device, self.world_size = placement.device, placement.world_size
        self.shapes = tuple(plan.shapes)
        sizes = {"streams": plan.streams, "hidden": config.hidden_size}
        self.block_sizes: dict[str, Any] = sizes | plan.loader.test_sizes()
        self.layout = plan.layout
        self.adapters = adapters
        self.left_out = plan.left_out
        # What is computed of each span, and the layers' numbers.
        self._stacks, self._layers = tuple(stacks), tuple(tuple(span) for span in plan.spans)
        self._weights, self._ranks = weights, placement.ranks
        self.paged_spans = frozenset(
            i
            for i, span in enumerate(plan.spans)
            if any(isinstance(shape, PagedShape) for layer in span for shape in shapes[layer])
        )
        # The place of each layer's state in a StatePool of this model; a slice of them where it has none, or two.
        ends = itertools.accumulate((len(shapes[layer]) for layer in plan.layers), initial=0)
        self._places = {
            layer: begin if len(shapes[layer]) == 1 else slice(begin, begin + len(shapes[layer]))
            for layer, begin in zip(plan.layers, ends, strict=False)
        }

    @property
    def num_layers(self) -> int:
        """Layers that are loaded: those of the spans."""
        return len(self._places)

    def fingerprint(self, state_dtype: torch.dtype, layout_version: int) -> bytes:
        """Return the 32 bytes that name what this model's states mean, the same on every rank of every world.

        state_dtype: of recurrent states. layout_version: of the bytes that they are stored in.
        """
        identity = {
            "layout": layout_version,
            "config": self.config.meaning(),
            "scope": self.scope,
            "spans": [[span.start, span.stop] for span in self.spans],
            "dtype": str(self.dtype),
            "state_dtype": str(state_dtype),
            **self._weights,
        }
        return fingerprint(identity)

    def make_pool(self, options: StateOptions) -> StatePool:
        """Allocate the state of this model's layers. Raises ModelError as StatePool does."""
        return StatePool(self.shapes, options, dtype=self.dtype, device=self.device)

    def forward(
        self,
        span: int,
        hidden: Tensor,
        rows: Rows,
        pool: StatePool,
        adapter_slots: Tensor | None = None,
        new_pages: Tensor | None = None,
    ) -> Tensor:
        """Run the layers of a span over hidden `[T, input width]`, not mutated, to `[T, output width]`.

        Mutates the write lines of `pool`. Over ranks hidden is rank 0's: what the others give becomes that.

        new_pages: as StatePool.put_pages takes them, those that begin among the rows' tokens; None for none, and where
        the span has no attention layers.

        adapter_slots: int32 `[N]`, contiguous, the place of each row's adapter, -1 for none; None where no row has one.
        Raises ValueError: rows with adapters, and no places for any.
        """
        if self._ranks is not None:
            self._ranks.broadcast(hidden)
        if new_pages is not None:
            pool.put_pages(new_pages)
        tiles = None
        if adapter_slots is not None:
            if self.adapters is None:
                raise ValueError("adapter_slots: expected None, as this model has no adapter slots")
            token_slots = spread_slots(adapter_slots, rows.query_start_loc, hidden.shape[0])
            tiles = group_tokens(token_slots, self.adapters.num_places, self.adapters.max_rank)
        states = [pool.layers[self._places[layer]] for layer in self._layers[span]]
        return self._stacks[span].forward(hidden, rows, states, tiles).to(self.dtype)

    def abridged(self, pool: StatePool) -> Model:
        """This model with fewer layers, and their numbers those that are left of each span: what `forward` launches of
        it on this pool is all that it launches of the whole, the same kernels for the same sizes, less often."""
        made, places = copy(self), self.distinct(pool)
        made._stacks = tuple(stack.part(some) for stack, some in zip(self._stacks, places, strict=True))
        made._layers = tuple(tuple(map(of.__getitem__, some)) for of, some in zip(self._layers, places, strict=True))
        return made

    def distinct(self, pool: StatePool) -> tuple[tuple[int, ...], ...]:
        """The places in each span of the layers that `abridged` leaves: on all ranks the same."""
        states = ([pool.layers[self._places[layer]] for layer in layers] for layers in self._layers)
        return tuple(distinct_layers(stack.layers, some) for stack, some in zip(self._stacks, states, strict=True))


def load_model(options: ModelOptions, report: Callable[[int, int], object] = lambda done, total: None) -> Model:
    """Load what `options` ask for.

    Raises ModelError: the config, a span, a layer or a tensor is not as expected, and the message names it; or there is
    no room for the weights, or the adapters' places.
    """
    with open_plan(options, options.device, hashes=True) as plan:
        try:
            return _load(plan, options, report)
        except RuntimeError as error:  # that is how torch says that there is no room
            why = str(error).partition("\n")[0]
            raise ModelError(
                f"--model, --random-init: the weights can't be loaded to {options.device}: {why}"
            ) from error


def _load(plan: ModelPlan, options: ModelOptions, report: Callable[[int, int], object]) -> Model:
    """Load the planned layers. Raises RuntimeError where there is no room."""
    requested = options.adapters
    store = None if requested is None else AdapterStore(plan.layout, requested.num_places, requested.max_rank)
    layers: dict[int, Layer | Block | HyperBlock | SharedBlock] = {}
    order = plan.hashed.begin(plan.stored()) if isinstance(plan.hashed, ReadAhead) else plan.layers
    for number in order:
        report(len(layers), len(plan.layers))
        adapters: Mapping[Packed, LoraWeights] = {} if store is None else store.layer(number)
        load = plan.loader.block if options.scope is Scope.BLOCK else plan.loader.mixer
        layers[number] = load(number, adapters)
    stacks = [
        make_stack([layers[number] for number in span], ends, plan.streams, plan.loader.head)
        for span, ends in zip(plan.spans, plan.ends, strict=True)
    ]
    if plan.hashed is not None:
        weights: dict[str, Any] = {"tensors": plan.hashed.identity()}
    else:
        weights = {"seed": options.seed, "drawn": plan.loader.drawn}
    return Model(plan, options.scope, stacks, store, weights)


@contextmanager
def open_weights(options: ModelOptions) -> Iterator[LayerLoader]:
    """Open once more what `load_model` loads from, to read rows of weights, on no device. Raises as it does."""
    with open_plan(options) as plan:
        yield plan.loader


def check_model(options: ModelOptions, state: StateOptions | None = None) -> int:
    """Check all that `load_model` checks, on no device: names and shapes of weights are read, their values are not.

    With `state`, check that its limit holds the model's state as well; none is allocated. Returns the bytes that the
    places of adapters will take, 0 where there are none.
    Raises ModelError as `load_model` and `Model.make_pool` do.
    """
    with open_plan(options) as plan:
        if state is not None:
            plan_state(plan.shapes, state, plan.layout.placement.dtype)
        requested = options.adapters
        return 0 if requested is None else store_bytes(plan.layout, requested.num_places, requested.max_rank)


@dataclass(frozen=True)
class ModelPlan:
    """What to load: everything is checked, no weight is read. `layers` are those of the spans, in their order.

    streams: residual streams within the spans, 0 where layers pass on `[T, hidden]`. hashed: what the loader reads from
    where it hashes what it reads. between: the sources that it reads through, from there on. left_out: as Model has it.
    """

    config: ModelConfig
    spans: tuple[range, ...]
    ends: tuple[SpanShapes, ...]
    streams: int
    layers: list[int]
    layout: AdapterLayout
    loader: LayerLoader
    hashed: HashedTensors | ReadAhead | None
    between: tuple[DequantisedTensors | SharedBlocks, ...]
    left_out: str

    def stored(self) -> dict[int, list[str]]:
        """The names of the checkpoint's tensors that each layer is the first to be loaded of."""
        found, known = dict[int, list[str]](), set[str]()
        for layer in self.layers:
            names = self.loader.stored(layer)
            for source in reversed(self.between):
                names = [part for name in names for part in source.stored(name)]
            found[layer] = [name for name in names if name not in known]
            known.update(names)
        return found

    @property
    def shapes(self) -> list[MixerShape]:
        """The shapes of the layers' mixers on this rank, in the order of their states in a pool."""
        return [shape for layer in self.layers for shape in self.loader.shapes[layer]]


@contextmanager
def open_plan(options: ModelOptions, device: torch.device = CPU, *, hashes: bool = False) -> Iterator[ModelPlan]:
    """Plan to load what `options` ask for, to this device; the checkpoint is open inside the context, and no weight is
    read. hashes: a checkpoint's tensors are hashed as the loader reads them. Raises ModelError as `load_model` does."""
    with ExitStack() as stack:
        checkpoint: Checkpoint | None = None
        if options.model is not None and options.random_init is None:
            if options.model.is_file():
                raise ModelError(
                    f"--model: expected a directory, got the file {options.model}; try {options.model.parent}"
                )
            _require("--model", options.model / CONFIG_FILE)
            config = ModelConfig.from_directory(options.model)
            checkpoint = stack.enter_context(Checkpoint(options.model))
        elif options.random_init is not None and options.model is None:
            if options.random_init.is_dir():
                path = options.random_init / CONFIG_FILE
                raise ModelError(f"--random-init: expected a {CONFIG_FILE}, got a directory; try {path}")
            _require("--random-init", options.random_init)
            config = ModelConfig.from_file(options.random_init)
        else:
            raise ModelError("--model, --random-init: expected either a model directory or a config for random weights")
        config = config.with_context(options.max_context)
        spans, left = _choose_spans(config, options)
        layers = sorted(layer for span in spans for layer in span)
        dtype = options.dtype or getattr(torch, config.dtype or "float32")
        placement = Placement(_with_index(device), dtype, options.rank, options.world_size, options.ranks)
        hashed: HashedTensors | ReadAhead | None = None
        if hashes and checkpoint is not None:
            hashed = stack.enter_context(_hashed(checkpoint, placement.device))
        source: TensorSource = (
            hashed or checkpoint or random_init(config, layers, options.scope, options.seed, placement.device)
        )
        between = () if checkpoint is None else opened(source, config, placement)
        loader = LayerLoader(between[-1] if between else source, config, layers, options.scope, placement)
        streams = config.streams if options.scope is Scope.BLOCK else None
        token = SpanShapes(config.hidden_size, dtype.itemsize)
        ends = span_ends(spans, len(config.layers), token, streams, options.stream_ends)
        if options.stream_ends.has_head:
            loader.check_head()
        layout = AdapterLayout(config, options.scope, layers, placement)
        num_streams = 0 if streams is None else streams.count
        yield ModelPlan(config, spans, ends, num_streams, layers, layout, loader, hashed, between, left)


@contextmanager
def _hashed(checkpoint: Checkpoint, device: torch.device) -> Iterator[HashedTensors | ReadAhead]:
    """What reads a checkpoint for a device, and hashes what it reads; what memory it had is given back at the end."""
    if device.type == "cpu":  # which computes with what the kernel maps
        yield HashedTensors(checkpoint)
        return
    memory = HostMemory(CudaPinning(device))
    try:
        with ReadAhead(checkpoint, CudaStaging(device, memory.allocate)) as source:
            yield source
    finally:
        torch.cuda.synchronize(device)  # nothing is copied from its memory any more
        memory.close()
        torch.cuda.empty_cache()


def _choose_spans(config: ModelConfig, options: ModelOptions) -> tuple[tuple[range, ...], str]:
    """The spans to serve; and what is left out, as Model has it. Raises ModelError where they can't be served."""
    every = range(len(config.layers))
    served = every if options.layers is None else options.layers
    if served.step != 1 or not 0 <= served.start < served.stop <= every.stop:
        raise ModelError(f"--layers: expected a range inside {spans_text(every)}, got {spans_text(served)}")
    if not isinstance(options.spans, Auto):
        spans = check_spans(options.spans, served, options.scope)
        for span in spans:
            layer_kinds(config, span, options.scope, first=span.start)
        return spans, ""
    spans = auto_spans(config, served, options.scope)
    left = left_out(config, served, options.scope)
    if not spans:
        raise ModelError(f"--spans: expected layers that can be served in {options.scope} scope, got none of {left}")
    return spans, left


def _require(flag: str, path: Path) -> None:
    """Raise ModelError naming the option unless there is something at the path that its value leads to."""
    try:
        path.stat()
    except OSError as error:
        raise ModelError(f"{flag}: expected a file {path}, found none ({error.strerror})") from error


def _with_index(device: torch.device) -> torch.device:
    """The device with its index, as tensors on it name it. Raises ModelError if torch can't use it."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise ModelError(f"--device: expected one that torch finds here, got {device}") from error
