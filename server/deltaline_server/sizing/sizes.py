"""How much memory a server with given options takes, and how many sequences a budget holds; allocates none of it.

The sizes are those of the code that allocates (state_pool.py, kv_cache.py, lora_places.py), asked without a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deltaline_kernels.mhc.gates import NUM_TERMS, count_columns
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.computing import device_type, model_options, spare_lines_of, state_options
from deltaline_server.config import Config
from deltaline_server.layers.expert_shape import SIGMOID, ExpertsShape
from deltaline_server.layers.experts import scale_grids
from deltaline_server.layers.hyper_connection import CONNECTIONS, head_tensors
from deltaline_server.layers.kv_cache import kept_values
from deltaline_server.layers.shapes import Mamba1Shape, Mamba2Shape, MixerShape, PagedShape
from deltaline_server.layers.state_pool import StateOptions, StatePlan, line_parts, plan_state
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.model import ModelPlan, check_model, open_plan
from deltaline_server.models.parts import LayerKind, MlpKind
from deltaline_server.models.servable import layer_kinds
from deltaline_server.models.weights import CPU, expected_tensors
from deltaline_server.ranks.group import PEER_BYTES
from deltaline_server.ranks.peer_memory import slots_bytes
from deltaline_server.ranks.place import Place
from deltaline_server.snapshots.device.transfer import staging_bytes
from deltaline_server.snapshots.layout import StateLayer, StateLayout


@dataclass(frozen=True)
class LayerSize:
    """Layers of one kind, alike in size: their numbers, and of one of them the bytes of a sequence's line by part, of a
    token in pages, and of the weights."""

    kind: str
    layers: tuple[int, ...]
    line: dict[str, int]
    token_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class Sizes:
    """What a server takes on its device. state: its lines and pages, as they are allocated at start.

    adapter_bytes: of the places of adapters. context: tokens that a sequence is counted with. fits: whether the state
    is within the options' limit; of one that is not, `state` is as it would be without a limit.
    """

    config: Config
    plan: ModelPlan
    options: StateOptions
    layers: list[LayerSize]
    state: StatePlan
    adapter_bytes: int
    context: int
    fits: bool

    @property
    def weight_bytes(self) -> int:
        """Bytes of the served layers' weights, of the head of streams, and of attention layers' table of rotations."""
        rotations = (
            shape.max_positions * shape.table_channels * torch.float32.itemsize
            for shape in self.plan.shapes
            if isinstance(shape, PagedShape)
        )
        layers = sum(len(size.layers) * size.weight_bytes for size in self.layers)
        return layers + next(rotations, 0) + _head_bytes(self.plan)

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, state, what its pages and stored states are copied through, places of adapters, and what
        is shared with peers: all that is allocated at start, but for what batches need."""
        copy_bytes = 0 if self.state.kv is None else self.state.kv.copy_bytes
        between_bytes = copy_bytes + self.transfer_bytes + self.peer_bytes
        return self.weight_bytes + self.state.total_bytes + between_bytes + self.adapter_bytes

    @property
    def transfer_bytes(self) -> int:
        """Bytes of what states go through on their way to host memory and back; 0 where there is no such tier."""
        if not self.config.host_state_bytes:
            return 0
        layout = StateLayout(
            tuple(
                StateLayer(layer, 0, shape) for layer in self.plan.layers for shape in self.plan.loader.shapes[layer]
            ),
            num_spans=1,
            itemsize=self.plan.layout.placement.dtype.itemsize,
            state_itemsize=self.options.state_dtype.itemsize,
            max_draft=self.options.max_draft,
        )
        return staging_bytes(layout, self.state.kv)

    @property
    def peer_bytes(self) -> int:
        """Bytes of a GPU's memory through which ranks sum, where the GPUs reach each other's; 0 on the CPU and where
        there are no ranks."""
        ranks = self.plan.layout.placement.world_size
        return 0 if ranks == 1 or device_type(self.config) == "cpu" else PEER_BYTES + slots_bytes(ranks)

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence of `context` tokens."""
        return 0 if self.state.kv is None else -(-self.context // self.state.kv.page_size)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a sequence of `context` tokens: a line of every layer, and whole pages."""
        pages = 0 if self.state.kv is None else self.pages_per_sequence * self.state.kv.page_bytes
        return self.state.line_bytes + pages

    @property
    def sequences_by_pages(self) -> int | None:
        """Sequences of `context` tokens that all pages hold, None without pages."""
        return None if self.state.kv is None else self.state.kv.num_pages // self.pages_per_sequence

    def sequences_in(self, budget_bytes: int) -> int:
        """The most sequences of `context` tokens each that a state of so many bytes holds; 0 where it holds none.

        What --max-sequences is to be for them: as many lines, with the null line and those of snapshots, and pages for
        that many tokens each.
        """
        lines = sum(len(size.layers) * sum(size.line.values()) for size in self.layers)
        pages = 0 if self.state.kv is None else self.pages_per_sequence * self.state.kv.page_bytes
        low, high = 0, budget_bytes // (lines + pages)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._holds(middle, budget_bytes) else (low, middle - 1)
        return low

    def _holds(self, count: int, budget_bytes: int) -> bool:
        snapshot_lines = self.config.snapshot_lines_beside(count) + spare_lines_of(self.config)
        options = replace(self.options, num_lines=count, snapshot_lines=snapshot_lines, limit_bytes=budget_bytes)
        try:
            state = plan_state(self.plan.shapes, options, self.plan.layout.placement.dtype)
        except ModelError:
            return False
        return state.kv is None or state.kv.num_pages >= count * self.pages_per_sequence


def size(config: Config, context: int | None, place: Place | None = None) -> Sizes:
    """Size a server with these options, over ranks one of them; no device is asked.

    context: None for the most tokens of a sequence, or 0 where that has no limit. place: of this process among ranks
    that have been started. Raises ModelError as the server's start does, but for a limit that is too low; ValueError
    for a context that the server would not take.
    """
    options, state = model_options(config, place, CPU), state_options(config)
    adapter_bytes = check_model(options)
    with open_plan(options) as plan:
        planned, fits = _plan_state(plan.shapes, state, plan.layout.placement.dtype)
        kinds: dict[tuple[LayerKind, int], list[int]] = {}
        for layer, kind in layer_kinds(plan.config, plan.layers, options.scope).items():
            kinds.setdefault((kind, _saved_bytes(plan, layer)), []).append(layer)
        most = 0 if planned.kv is None else planned.kv.max_context
        if context is not None and not 1 <= context <= (most or context):
            raise ValueError(
                f"--context: expected 1 .. {most} tokens, most of a sequence (--max-context), got {context}"
            )
        sizes = [_layer_size(plan, options.scope, *kind, layers, state) for kind, layers in kinds.items()]
        return Sizes(config, plan, state, sizes, planned, adapter_bytes, most if context is None else context, fits)


def _plan_state(shapes: list[MixerShape], options: StateOptions, dtype: torch.dtype) -> tuple[StatePlan, bool]:
    """Plan the state; and whether it is within the options' limit. Raises ModelError for whatever else is wrong."""
    try:
        return plan_state(shapes, options, dtype), True
    except ModelError:
        if not options.limit_bytes:
            raise
        return plan_state(shapes, replace(options, limit_bytes=0), dtype), False


def _saved_bytes(plan: ModelPlan, layer: int) -> int:
    """How much less a layer's weights take because some of them stay in FP8."""
    dtype, pieces, experts = plan.layout.placement.dtype, plan.loader.pieces(layer), plan.loader.experts
    saved = sum(piece.rows * piece.columns * dtype.itemsize - piece.num_bytes(dtype) for piece in pieces)
    is_mixture = plan.config.layers[layer].mlp is MlpKind.MIXTURE_OF_EXPERTS
    if experts is None or not is_mixture or not plan.loader.experts_in_fp8(layer):
        return saved
    width = experts.latent_size or plan.config.hidden_size
    values = (experts.activation.is_gated + 2) * experts.intermediate_size * width
    scales = sum(map(math.prod, scale_grids(experts, width)))
    count = experts.num_experts + experts.num_shared
    return saved + count * (values * (dtype.itemsize - 1) - scales * torch.float32.itemsize)


def _layer_size(
    plan: ModelPlan, scope: Scope, kind: LayerKind, saved_bytes: int, layers: Sequence[int], state: StateOptions
) -> LayerSize:
    """The sizes of the layers of one kind, which are alike. saved_bytes: see _saved_bytes."""
    shapes, dtype = plan.loader.shapes[layers[0]], plan.layout.placement.dtype
    config = _share(plan, kind)
    has_terms = dtype == torch.bfloat16 and not plan.config.residual_in_fp32
    weight_bytes = sum(
        math.prod(size) * _weight_dtype(name, size, dtype).itemsize + (_term_bytes(name, size) if has_terms else 0)
        for name, size in expected_tensors(config, kind, scope).items()
    )
    weight_bytes -= saved_bytes
    if config.experts is not None and kind.mlp is MlpKind.MIXTURE_OF_EXPERTS:
        weight_bytes += _expert_bytes(config, config.experts, dtype)
    weight_bytes += sum(
        sum(shape.projected) * torch.float32.itemsize
        for shape in shapes
        if (isinstance(shape, Mamba2Shape) and shape.section_scales is not None)
        or (isinstance(shape, Mamba1Shape) and shape.norm_eps and not shape.has_norm_weights)
    )
    line, token_bytes = dict[str, int](), 0
    for shape in shapes:
        if isinstance(shape, PagedShape):
            token_bytes = kept_values(shape) * dtype.itemsize
        else:
            line = line_parts(shape, state, dtype)
    return LayerSize(str(kind), tuple(layers), line, token_bytes, weight_bytes)


def _share(plan: ModelPlan, kind: LayerKind) -> ModelConfig:
    """The config of a model whose layers of a kind are as large as one rank's share of them."""
    config, ranks = plan.config, plan.layout.placement.world_size
    return replace(
        config,
        shapes={mixer: config.shapes[mixer].shard(ranks) for mixer in kind.mixers},
        intermediate_size=config.intermediate_size // ranks,
        experts=plan.loader.experts,
    )


def _expert_bytes(config: ModelConfig, experts: ExpertsShape, dtype: torch.dtype) -> int:
    """What is kept of a mixture of experts beyond its tensors: the shared one is whole ones of the others' size, and
    the gates are fp32 where scores are sigmoids."""
    names = config.family.blocks.experts
    # One that is apart has no zeros.
    zeros = experts.num_shared and experts.num_shared * experts.intermediate_size - experts.shared_size
    extra = sum(map(len, names.parts)) * zeros * config.hidden_size * dtype.itemsize
    if experts.scoring == SIGMOID:
        gates = experts.num_experts + experts.has_shared_gate
        extra += gates * config.hidden_size * (torch.float32.itemsize - dtype.itemsize)
    return extra


def _weight_dtype(name: str, size: Sequence[int], dtype: torch.dtype) -> torch.dtype:
    """What a tensor is kept in: vectors that multiply or gate, and the gates of streams, in fp32; matrices and what is
    added to products in the model's dtype (layer_reader.py, hyper_connection.py)."""
    is_gate = any(connection in name for connection in CONNECTIONS)
    is_vector = len(size) == 1 or name.endswith("A_log")  # which may be stored in more dimensions
    is_added = name.endswith(".bias") and not name.endswith(".dt_proj.bias")  # that of time steps is a gate's
    return torch.float32 if is_gate or (is_vector and not is_added) else dtype


def _head_bytes(plan: ModelPlan) -> int:
    """What is kept of the head that joins the streams: each span with no streams behind it has one."""
    count = sum(plan.streams > 0 and not ends.output_streams for ends in plan.ends)
    if not count or plan.config.streams is None:
        return 0
    sizes = head_tensors(plan.config.streams, plan.config.hidden_size).values()
    return count * sum(map(math.prod, sizes)) * torch.float32.itemsize


def _term_bytes(name: str, size: Sequence[int]) -> int:
    """What is kept of a tensor beside it: of the products of bf16 streams the weight's bf16 terms."""
    is_product = any(f"{connection}fn" in name for connection in CONNECTIONS)
    return NUM_TERMS * count_columns(size[0]) * size[1] * torch.bfloat16.itemsize if is_product else 0
