"""run_selftest: passes on a sound device, and says which family is wrong on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rigs.kernels.paths import Path
from torch import Tensor

from deltaline_kernels import (
    Router,
    Rows,
    add_rms_norm,
    causal_conv1d,
    flex_decode,
    gated_delta,
    gated_rms_norm,
    kda,
    linear,
    mamba1,
    mamba2,
    mhc_post_pre,
    multiply_fp8,
    rms_norm,
    run_selftest,
    silu_and_mul,
)
from deltaline_kernels.device.delta_rule.inputs import MANY_HEADS as MANY_DELTA_HEADS
from deltaline_kernels.device.delta_rule.inputs import DeltaHeads
from deltaline_kernels.mamba2.plan import MANY_HEADS as MANY_MAMBA_HEADS
from deltaline_kernels.moe import plan, route_tokens_reference
from deltaline_kernels.selftest import attention as attention_selftest
from deltaline_kernels.selftest import block as block_selftest
from deltaline_kernels.selftest import fp8 as fp8_selftest
from deltaline_kernels.selftest import mamba1 as mamba1_selftest
from deltaline_kernels.selftest import mhc as mhc_selftest
from deltaline_kernels.selftest import moe as moe_selftest
from deltaline_kernels.selftest import parts as parts_selftest
from deltaline_kernels.selftest import run as selftest
from deltaline_kernels.selftest.shapes import MANY_WALKED, Shapes, batches, one_and_many_prefills


def families(recurrence: str, *more: str) -> set[str]:
    """What the self-test compares of a model."""
    mixers = {
        "attention": {"rotary", "attention"},
        "latent_attention": {"rotary", "latent attention"},
        "short_conv": {"conv1d"},
        "mamba1": {"conv1d", "mamba1"},
    }
    return {"lora", "residual", *mixers.get(recurrence, {"conv1d", recurrence, "norm"}), *more}


# A recurrence and the sizes of a model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("gated_delta", {}),
    "delta-odd": (
        "gated_delta",
        {"num_key_heads": 1, "num_value_heads": 3, "key_dim": 24, "value_dim": 40, "conv_width": 2, "max_draft": 1},
    ),
    "delta-large": (
        "gated_delta",
        {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128, "max_draft": 8},
    ),
    "delta-bf16-state": ("gated_delta", {"state_dtype": torch.bfloat16}),
    "kda": ("kda", {"num_key_heads": 4}),
    "kda-large": ("kda", {"num_key_heads": 32, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}),
    "kda-odd": ("kda", {"num_key_heads": 1, "num_value_heads": 3, "key_dim": 24, "value_dim": 40, "lower_bound": -5.0}),
    "mamba1": ("mamba1", {"num_key_heads": 0, "num_value_heads": 1, "key_dim": 16, "has_conv_bias": True}),
    "mamba1-odd": (
        "mamba1",
        {"num_key_heads": 0, "num_value_heads": 1, "key_dim": 5, "value_dim": 41, "conv_width": 2, "max_draft": 1},
    ),
    "mamba1-bf16-state": (
        "mamba1",
        {"num_key_heads": 0, "num_value_heads": 1, "key_dim": 16, "state_dtype": torch.bfloat16},
    ),
    "mamba2": ("mamba2", {}),
    "mamba2-odd": (
        "mamba2",
        {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 24, "value_dim": 40, "conv_width": 2, "max_draft": 1},
    ),
    "mamba2-bf16-state": (
        "mamba2",
        {"num_key_heads": 1, "num_value_heads": 16, "key_dim": 128, "value_dim": 64, "state_dtype": torch.bfloat16},
    ),
    "mamba2-one-norm-limits-bias": (
        "mamba2",
        {"num_key_heads": 4, "norm_groups": 1, "dt_limit": (0.2, 0.9), "has_conv_bias": True},
    ),
    "latents": (
        "latent_attention",
        {"num_key_heads": 1, "num_value_heads": 6, "key_dim": 40, "value_dim": 32, "rotary_dim": 8},
    ),
    "latents-alone": (
        "latent_attention",
        {"num_key_heads": 1, "num_value_heads": 3, "key_dim": 20, "value_dim": 20, "rotary_dim": 2},
    ),
    "latents-large": (
        "latent_attention",
        {"num_key_heads": 1, "num_value_heads": 32, "key_dim": 576, "value_dim": 512, "rotary_dim": 64, "max_draft": 5},
    ),
    "short-conv": ("short_conv", {"num_key_heads": 0, "conv_width": 3}),
    "short-conv-odd": (
        "short_conv",
        {"num_key_heads": 0, "num_value_heads": 3, "value_dim": 8, "max_draft": 1, "has_conv_bias": True},
    ),
    "attention": ("attention", {}),
    "attention-odd": (
        "attention",
        {"num_key_heads": 1, "num_value_heads": 7, "key_dim": 96, "rotary_dim": 96, "page_size": 16, "max_draft": 1},
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_selftest_takes_a_model(path: Path, model: str) -> None:
    if path.device == "cpu" and model in ("delta-large", "kda-large", "latents-large"):
        pytest.skip("large sizes are for compiled kernels: on a CPU they take a minute and are no other code")
    recurrence, sizes = MODELS[model]
    checks = run_selftest(path.device, path.dtype, recurrence=recurrence, **sizes)
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == families(recurrence)


def test_selftest_takes_a_model_of_several_streams(path: Path) -> None:
    checks = run_selftest(path.device, path.dtype, recurrence="attention", streams=4, hidden=200)
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == families("attention", "mhc")


@pytest.mark.parametrize(
    "router",
    [Router(3, num_shared=1, shared_gate=True), Router(4, "sigmoid", num_groups=4, top_groups=2, scale=2.5)],
    ids=["gated", "groups"],
)
@pytest.mark.parametrize("in_fp8", [False, True], ids=["", "fp8"])
def test_selftest_takes_a_model_of_experts(path: Path, router: Router, in_fp8: bool) -> None:
    sizes: dict[str, Any] = {"num_experts": 16, "hidden": 200, "expert_dim": 72, "experts_in_fp8": [in_fp8]}
    checks = run_selftest(path.device, path.dtype, recurrence="attention", router=router, **sizes)
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == families("attention", "moe")


def test_selftest_takes_limits_of_gates(path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "hidden": 40, "expert_dim": 24, "mlp_dim": 56, "mlp_limit": 0.5}
    checks = run_selftest(path.device, path.dtype, recurrence="attention", router=Router(2), **sizes)
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == families("attention", "moe", "activation")


def test_selftest_takes_weights_in_fp8(path: Path) -> None:
    checks = run_selftest(path.device, path.dtype, recurrence="attention", fp8_sizes=((200, 300), (128, 64)))
    assert [check for check in checks if not check.ok] == []
    assert {check.name.split(",")[0] for check in checks} == families("attention", "fp8")


def test_selftest_takes_products_that_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_selftest, "FASTEST", {(3, 80, 900): (1, 1), (5, 80, 900): (1, 1), (2, 900, 40): (1, 1)})
    sizes: dict[str, Any] = {"recurrence": "attention", "hidden": 900, "mlp_dim": 40}
    products = [check.name for check in run_selftest("cpu", **sizes) if check.name.startswith("linear") and check.ok]
    assert products[:3] == [
        "linear, 3 rows of 900, random",
        "linear, 5 rows of 900, random",
        "linear, 2 rows of 40, random",
    ]
    monkeypatch.setattr(block_selftest, "linear", lambda x, weight: 1.1 * linear(x, weight))
    checks = run_selftest("cpu", torch.bfloat16, **sizes)
    products = [check.name for check in checks if check.name.startswith("linear")]
    assert [check.name for check in checks if not check.ok] == products


def unscaled_fp8(x: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Take the last block's outputs by the first one's scales."""
    multiply_fp8(x, weight, scales[:1].expand_as(scales).contiguous(), out)


def shifted(function: Callable[..., Any], wrong: float = 1.0) -> Callable[..., Any]:
    return lambda *args, **kw: torch.as_tensor(function(*args, **kw)) + wrong


def unscaled(*args: Any, scale: float) -> Any:
    return add_rms_norm(*args)


def forgetful(*args: Any, **kw: Any) -> Any:
    """Leave the states as they were."""
    before = args[5].clone()
    o = gated_delta(*args, **kw)
    args[5].copy_(before)
    return o


@pytest.mark.parametrize(
    ("module", "name", "wrong", "recurrence", "family"),
    [
        (selftest, "gated_rms_norm", shifted(gated_rms_norm), "gated_delta", "norm"),
        (selftest, "gated_rms_norm", shifted(gated_rms_norm, torch.nan), "gated_delta", "norm"),
        (selftest, "gated_delta", forgetful, "gated_delta", "gated_delta"),
        (mamba1_selftest, "mamba1", shifted(mamba1), "mamba1", "mamba1"),
        (selftest, "mamba2", shifted(mamba2), "mamba2", "mamba2"),
        (attention_selftest, "flex_decode", shifted(flex_decode), "attention", "attention"),
        (block_selftest, "rms_norm", shifted(rms_norm), "attention", "residual"),
        (block_selftest, "add_rms_norm", unscaled, "attention", "residual"),
        (block_selftest, "silu_and_mul", shifted(silu_and_mul), "attention", "activation"),
        (fp8_selftest, "multiply_fp8", unscaled_fp8, "attention", "fp8"),
    ],
    ids=["shifted", "nan", "forgetful", "mamba1", "mamba2", "attention", "norm", "sum", "activation", "fp8"],
)
def test_selftest_names_the_wrong_family(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrong: Any, recurrence: str, family: str
) -> None:
    monkeypatch.setattr(module, name, wrong)
    failed = {
        check.name.split(",")[0]
        for check in run_selftest("cpu", recurrence=recurrence, mlp_dim=40, fp8_sizes=[(200, 40)])
        if not check.ok
    }
    assert failed == {family}


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part draws numbers of its own."""
    sizes: dict[str, Any] = {"router": Router(2), "num_experts": 16, "streams": 2}
    alone = run_selftest("cpu", torch.bfloat16, **sizes)
    monkeypatch.setitem(selftest.THREADS, "cpu", 4)
    beside = [run_selftest("cpu", torch.bfloat16, **sizes) for _ in range(3)]
    assert beside == [alone] * 3
    assert len({check.name for check in alone}) == len(alone)


@pytest.mark.parametrize(
    ("name", "part"), [("route_tokens", "routes"), ("run_experts", "experts"), ("route_and_run_experts", "whole")]
)
def test_selftest_names_wrong_experts(monkeypatch: pytest.MonkeyPatch, name: str, part: str) -> None:
    right = getattr(moe_selftest, name)

    def turned(*args: Any) -> Any:
        made = right(*args)
        # The neighbour of an expert with a high number.
        return (made[0], made[1] + (made[1] > 400)) if isinstance(made, tuple) else made.roll(1, 1)

    monkeypatch.setattr(moe_selftest, name, turned)
    checks = run_selftest("cpu", torch.bfloat16, router=Router(2, num_shared=1), num_experts=500)
    assert {check.name.rsplit(",", 2)[0] for check in checks if not check.ok} == {f"moe, {part}"}


@pytest.mark.parametrize("router", [Router(4), Router(4, "sigmoid"), Router(4, "sigmoid", num_groups=4, top_groups=2)])
def test_rounding_of_scores_chooses_no_expert(router: Router) -> None:
    """A kernel whose scores differ in their last bits passes, whatever numbers were drawn."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        fills: dict[str, Callable[..., Tensor]] = {
            "random": lambda *shape, generator=generator: torch.randn(*shape, generator=generator),
            "integers": lambda *shape, generator=generator: torch.randint(-2, 3, shape, generator=generator).float(),
        }
        for fill in fills.values():
            logits = moe_selftest.draw_logits(fill, 30, 16, router)
            bias = 2.0 * fill(16).round() if router.scoring == "sigmoid" else None
            _, single = route_tokens_reference(logits, router, bias)
            _, double = route_tokens_reference(logits.double(), router, bias)
            assert torch.equal(single, double)


@pytest.mark.parametrize(("choices", "num_experts"), [(1, 3), (2, 2), (3, 5), (9, 11), (11, 13), (128, 130)])
def test_experts_are_compared_in_every_way(choices: int, num_experts: int) -> None:
    one, *tiles, many = moe_selftest.tokens_of_every_way(choices, num_experts)
    rows = [plan.plan_tiles(count, choices, num_experts, torch.bfloat16).rows for count in (*tiles, many)]
    assert one <= plan.DIRECT_TOKENS < min(tiles) and rows == [bucket.plan.rows for bucket in plan.BUCKETS]
    least = plan.SORTED_CHOICES * num_experts
    assert [count * choices >= least for count in (*tiles, many)] == [False, False, False, True]


def test_selftest_of_an_unknown_recurrence_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        run_selftest("cpu", recurrence="mamba")


def test_selftest_names_wrong_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(*args: Any, **kw: Any) -> Any:
        *others, comb = mhc_post_pre(*args, **kw)
        return *others, comb.transpose(1, 2)

    monkeypatch.setattr(mhc_selftest, "mhc_post_pre", transposed)
    failed = {check.name.rsplit(",", 2)[0] for check in run_selftest("cpu", streams=3) if not check.ok}
    assert failed == {"mhc, post and pre"}


def norm_wrong_of_one_group(o: Any, *args: Any, **kw: Any) -> Any:
    return gated_rms_norm(o, *args, **kw) + float(o.shape[1] == 1)


def mamba2_without_limits(*args: Any, dt_limit: Any, **kw: Any) -> Any:
    return mamba2(*args, **kw)


def conv1d_without_bias(x: Any, weight: Any, bias: Any, *args: Any, **options: Any) -> Any:
    return causal_conv1d(x, weight, None, *args, **options)


@pytest.mark.parametrize(
    ("wrong", "sizes", "family"),
    [
        ({"gated_rms_norm": norm_wrong_of_one_group}, {"norm_groups": 1}, "norm"),
        ({"mamba2": mamba2_without_limits}, {"dt_limit": (0.2, 0.9)}, "mamba2"),
        ({"causal_conv1d": conv1d_without_bias}, {"has_conv_bias": True}, "conv1d"),
    ],
    ids=["norm-groups", "limits", "bias"],
)
def test_selftest_computes_what_the_model_has(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], sizes: dict[str, Any], family: str
) -> None:
    for name, function in wrong.items():
        monkeypatch.setattr(selftest, name, function)
    failed = {check.name.split(",")[0] for check in run_selftest("cpu", recurrence="mamba2", **sizes) if not check.ok}
    assert failed == {family}


@pytest.mark.parametrize("num_heads", [1, 8, 32, 64, 128, 200])
def test_few_and_many_rows_of_any_number_of_heads(num_heads: int) -> None:
    """Both have kernels of their own: with 128 heads two rows are many."""
    found = batches(num_heads, 4, "meta").values()
    for least, most in ((1, 1), (2, 4)):
        programs = [rows.num_rows * num_heads for rows in found if least <= rows.max_length <= most]
        assert min(programs) < min(MANY_DELTA_HEADS, MANY_MAMBA_HEADS)
        assert max(programs) >= max(MANY_DELTA_HEADS, MANY_MAMBA_HEADS)


@pytest.mark.parametrize("num_heads", [1, 8, 32, 64, 128, 200])
@pytest.mark.parametrize("recurrence", MANY_WALKED)
def test_few_and_many_heads_of_long_rows(recurrence: str, num_heads: int) -> None:
    """By either walk, without and with a waypoint."""
    least = MANY_WALKED[recurrence]
    one, one_kept, many, many_kept = one_and_many_prefills(least, num_heads, 4, "meta").values()
    assert one.num_rows * num_heads < least <= many.num_rows * num_heads
    assert [rows.waypoints is None for rows in (one, one_kept, many, many_kept)] == [True, False, True, False]


def shapes_of(recurrence: str, heads: DeltaHeads) -> Shapes:
    """Return the sizes of a model of 16 bits with a state of 32."""
    sizes = (4, 4, torch.bfloat16, torch.float32, heads.num_key_heads)
    return Shapes(recurrence, heads, *sizes, (0.0, torch.inf), has_conv_bias=False, rotary_dim=16, page_size=64)


@pytest.mark.parametrize("recurrence", ["gated_delta", "kda", "mamba2"])
def test_a_long_row_is_compared_with_its_tokens(monkeypatch: pytest.MonkeyPatch, recurrence: str) -> None:
    """With and without a waypoint. Which of the calls are computed in parts, a GPU decides."""
    monkeypatch.setattr(parts_selftest, "LONG", 130)
    calls: list[tuple[int, int, bool]] = []

    def shifted(function: Any) -> Any:
        def run(*args: Any, **kw: Any) -> Any:
            rows = next(argument for argument in args if isinstance(argument, Rows))
            calls.append((rows.max_length, rows.num_short, rows.waypoints is not None))
            return function(*args, **kw) + wrong * rows.num_short

        return run

    for name, function in {"gated_delta": gated_delta, "kda": kda, "mamba2": mamba2}.items():
        monkeypatch.setattr(parts_selftest, name, shifted(function))
    heads = DeltaHeads(2, 4, 16, 32, 0.25, 1e-6, keyed=recurrence == "kda")
    for wrong in (0.0, 1.0):
        got, want = parts_selftest.run_in_parts(torch.randn, shapes_of(recurrence, heads), "cpu")
        assert [tensor.shape for tensor in got] == [(130, 4, 32), (1, 4, 32, 16)] * 2
        assert bool(selftest.largest_error(got, want) < 2e-2) is not bool(wrong)
    assert calls == [(130, 0, False), (130, 0, True), (130, 1, False)] * 2


@pytest.mark.parametrize("name", ["gated_delta", "mamba2", "causal_conv1d"])
def test_a_waypoint_that_is_passed_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function = getattr(selftest, name)

    def pass_by(*args: Any, **kw: Any) -> Any:
        return function(*(replace(x, waypoints=None) if isinstance(x, Rows) else x for x in args), **kw)

    monkeypatch.setattr(selftest, name, pass_by)
    checks = run_selftest("cpu", recurrence="mamba2" if name == "mamba2" else "gated_delta")
    family = name.removeprefix("causal_")
    assert [check.name for check in checks if not check.ok] == [f"{family}, prefill with waypoints, random"]


@pytest.mark.parametrize(("recurrence", "most"), [("gated_delta", 64), ("kda", 32), ("mamba2", 64)])
def test_a_long_row_is_in_parts_unless_heads_are_many(recurrence: str, most: int) -> None:
    for num_heads, expected in ((4, True), (most, True), (300, False)):
        heads = DeltaHeads(1, num_heads, 128, 64, 0.25, 1e-6, keyed=recurrence == "kda")
        assert parts_selftest.has_parts(shapes_of(recurrence, heads)) is expected
    few = DeltaHeads(1, 4, 128, 64, 0.25, 1e-6)
    for family in ("kda", "mamba2"):
        assert not parts_selftest.has_parts(replace(shapes_of(family, few), dtype=torch.float32))


@pytest.mark.parametrize("model", ["attention", "latents"])
def test_rows_that_are_only_counted_leave_nothing(path: Path, model: str) -> None:
    """Of the batches for attention's kernels the last rows are skipped, on both sides alike."""
    recurrence, sizes = MODELS[model]
    heads = DeltaHeads(
        sizes.get("num_key_heads", 2), sizes.get("num_value_heads", 4), sizes.get("key_dim", 64), 32, 0.1, 1e-6
    )
    shapes = Shapes(recurrence, heads, 4, 4, torch.float32, torch.float32, 1, (0.0, 1.0), False, 8, 64)
    batches = attention_selftest.short_attention_batches(shapes.attention_heads, 4, path.device)
    rows = next(rows for rows in batches.values() if rows.num_rows > 2 * len(attention_selftest.POSITIONS))
    compare = (
        attention_selftest.compare_latents if recurrence == "latent_attention" else attention_selftest.compare_attention
    )
    generator = torch.Generator(path.device).manual_seed(0)
    fill = partial(torch.randn, generator=generator, device=path.device)
    for _, got, want in compare(fill, rows, shapes):
        assert selftest.largest_error(got, want) < 5e-5
