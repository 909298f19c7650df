"""The public functions as operators of torch: what torch checks of each, compiled calls, and gradients refused."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from rigs.kernels.compiled import compile_launches, on_meta
from rigs.kernels.delta_samples import chunk_kda_pool, chunk_pool, kda_call
from rigs.kernels.draws import draw, normal
from rigs.kernels.operator_samples import SAMPLES, Given, attention, conv1d
from rigs.kernels.paths import Path
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter

import deltaline_kernels
from deltaline_kernels import Modifiers, causal_conv1d, compat, find_modifier, flex_decode, prepare_gates
from deltaline_kernels.operators import OPERATORS

# What torch's compiler imports of torch is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")

# Those that compute nothing of tokens.
OTHERS = {"and_masks", "can_multiply_fp8", "find_modifier", "or_masks", "pack_fp8", "prepare_gates", "run_selftest"}
# Those that launch no kernel of ours.
LIBRARY_CALLS = {"causal_conv1d_varlen_states", "linear"}
# Arguments that lie on the host beside tensors of a GPU.
ON_HOST = {"no_lora_flag_cpu", "num_active_loras"}
# What torch checks; the first compares arguments before and after in a way that it has not for FP8.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CASES = [(name, i) for name in OPERATORS for i in range(len(SAMPLES[name]))]


@pytest.fixture
def path(device: str) -> Path:
    """Of 16 bits: where an operator promises another dtype than its function returns, it shows."""
    return Path(device, torch.bfloat16)


@pytest.fixture(autouse=True)
def nan_memory() -> None:
    """Leave torch.empty as it is: what would fill it here is traced, too."""


def public(name: str) -> Callable[..., Any]:
    """Return the function of an operator: the adapters whose names are those of native operations have a prefix."""
    module = deltaline_kernels if name in deltaline_kernels.__all__ else compat
    function: Callable[..., Any] = getattr(module, name.removeprefix("compat_"))
    return function


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Name the tensors among arguments or results, in lists and in objects that have fields."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"{where}[{i}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, f"{where}.{name}".lstrip("."))
    elif is_dataclass(value):  # its fields alone: what it derives of them and keeps depends on the path
        yield from leaves({field.name: getattr(value, field.name) for field in fields(value)}, where)


def test_every_public_function_is_an_operator_that_is_tried() -> None:
    functions = {name for name in deltaline_kernels.__all__ if inspect.isfunction(getattr(deltaline_kernels, name))}
    native = {name for name in functions - OTHERS if not name.endswith("_reference")}
    assert OPERATORS.keys() == native | {f"compat_{name}" if name in native else name for name in compat.__all__}
    assert SAMPLES.keys() == OPERATORS.keys()


@pytest.mark.parametrize(("name", "sample"), CASES)
def test_torch_finds_no_fault_in_an_operator(name: str, sample: int, path: Path) -> None:
    given = OPERATORS[name].bind((), SAMPLES[name][sample](path))
    flat = tuple(OPERATORS[name].flatten(given))
    is_fp8 = any(isinstance(one, Tensor) and one.dtype == torch.float8_e4m3fn for one in flat)
    torch.library.opcheck(getattr(torch.ops.deltaline, name).default, flat, test_utils=CHECKS[1:] if is_fp8 else CHECKS)


@pytest.mark.parametrize(("name", "sample"), CASES)
def test_compiled_call_does_what_the_function_does(name: str, sample: int, path: Path) -> None:
    """The same bits returned and written; what the function returns of its arguments is the argument itself."""
    eager, compiled = (SAMPLES[name][sample](path) for _ in range(2))
    torch.compiler.reset()
    want = public(name)(**eager)
    got = torch.compile(public(name), fullgraph=True)(**compiled)
    for (where, one), (there, other) in zip(leaves([got, compiled]), leaves([want, eager]), strict=True):
        assert where == there
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=where)
    for (_, one), (_, other) in zip(leaves(got), leaves(want), strict=True):
        assert [one is given for given in compiled.values()] == [other is given for given in eager.values()]


@pytest.mark.parametrize("around", ["a-default-dtype", "autocast"])
@pytest.mark.parametrize(("name", "sample"), CASES)
def test_what_is_set_around_a_call_changes_nothing(name: str, sample: int, around: str, path: Path) -> None:
    """Engines load and run models with a default dtype of 16 bits; models run under autocast."""
    given, other, flat = (SAMPLES[name][sample](path) for _ in range(3))
    want, default = public(name)(**given), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if around == "a-default-dtype" else default)
    try:
        with torch.autocast(path.device, torch.bfloat16, enabled=around == "autocast"):
            got = public(name)(**other)
            getattr(torch.ops.deltaline, name)(*OPERATORS[name].flatten(OPERATORS[name].bind((), flat)))
            assert torch.is_autocast_enabled(path.device) == (around == "autocast")
    finally:
        torch.set_default_dtype(default)
    for (where, one), (_, expected) in zip(leaves([got, other]), leaves([want, given]), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True, msg=where)
    for (where, one), (_, expected) in zip(leaves(flat), leaves(given), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True, msg=where)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interprets kernels and compiles none")
@pytest.mark.parametrize(("name", "sample"), [case for case in CASES if case[0] not in LIBRARY_CALLS])
def test_kernels_of_a_call_compile_for_hopper(monkeypatch: pytest.MonkeyPatch, name: str, sample: int) -> None:
    pytest.importorskip("triton")
    given = SAMPLES[name][sample](Path("cpu", torch.bfloat16))
    moved = {key: value if key in ON_HOST else on_meta(value) for key, value in given.items()}
    assert compile_launches(monkeypatch, partial(public(name), **moved))


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_that_need_gradients_are_refused(name: str, path: Path) -> None:
    given: Given = SAMPLES[name][0](path)
    floating = [(where, tensor) for where, tensor in leaves(given) if tensor.is_floating_point()]
    for where, tensor in floating:
        tensor.requires_grad_()
        words = re.escape(
            f"{where}: expected a tensor that needs no gradient, as nothing is recorded for autograd; call"
        )
        with pytest.raises(ValueError, match=f"^{words}"):
            public(name)(**given)
        with pytest.raises(ValueError, match=f"^{words}"):
            getattr(torch.ops.deltaline, name)(*OPERATORS[name].flatten(OPERATORS[name].bind((), given)))
        tensor.requires_grad_(False)
    for _, tensor in floating:
        tensor.requires_grad_()
    with torch.no_grad():
        made = public(name)(**given)
    assert not any(tensor.requires_grad for _, tensor in leaves(made) if not any(tensor is one for _, one in floating))


def test_parameters_that_need_gradients_are_refused_where_they_are_packed(device: str) -> None:
    needed = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="scale: expected a tensor that needs no gradient"):
        prepare_gates(torch.ones(3, 4, device=device), needed, torch.ones(3, device=device))
    with pytest.raises(ValueError, match="alibi: expected a tensor that needs no gradient"):
        find_modifier("alibi")(needed, per="head")


def test_objects_that_no_operator_takes_break_the_graph(path: Path) -> None:
    given = attention(path) | {"modifiers": Modifiers(mask=find_modifier("causal")(), device=path.device)}
    torch.testing.assert_close(
        torch.compile(flex_decode, backend="eager")(**given), flex_decode(**given), rtol=0, atol=0
    )
    torch.compiler.reset()
    with pytest.raises(Unsupported, match=r"flex_decode is no operator with objects for .*modifiers"):
        torch.compile(flex_decode, fullgraph=True, backend="eager")(**given)


@pytest.mark.parametrize(
    ("function", "sample"), [(compat.chunk_kda, chunk_kda_pool), (compat.chunk_gated_delta_rule, chunk_pool)]
)
def test_pools_of_chunks_break_the_graph(
    path: Path, function: Callable[..., Any], sample: Callable[[Path], Given]
) -> None:
    """Else each call would write to its states, to a graph."""
    given, other = sample(path), sample(path)
    torch.compiler.reset()
    got, want = torch.compile(function, backend="eager")(**given), function(**other)
    for (where, one), (_, two) in zip(leaves([got, given]), leaves([want, other]), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, msg=where)
    torch.compiler.reset()
    with pytest.raises(Unsupported, match=r"no operator with objects for .*initial_state_indices"):
        torch.compile(function, fullgraph=True, backend="eager")(**given)


@pytest.mark.parametrize("function", [compat.chunk_kda, compat.chunk_gated_delta_rule], ids=lambda f: f.__name__)
def test_initial_states_may_be_expanded_or_of_inference(path: Path, function: Callable[..., Any]) -> None:
    with torch.inference_mode():
        one = normal(1, 2, 16, 16).to(path.device)
    given = kda_call(path, v=draw(path, 1, 5, 2, 16), output_final_state=True)
    if function is compat.chunk_gated_delta_rule:
        given["g"] = given["g"][..., 0]
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for state in (one.clone().expand(2, -1, -1, -1), torch.cat([one, one])):
        for x, y in zip(compiled(**given, initial_state=state), function(**given, initial_state=state), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_size_that_contents_tell_is_a_symbol_of_the_graph(path: Path) -> None:
    """Of the states before chunks, as many as the offsets make."""
    given = kda_call(path, return_intermediate_states=True)
    compiled = torch.compile(compat.chunk_kda, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(**given), compat.chunk_kda(**given), strict=True):
        assert x is y is None or torch.equal(x, y)


def test_sizes_of_a_batch_may_vary_in_one_graph(path: Path) -> None:
    """Rows, their bounds and their tokens are symbols of the graph, as no kernel is compiled for one batch."""
    graphs = CompileCounter()
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend=graphs, dynamic=True)
    for lengths in ([1, 9], [3, 5, 20], [2, 4, 30, 7]):
        one, other = (conv1d(path, lengths) for _ in range(2))
        assert torch.equal(compiled(**one), causal_conv1d(**other))
    assert graphs.frame_count == 1
