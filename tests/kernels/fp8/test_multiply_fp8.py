"""Products with FP8 weights, against the reference in fp64; the interpreter runs these again with the Triton kernel."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.fp8_batches import make_batch, stored
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import can_multiply_fp8, multiply_fp8, pack_fp8
from deltaline_kernels.fp8 import plan
from deltaline_kernels.fp8.layout import unpack_fp8
from deltaline_kernels.selftest import fp8 as selftest

# Tokens, outputs and inputs.
CASES: dict[str, tuple[int, int, int]] = {
    "one": (1, 1, 1),
    "one-block": (2, 128, 128),
    "odd": (7, 71, 37),
    "cut-blocks": (3, 200, 300),
    "more-blocks-than-ways": (18, 150, 700),
    "several-tiles": (40, 300, 130),
}
PLANS = {
    "16": plan.BUCKETS[1].plan,
    "32": plan.BUCKETS[2].plan,
    "64": plan.BUCKETS[3].plan,
    "one-part": plan.FewRows(16, 32, 1, warps=2, stages=2),
    "many": plan.MANY,
    "pieces": plan.ManyRows(200),
}


@pytest.fixture(params=PLANS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Each of the ways in which a GPU computes products, whatever the batch."""
    way = PLANS[request.param]
    if not path.serial and request.param != "16":
        pytest.skip("on the CPU there is one way")
    if path.dtype == torch.float32 and path.serial and isinstance(way, plan.FewRows):
        pytest.skip("products of tensor cores are for 16 bits")
    if path.serial:
        # One token has a way of its own, always.
        monkeypatch.setattr(plan, "BUCKETS", (plan.BUCKETS[0], plan.Bucket(1 << 62, way)))
        monkeypatch.setattr(plan, "MANY", way)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES)
def test_products_match_the_reference(path: Path, case: str) -> None:
    batch = make_batch(path, *CASES[case])
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("kernels")
def test_every_value_stands_for_itself(path: Path) -> None:
    """All numbers of e4m3, subnormal ones too, in each place of a word, times powers of two: nothing is rounded."""
    values = torch.arange(256, dtype=torch.uint8)
    values[values & 127 == 127] = 0
    numbers = values.view(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5], [2.0]], device=path.device)
    expected = numbers.float() * torch.tensor([0.5, 2.0]).repeat_interleave(128)
    for num_tokens in (1, 2):
        for i in (0, 1, 32, 64, 96, 127):
            weight = numbers.view(torch.uint8)[:, None].repeat(1, 128).view(torch.float8_e4m3fn)
            x = torch.zeros(num_tokens, 128, dtype=path.dtype, device=path.device)
            x[-1, i] = 1.0
            made = torch.full((num_tokens, 256), 9.0, dtype=path.dtype, device=path.device)
            path.multiply_fp8(x, pack_fp8(weight.to(path.device)), scales, made)
            assert torch.equal(made[-1].float().cpu(), expected), (num_tokens, i)


def test_the_self_test_on_a_gpu_knows_every_plan() -> None:
    plans = [plan.choose_plan(num_tokens, torch.bfloat16) for num_tokens in selftest.TOKENS_GPU]
    assert plans == [*(bucket.plan for bucket in plan.BUCKETS), plan.MANY]
    # Of the last tile a part.
    assert selftest.TOKENS_GPU[-2] > 64


@pytest.mark.parametrize("size", [(1, 1), (3, 128), (5, 300)])
def test_packed_weights_are_found_again(size: tuple[int, int]) -> None:
    weight = stored(*size)[0]
    words = pack_fp8(weight)
    assert words.shape == (size[0], -(-size[1] // 128) * 32) and words.is_contiguous()
    assert same_bits(unpack_fp8(words, size[1]).view(torch.uint8), weight.view(torch.uint8))
    # Byte j of word i is input 32 j + i.
    assert int(words.view(torch.uint8)[0, 0]) == int(weight.view(torch.uint8)[0, 0])
    if size[1] >= 128:
        first = weight.view(torch.uint8)[0, [0, 32, 64, 96, 1, 33, 65, 97]]
        assert torch.equal(words.view(torch.uint8)[0, :8], first)


def test_what_is_no_weight_is_not_packed() -> None:
    weight = torch.zeros(3, 5).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[2, 4] = 0xFF
    with pytest.raises(ValueError, match=r"^weight: expected numbers, got NaN$"):
        pack_fp8(weight)
    with pytest.raises(TypeError, match=r"^weight: expected torch.float8_e4m3fn, got torch.float32"):
        pack_fp8(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"^weight: expected shape \[N, K\], none of them 0, got \[0, 5\]"):
        pack_fp8(weight[:0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("num_tokens", [5, 18])
def test_a_row_does_not_depend_on_its_neighbours(path: Path, num_tokens: int) -> None:
    """Whatever they hold and wherever it is; and a repeat has the same bits."""
    if isinstance(path, InterpretedPath) and num_tokens > 5:
        pytest.skip("one tile is enough for the interpreter, whose sums depend on a row's place")
    batch = make_batch(path, num_tokens, 140, 300)
    whole = batch.run(path)
    assert same_bits(batch.run(path), whole)
    others = replace(batch, x=batch.x.clone())
    others.x[:2], others.x[3:] = torch.nan, 300.0
    assert same_bits(others.run(path)[2], whole[2])


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 40])
def test_a_row_has_the_same_bits_alone_and_among_others(num_tokens: int) -> None:
    """On the CPU, where nothing is padded."""
    path = Path("cpu", torch.float32)
    batch = make_batch(path, num_tokens, 140, 300)
    whole = batch.run(path)
    for i in range(num_tokens):
        assert torch.equal(replace(batch, x=batch.x[i : i + 1]).run(path)[0], whole[i])


def test_no_tokens(path: Path) -> None:
    assert make_batch(path, 0, 130, 140).run(path).shape == (0, 130)


X, WEIGHT, SCALES = torch.zeros(3, 300), torch.zeros(200, 96, dtype=torch.int32), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({"x": torch.zeros(3, 256)}, ValueError, "weight: expected shape [*, 64], got [200, 96]"),
        ({"x": torch.zeros(3, 300).double()}, TypeError, "x: expected torch.float32 or"),
        ({"weight": WEIGHT.float()}, TypeError, "weight: expected torch.int32, got torch.float32"),
        ({"weight": WEIGHT[:0]}, ValueError, "weight: expected a packed [N, K], none of them 0, got [0, 300]"),
        ({"scales": torch.ones(())}, ValueError, "scales: expected shape [2, 3], got []"),
        ({"scales": torch.ones(3, 2).t()}, ValueError, "scales: expected a contiguous tensor"),
        ({"scales": SCALES.bfloat16()}, TypeError, "scales: expected torch.float32, got torch.bfloat16"),
        ({"out": torch.zeros(3, 199)}, ValueError, "out: expected shape [3, 200], got [3, 199]"),
        ({"out": torch.zeros(3, 200).half()}, TypeError, "out: expected torch.float32, got torch.float16"),
    ],
)
def test_wrong_arguments_are_refused(told: dict[str, Any], error: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"x": X, "weight": WEIGHT, "scales": SCALES, "out": torch.zeros(3, 200)}
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        multiply_fp8(**given | told)


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_which_gpus_know_fp8(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert can_multiply_fp8(torch.device("cuda")) is expected and can_multiply_fp8(torch.device("cpu"))


def ones(num_tokens: int) -> Tensor:
    return torch.ones(num_tokens, 256)


def integers(num_tokens: int) -> Tensor:
    return normal(num_tokens, 256).round()


def test_integers_give_exact_products(path: Path) -> None:
    """All ones among them, in every way: what an assembler gets wrong shows here."""
    weight = normal(128, 256).mul(2).round().to(torch.float8_e4m3fn).to(path.device)
    words = pack_fp8(weight)
    batches = [fill(n) for n in ((3,) if path.device == "cpu" else (1, 16, 30, 100, 330)) for fill in (ones, integers)]
    for x in batches:
        out = torch.full((len(x), 128), torch.nan, dtype=path.dtype, device=path.device)
        path.multiply_fp8(x.to(path.device, path.dtype), words, torch.ones(1, 2, device=path.device), out)
        exact = x.double() @ weight.double().cpu().T
        assert torch.equal(out.cpu(), exact.to(path.dtype))
