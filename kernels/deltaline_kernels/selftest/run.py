"""Compares every kernel family with its reference on small inputs, on the device that is to serve.

Wrong code from an assembler shows here before it shows in an answer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels.conv1d import causal_conv1d, causal_conv1d_reference
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads
from deltaline_kernels.gated_delta import gated_delta, gated_delta_reference
from deltaline_kernels.kda import kda, kda_reference
from deltaline_kernels.mamba2 import mamba2, mamba2_reference
from deltaline_kernels.moe import Router
from deltaline_kernels.norm import gated_rms_norm, gated_rms_norm_reference
from deltaline_kernels.rows import Rows
from deltaline_kernels.selftest.attention import (
    attention_batches,
    compare_attention,
    compare_latents,
    short_attention_batches,
)
from deltaline_kernels.selftest.block import compare_block
from deltaline_kernels.selftest.fp8 import compare_fp8
from deltaline_kernels.selftest.lora import compare_lora
from deltaline_kernels.selftest.mamba1 import compare_mamba1
from deltaline_kernels.selftest.mhc import compare_mhc
from deltaline_kernels.selftest.moe import compare_moe, tokens_of_experts
from deltaline_kernels.selftest.parts import has_parts, run_in_parts
from deltaline_kernels.selftest.shapes import (
    MANY_WALKED,
    Compared,
    Fill,
    Fills,
    Part,
    Shapes,
    batches,
    one_and_many_prefills,
    projected,
    short_batches,
    waypoint_batch,
)

# Tokens of batches of several adapters: more than 128 of one adapter; on a GPU large and dense tiles too.
ADAPTED, ADAPTED_GPU = (1, 40, 250), (1, 40, 250, 600, 1200)
# Kinds of inputs, in the order in which they are tried.
KINDS = (("random",), ("integers", "ones"))
# Compilers hold the interpreter's lock for a tenth of their time.
THREADS = {"cpu": 1, "cuda": 16}
# Largest difference, relative to the largest value of the reference (at least 1).
LIMITS = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 8e-3}


@dataclass(frozen=True)
class Check:
    """One comparison: its relative error and the limit that it must keep."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


# Long by its sizes and what they mean: a model has so many, and a server tells all of them at once.
def run_selftest(
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    num_key_heads: int = 2,
    num_value_heads: int = 4,
    key_dim: int = 64,
    value_dim: int = 64,
    conv_width: int = 4,
    max_draft: int = 4,
    state_dtype: torch.dtype = torch.float32,
    recurrence: str = "gated_delta",
    norm_groups: int | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    has_conv_bias: bool = False,
    rotary_dim: int = 16,
    page_size: int = 64,
    is_gated: bool = True,
    norms_heads: bool = True,
    raw_gates: bool = False,
    norms_first: bool = False,
    lower_bound: float | None = None,
    streams: int = 0,
    hidden: int = 64,
    mlp_dim: int = 0,
    mlp_limit: float = 0.0,
    router: Router | None = None,
    num_experts: int = 0,
    expert_dim: int = 64,
    expert_activation: str = "silu",
    experts_in_fp8: Sequence[bool] = (False,),
    fp8_sizes: Sequence[tuple[int, int]] = (),
    has_adapters: bool = True,
) -> list[Check]:
    """Run every family that a model has on `device` with inputs of `dtype`; wait for the device.

    The sizes are constants of the compiled kernels: with a model's own, what is compared is what serves it.

    Args:
        recurrence: the mixer's, "gated_delta", "kda", "mamba1", "mamba2", "attention", "latent_attention" or
            "short_conv". Groups, heads, state dim and head dim of Mamba2 are key heads, value heads, key dim and value
            dim here; key-value heads, heads and head dim of attention are key heads, value heads and key dim; of
            latent attention the key dim is what is kept of a token, the value dim the latent. A short convolution has
            no key heads, and the channels of its value heads; so has Mamba-1, whose channels have key dim states each.
        norm_groups: parts of a Mamba2 layer's channels that its norm takes one by one; None: its groups.
        dt_limit: least and greatest time step of a Mamba2 layer.
        has_conv_bias: whether the convolution of a Mamba-1 or Mamba2 layer, or a short one, has a bias.
        rotary_dim, page_size: of attention and of latent attention alone.
        is_gated, norms_heads: whether its outputs have a gate, and whether heads of queries and keys are normalised.
        norms_first: whether the norm of a Mamba2 layer is before the gate.
        raw_gates: whether the gated delta rule is given decays and strengths themselves, strengths of up to 2.
        lower_bound: of the log decays of KDA; None: they have none.
        hidden: channels of the model's hidden states; 0: no norms of them are compared. streams: residual streams of
            them; 0: the model mixes none.
        mlp_dim: channels of its MLPs between their products; 0: it has none. mlp_limit: of gates and what they
            multiply, of experts too; 0: none.
        router: how tokens of `hidden` channels choose among `num_experts` experts of `expert_dim` channels, the shared
            ones not counted; None: the model has no experts. expert_activation: as `run_experts` takes it.
        experts_in_fp8: whether experts stay in FP8; of a model with both kinds, both. fp8_sizes: outputs and inputs of
            the other weights that do. has_adapters: whether it takes adapters.

    Returns:
        One Check for each family and kind of input. A NaN counts as an infinite error.

    Raises:
        KeyError: `dtype` is not fp32, bf16 or fp16, or `recurrence` none of these. TypeError, ValueError: sizes
            that the kernels don't take.
    """
    shapes = Shapes(
        recurrence,
        DeltaHeads(num_key_heads, num_value_heads, key_dim, value_dim, key_dim**-0.5, 1e-6, keyed=recurrence == "kda"),
        conv_width,
        max_draft,
        dtype,
        state_dtype,
        norm_groups or num_key_heads,
        dt_limit,
        has_conv_bias,
        rotary_dim,
        page_size,
        is_gated,
        norms_heads,
        raw_gates,
        norms_first,
        lower_bound,
    )
    limit = max(LIMITS[dtype], LIMITS[state_dtype])
    parts = list(_mixer_parts(shapes, device))
    if has_adapters:
        parts += _adapter_parts(shapes, device)
    if hidden:
        parts.append(partial(compare_block, hidden=hidden, mlp_dim=mlp_dim, limit=mlp_limit, dtype=dtype))
    parts += [partial(compare_fp8, outputs=size[0], inputs=size[1], dtype=dtype) for size in fp8_sizes]
    if streams:
        parts.append(partial(compare_mhc, streams=streams, hidden=hidden, dtype=dtype))
    if router:
        experts = partial(
            compare_moe,
            router=router,
            num_experts=num_experts,
            hidden=hidden,
            inner=expert_dim,
            activation=expert_activation,
            limit=mlp_limit,
            dtype=dtype,
        )
        batches_of_tokens = tokens_of_experts(router, num_experts, device)
        parts += [partial(experts, num_tokens=n, in_fp8=fp8) for n, fp8 in product(batches_of_tokens, experts_in_fp8)]
    return _compare(parts, limit, torch.device(device))


def _compare(parts: Sequence[Part], limit: float, device: torch.device) -> list[Check]:
    """Run every part with every kind of inputs: on a GPU many at once, as most of what they take is to compile.

    Random inputs come first, and need all kernels.
    """
    num_threads = THREADS[device.type]
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # the caller's, which is no other thread's
        torch.cuda.synchronize(device)  # for what parts were made with
        from triton.runtime import driver  # which is installed on Linux alone

        driver.active.get_current_device()  # compiled when it is first asked for, and by each thread that does
    found = list[Check]()
    for kinds in KINDS:
        run = partial(_checks, kinds=kinds, limit=limit, device=device)
        if num_threads > 1:
            from deltaline_kernels.selftest.threads import run_in_threads  # it needs triton, which is on Linux alone

            made = run_in_threads(run, parts, num_threads, device)
        else:
            made = list(map(run, parts, count()))
        found += [check for checks in made for check in checks]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the threads' streams
    return found


def _checks(part: Part, seed: int, kinds: Sequence[str], limit: float, device: torch.device) -> list[Check]:
    """Run a part with inputs of these kinds, drawn from a seed."""
    # On the device: numbers for a long row take a CPU longer than all the rest.
    generator = torch.Generator(device).manual_seed(seed)
    fills: Fills = {
        "random": lambda *shape: torch.randn(*shape, generator=generator, device=device),
        "integers": lambda *shape: torch.randint(-2, 3, shape, generator=generator, device=device).float(),
        "ones": lambda *shape: torch.ones(*shape, device=device),
    }
    compared = part({kind: fills[kind] for kind in kinds})
    # One by one: what was computed is not kept.
    return [Check(name, largest_error(got, want), limit) for name, got, want in compared]


def _mixer_parts(shapes: Shapes, device: torch.device | str) -> Iterator[Part]:
    """Yield what compares the families of the model's mixer on every kind of rows."""
    compare, make = {
        "gated_delta": (_compare_recurrence, batches),
        "kda": (_compare_recurrence, batches),
        "mamba1": (_compare_scan, batches),
        "mamba2": (_compare_recurrence, batches),
        "short_conv": (_compare_convolution, batches),
        "attention": (compare_attention, attention_batches),
        "latent_attention": (compare_latents, attention_batches),
    }[shapes.recurrence]
    for batch, rows in make(shapes.heads.num_value_heads, shapes.max_draft, device).items():
        yield partial(_compare_mixer, compare=compare, batch=batch, rows=rows, shapes=shapes)
    if shapes.is_paged:
        if torch.device(device).type != "cpu":
            for batch, rows in short_attention_batches(shapes.attention_heads, shapes.max_draft, device).items():
                part = partial(_compare_mixer, compare=compare, batch=batch, rows=rows, shapes=shapes)
                yield of_random(part)
        return
    rows = waypoint_batch(shapes.max_draft, device)
    yield of_random(partial(_compare_mixer, compare=compare, batch="prefill with waypoints", rows=rows, shapes=shapes))
    if torch.device(device).type != "cpu" and has_parts(shapes):
        yield of_random(partial(_compare_parts, shapes=shapes, device=device))
    if torch.device(device).type != "cpu" and shapes.recurrence in MANY_WALKED:
        sizes = (shapes.heads.num_value_heads, shapes.max_draft, device)
        for batch, rows in one_and_many_prefills(MANY_WALKED[shapes.recurrence], *sizes).items():
            yield of_random(partial(_compare_mixer, compare=compare, batch=batch, rows=rows, shapes=shapes))
    for batch, rows in short_batches(shapes.max_draft, device).items():
        yield of_random(partial(_compare_short_rows, batch=batch, rows=rows, shapes=shapes))


def of_random(part: Part) -> Part:
    """A part that is left out for inputs of other kinds."""
    return lambda fills: part(fills) if "random" in fills else iter(())


def _compare_mixer(
    fills: Fills, compare: Callable[[Fill, Rows, Shapes], Iterator[Compared]], batch: str, rows: Rows, shapes: Shapes
) -> Iterator[Compared]:
    """Yield what the families of a mixer computed of rows."""
    for kind, fill in fills.items():
        for name, got, want in compare(fill, rows, shapes):
            yield f"{name}, {batch}, {kind}", got, want


def _compare_parts(fills: Fills, shapes: Shapes, device: torch.device | str) -> Iterator[Compared]:
    """Yield what one long row gave in parts."""
    for kind, fill in fills.items():
        yield f"{shapes.recurrence}, prefill in parts, {kind}", *run_in_parts(fill, shapes, device)


def _adapter_parts(shapes: Shapes, device: torch.device | str) -> Iterator[Part]:
    """Yield what compares what adapters add to batches of several sizes."""
    adapted = ADAPTED if torch.device(device).type == "cpu" else ADAPTED_GPU
    for i, num_tokens in enumerate(adapted):
        part = partial(_compare_adapters, num_tokens=num_tokens, shapes=shapes, device=device)
        yield part if i >= len(adapted) - 2 else of_random(part)


def _compare_adapters(fills: Fills, num_tokens: int, shapes: Shapes, device: torch.device | str) -> Iterator[Compared]:
    """Yield what adapters added to a batch of so many tokens."""
    for kind, fill in fills.items():
        yield f"lora, {num_tokens} tokens, {kind}", *compare_lora(fill, num_tokens, shapes, device)


def _compare_short_rows(fills: Fills, batch: str, rows: Rows, shapes: Shapes) -> Iterator[Compared]:
    """Yield what the convolution of a recurrent layer computed of short rows, which have kernels of their own."""
    for kind, fill in fills.items():
        x = projected(fill, rows.num_rows * rows.max_length, shapes)[:, : shapes.heads.channels]
        conv, _ = _convolve(fill, x, rows, shapes, rows.num_rows + 1)
        yield f"conv1d, {batch}, {kind}", *conv


def _convolve(
    fill: Fill, x: Tensor, rows: Rows, shapes: Shapes, num_lines: int
) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
    """Return what the convolution computed and what its reference computed, and the latter's outputs alone."""
    channels, dtype = shapes.heads.channels, shapes.dtype
    weight = fill(shapes.conv_width, channels).to(dtype)
    bias = fill(channels).to(dtype) if shapes.has_conv_bias else None
    lines = fill(num_lines, shapes.conv_width - 1 + shapes.max_draft, channels).to(dtype)
    want_lines = lines.clone()
    y = causal_conv1d(x, weight, bias, lines, rows, activation=shapes.conv_activation)
    want = causal_conv1d_reference(x, weight, bias, want_lines, rows, activation=shapes.conv_activation)
    return ([y, lines], [want, want_lines]), want


def _compare_convolution(fill: Fill, rows: Rows, shapes: Shapes) -> Iterator[Compared]:
    """Yield what the convolution of a layer without a recurrence computed, and what its reference computed."""
    x = projected(fill, int(rows.query_start_loc[-1]), shapes)[:, : shapes.heads.channels]
    conv, _ = _convolve(fill, x, rows, shapes, max(6, rows.num_rows + 1))
    yield "conv1d", *conv


def _compare_scan(fill: Fill, rows: Rows, shapes: Shapes) -> Iterator[Compared]:
    """Yield the same of a Mamba-1 layer's convolution, and of its recurrence."""
    yield from _compare_convolution(fill, rows, shapes)
    yield from compare_mamba1(fill, rows, shapes)


def _compare_recurrence(fill: Fill, rows: Rows, shapes: Shapes) -> Iterator[Compared]:
    """Yield the name of each family of a recurrent layer, what it computed and what its reference computed."""
    heads, num_tokens, num_lines = shapes.heads, int(rows.query_start_loc[-1]), max(6, rows.num_rows + 2)
    num_heads, values = heads.num_value_heads, heads.value_channels
    columns = projected(fill, num_tokens, shapes)
    if shapes.is_mamba:
        z, x, a, b = columns.split((values, heads.channels, num_heads, num_heads), dim=-1)
    else:
        x, z, b, a = columns.split((heads.channels, values, num_heads, num_heads), dim=-1)
    conv, x = _convolve(fill, x, rows, shapes, num_lines)
    yield "conv1d", *conv

    operation, reference = _operations(shapes.recurrence)
    if shapes.is_mamba:
        # B and C of moderate length: products of 128 large numbers would hide what is added to them.
        x[:, values:] *= heads.scale**0.5
        inputs: tuple[Tensor | None, ...] = (x, a, fill(num_heads), fill(num_heads), fill(num_heads))
    else:
        if heads.keyed:
            a = fill(num_tokens, heads.num_decays).to(shapes.dtype)
        inputs = (x, a, b, fill(num_heads), fill(heads.num_decays))
        if shapes.raw_gates:
            inputs = (x, -a.float().abs(), 2.0 * b.float().sigmoid(), None, None)
    state = fill(num_lines, num_heads, heads.value_dim, heads.key_dim).to(shapes.state_dtype)
    # Drafts as a VERIFY writes them: unit keys, updates, gates below 0.
    drafts = fill(num_lines, 2, shapes.max_draft, heads.record).mul_(heads.scale)
    drafts[..., heads.key_channels + values :].abs_().neg_()
    want_state, want_drafts = state.clone(), drafts.clone()
    o = operation(*inputs, state, drafts, rows, **shapes.options)
    want = reference(*inputs, want_state, want_drafts, rows, **shapes.options)
    yield shapes.recurrence, [o, state, drafts], [want, want_state, want_drafts]

    if shapes.is_mamba:
        want, z = (part.flatten(1).unflatten(1, (shapes.norm_groups, -1)) for part in (want, z))
        scale = fill(shapes.norm_groups, values // shapes.norm_groups)
    else:
        z, scale = z.unflatten(-1, (num_heads, heads.value_dim)), fill(heads.value_dim)
    told: dict[str, Any] = {"gate_first": not shapes.norms_first} if shapes.is_mamba else {}
    told |= {"activation": "sigmoid"} if heads.keyed else {}
    got = gated_rms_norm(want, z, scale, 1e-6, **told)
    yield "norm", [got], [gated_rms_norm_reference(want, z, scale, 1e-6, **told)]


def _operations(recurrence: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return a recurrence and its reference."""
    if recurrence == "gated_delta":
        return gated_delta, gated_delta_reference
    return (kda, kda_reference) if recurrence == "kda" else (mamba2, mamba2_reference)


def largest_error(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest value that was wanted in the same tensor (at least 1)."""
    worst = 0.0
    for computed, expected in zip(got, want, strict=True):
        scale = max(1.0, float(expected.float().abs().amax()))
        error = float((computed.float() - expected.float()).abs().amax()) / scale
        worst = max(worst, error if error == error else float("inf"))
    return worst
