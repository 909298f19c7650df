"""The convolution as the causal-conv1d package is called: a batch of sequences, caches whose newest column is last."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.field_conv1d import field_prefill
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states

DIM = 24
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2}),
    "qwen3_next": ("Qwen3Next", {**HEADS, **DELTA, **EXPERTS, "head_dim": 16, "full_attention_interval": 2}),
    # It names no activation, which is none there.
    "lfm2": ("Lfm2", {**HEADS, "layer_types": ["conv", "full_attention"]}),
}


def update_package(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Update lines whose history ends with the last column, however many there are."""
    newest = conv_state if cache_seqlens is not None else conv_state[:, :, 1 - weight.shape[1] :]
    indices = conv_state_indices
    return causal_conv1d_update(x, newest, weight, bias, activation, indices, cache_seqlens=cache_seqlens)


@pytest.mark.parametrize("x_is_transposed", [True, False], ids=["of-tokens", "of-channels"])
@pytest.mark.parametrize("has_states", [True, False], ids=["states", "no-states"])
def test_a_batch_is_as_many_packed_sequences(path: Path, x_is_transposed: bool, has_states: bool) -> None:
    batch, length, device = 3, 70, path.device
    x = normal(batch, length, DIM).transpose(1, 2) if x_is_transposed else normal(batch, DIM, length)
    x, weight, bias = x.to(path.dtype), normal(DIM, 4, seed=1), normal(DIM, seed=2)
    lines, history = [4, -1, 2], [True, True, False]
    states = normal(6, DIM, 4, seed=3).to(path.dtype)[:, :, 1:] if has_states else None
    kept = None if states is None else normal(6, DIM, 4, seed=3).to(device, path.dtype)
    told: dict[str, Any] = {}
    if kept is not None:
        told = {"conv_states": kept[:, :, 1:], "has_initial_state": torch.tensor(history, device=device)}
        told["cache_indices"] = torch.tensor(lines, dtype=torch.int32, device=device)
    got = causal_conv1d_fn(x.to(device), weight.to(device), bias.to(device), validate_data=True, use_cache=True, **told)
    starts = [0, length, 2 * length, 3 * length]
    packed = x.transpose(1, 2).flatten(0, 1).t()
    lines = lines if has_states else [0, 1, 2]
    want = field_prefill(packed, weight, bias, states, starts, lines, history, silu=False)
    assert got.shape == x.shape and got.dtype == path.dtype
    assert_close("y", got, want.t().unflatten(0, (batch, length)).transpose(1, 2), path.dtype)
    if states is not None and kept is not None:
        # The column in front of the lines is as it was.
        assert torch.equal(kept[:, :, 1:].cpu(), states)
        assert torch.equal(kept[:, :, 0].cpu(), normal(6, DIM, 4, seed=3).to(path.dtype)[:, :, 0])


@pytest.mark.parametrize("given", ["nothing", "states", "states-and-room"])
@pytest.mark.parametrize("length", [1, 2, 70])
def test_states_of_a_batch_go_in_and_come_out(path: Path, length: int, given: str) -> None:
    batch, width, device = 2, 4, path.device
    x = normal(batch, DIM, length).to(path.dtype)
    weight, bias = normal(DIM, width, seed=1), normal(DIM, seed=2)
    told: dict[str, Any] = {}
    states = torch.zeros(batch, DIM, width - 1, dtype=path.dtype)
    if given != "nothing":
        states = normal(batch, DIM, width - 1, seed=3).to(path.dtype)
        told["initial_states"] = states.to(device).clone()
    if given == "states-and-room":
        told["final_states_out"] = torch.full((batch, width - 1, DIM), torch.nan, device=device).transpose(1, 2)
    y, final = causal_conv1d_fn(
        x.to(device), weight.to(device), bias.to(device), activation="silu", return_final_states=True, **told
    )
    if given != "nothing":
        assert torch.equal(told["initial_states"].cpu(), states)
        again = causal_conv1d_fn(
            x.to(device), weight.to(device), bias.to(device), activation="silu", initial_states=told["initial_states"]
        )
        assert torch.equal(again, y)
    assert (final is told.get("final_states_out")) == (given == "states-and-room")
    packed = x.transpose(1, 2).flatten(0, 1).t()
    starts = [i * length for i in range(batch + 1)]
    want = field_prefill(packed, weight, bias, states, starts, range(batch), [True] * batch, silu=True)
    assert_close("y", y, want.t().unflatten(0, (batch, length)).transpose(1, 2), path.dtype)
    assert torch.equal(final.cpu().to(path.dtype), states)


@pytest.mark.parametrize("has_states", [True, False], ids=["states", "no-states"])
def test_numbers_of_tokens_tell_the_sequences_of_a_batch(path: Path, has_states: bool) -> None:
    """Sequences end with each of the batch, whatever the next one's number; those below 0 are padding."""
    lengths = [[9, 1, 2, 70], [82], [3, 64, 15]]
    numbers = [[0, 5, 6, 1], [1], [1, -1, -7]]
    batch, length, device = 3, 82, path.device
    told = [
        [n for n, count in zip(row, counts, strict=True) for _ in range(count)]
        for row, counts in zip(numbers, lengths, strict=True)
    ]
    x, weight, bias = normal(batch, DIM, length).to(path.dtype), normal(DIM, 4, seed=1), normal(DIM, seed=2)
    initial = normal(batch, DIM, 3, seed=3).to(path.dtype) if has_states else None
    y = causal_conv1d_fn(
        x.to(device),
        weight.to(device),
        bias.to(device),
        seq_idx=torch.tensor(told, dtype=torch.int32, device=device),
        initial_states=None if initial is None else initial.to(device),
    )
    for i, counts in enumerate(lengths):
        starts = [sum(counts[:j]) for j in range(len(counts) + 1)]
        lines = [0 if j == 0 else 1 + j if number >= 0 else -1 for j, number in enumerate(numbers[i])]
        states = torch.zeros(9, DIM, 3, dtype=path.dtype)
        if initial is not None:
            states[0] = initial[i]
        want = field_prefill(x[i], weight, bias, states, starts, lines, [True] * len(counts), silu=False)
        assert_close("y", y[i], want, path.dtype)


@pytest.mark.parametrize("length", [1, 4, 9])
@pytest.mark.parametrize("columns", [1, 3, 7])
@pytest.mark.parametrize("picks", [True, False], ids=["lines", "all-lines"])
def test_a_circular_line_has_a_token_in_the_column_of_its_number(
    path: Path, length: int, columns: int, picks: bool
) -> None:
    width, device = (2, 4)[columns > 2], path.device
    lines = [5, -1, 0, 3] if picks else [0, 1, 2, 3]
    counts = [0, 2, 1023, 7]
    x = normal(len(lines), DIM, length).to(path.dtype)
    weight, bias = normal(DIM, width, seed=1), normal(DIM, seed=2)
    state = normal(6 if picks else 4, columns, DIM, seed=3).to(path.dtype).transpose(1, 2)
    kept = state.to(device).clone(memory_format=torch.preserve_format)
    y = causal_conv1d_update(
        x.to(device),
        kept,
        weight.to(device),
        bias.to(device),
        "silu",
        cache_seqlens=torch.tensor(counts, dtype=torch.int32, device=device),
        conv_state_indices=torch.tensor(lines, dtype=torch.int32, device=device) if picks else None,
        out=torch.full_like(x, torch.nan, device=device),
    )
    for row, (line, count) in enumerate(zip(lines, counts, strict=True)):
        if line < 0:
            assert not y[row].any()
            continue
        at = [(count + i) % columns for i in range(1 - width, 0)]
        history = torch.cat((state[line][:, at], x[row]), dim=1).float()
        want = torch.nn.functional.conv1d(history[None], weight[:, None], bias, groups=DIM)[0]
        assert_close("y", y[row], torch.nn.functional.silu(want), path.dtype)
        for i in range(length):
            state[line][:, (count + i) % columns] = x[row][:, i]
    assert torch.equal(kept.cpu(), state)


@pytest.mark.parametrize("pad", [-1, 0, 99])
def test_no_line_changes_where_all_rows_of_circles_are_skipped(path: Path, pad: int) -> None:
    """Whatever number says so: one of a line, or of none."""
    state = normal(3, DIM, 5).to(path.device, path.dtype)
    kept, nowhere = state.clone(), torch.full((2,), pad, device=path.device)
    x, weight = normal(2, DIM, 2).to(path.device, path.dtype), normal(DIM, 4, seed=1).to(path.device)
    counts = torch.tensor([1, 2], device=path.device)
    y = causal_conv1d_update(x, kept, weight, conv_state_indices=nowhere, cache_seqlens=counts, pad_slot_id=pad)
    assert not y.any() and torch.equal(kept, state)


@pytest.mark.parametrize("is_wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("starts", [[0, 1, 10, 13], [2, 7], [0, 2, 2, 9], [0, 0], [0], [13, 13]], ids=str)
def test_states_of_packed_sequences_are_their_last_tokens(path: Path, starts: list[int], is_wide: bool) -> None:
    state_len, x = 4, normal(13, DIM).to(path.dtype)
    want = torch.zeros(len(starts) - 1, DIM, state_len, dtype=path.dtype)
    for row, (begin, end) in enumerate(pairwise(starts)):
        last = x[max(begin, end - state_len) : end]
        want[row, :, state_len - len(last) :] = last.t()
    dtype = torch.int64 if is_wide else torch.int32
    offsets = torch.tensor(starts, dtype=dtype, device=path.device)
    for given in (x, x.t().contiguous().t()):
        got = causal_conv1d_varlen_states(given.to(path.device), offsets, state_len)
        assert got.dtype == path.dtype and torch.equal(got.cpu(), want)


def test_states_of_no_tokens_are_zero(path: Path) -> None:
    starts = torch.zeros(3, dtype=torch.int32, device=path.device)
    got = causal_conv1d_varlen_states(torch.empty(0, DIM, dtype=path.dtype, device=path.device), starts, 3)
    assert got.shape == (2, DIM, 3) and not got.any()


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_give_the_same_with_it(
    exact_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of the package transformers filters what it passes by the names of our arguments."""
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    prefix, sizes = MODELS[name]
    config = getattr(importlib.import_module(f"transformers.models.{name}"), f"{prefix}Config")(**SIZES, **sizes)
    torch.manual_seed(3)
    model = getattr(modeling, f"{prefix}ForCausalLM")(config).to(exact_path.device).eval()
    tokens = torch.randint(1, 60, (2, 12)).to(exact_path.device)
    calls = set()

    def run() -> list[Tensor]:
        """Return the logits of some tokens at once, and of those behind them one by one."""
        logits: list[Tensor] = []
        cache: dict[str, Any] = {}
        for part in tokens.split([7, 1, 1, 1, 1, 1], dim=1):
            with torch.no_grad():
                made = model(part, use_cache=True, **cache)
            logits.append(made.logits)
            cache = {key: made[key] for key in ("past_key_values", "cache_params") if key in made}
        return logits

    def counted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            calls.add(function)
            return function(*args, **kwargs)

        return call

    want = run()
    package = ModuleType("causal_conv1d")
    functions: dict[str, Callable[..., Tensor]] = {
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": update_package,
    }
    for function_name, function in functions.items():
        setattr(package, function_name, counted(function))
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    for function_name in functions:
        decorate = hub.use_kernel_func_from_hub_with_fallback(function_name, "causal_conv1d")
        monkeypatch.setattr(modeling, function_name, decorate(getattr(modeling, function_name)))
    got = run()
    assert calls == set(functions.values())
    for one, other in zip(got, want, strict=True):
        assert_close("logits", one, other, torch.float32)
