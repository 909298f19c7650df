"""Products with FP8 weights, against the reference in fp64; the interpreter runs these again with the Triton kernel."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.fp8_batches import make_batch
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import can_multiply_fp8, multiply_fp8
from deltaline_kernels.fp8 import plan

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
    "few": plan.BUCKETS[0].plan,
    "32": plan.BUCKETS[1].plan,
    "64": plan.BUCKETS[2].plan,
    "128": plan.BUCKETS[-1].plan,
    "exact": plan.EXACT,
}


@pytest.fixture(params=PLANS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Each of the ways in which a GPU computes products, whatever the batch."""
    if not path.serial and request.param != "few":
        pytest.skip("on the CPU there is one way")
    if path.dtype == torch.float32 and request.param != "exact" and path.device != "cpu":
        pytest.skip("products of tensor cores are for 16 bits")
    if path.serial:
        monkeypatch.setattr(plan, "BUCKETS", (plan.Bucket(plan.ANY, PLANS[request.param]),))
        monkeypatch.setattr(plan, "EXACT", PLANS[request.param])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES)
def test_products_match_the_reference(path: Path, case: str) -> None:
    batch = make_batch(path, *CASES[case])
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("kernels")
def test_every_value_stands_for_itself(path: Path) -> None:
    """All numbers of e4m3, subnormal ones too, times powers of two: nothing is rounded; and NaN stays NaN."""
    values = torch.arange(256, dtype=torch.uint8)
    if isinstance(path, InterpretedPath):
        values[values & 127 == 127] = 0  # its e4m3 has a number there
    values = values.view(torch.float8_e4m3fn)
    weight = values[:, None].expand(256, 2).contiguous().to(path.device)
    scales = torch.tensor([[0.5], [2.0]], device=path.device)
    made = torch.full((1, 256), 9.0, dtype=path.dtype, device=path.device)
    path.multiply_fp8(torch.tensor([[0.0, 1.0]], dtype=path.dtype, device=path.device), weight, scales, made)
    expected = values.float() * torch.tensor([0.5, 2.0]).repeat_interleave(128)
    assert torch.equal(made[0].float().cpu().nan_to_num(123.0), expected.nan_to_num(123.0))
    assert int(made.isnan().sum()) == int(expected.isnan().sum())


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


X, WEIGHT, SCALES = torch.zeros(3, 300), torch.zeros(200, 300).to(torch.float8_e4m3fn), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        ({"x": torch.zeros(3, 299)}, ValueError, "weight: expected shape [*, 299], got [200, 300]"),
        ({"x": torch.zeros(3, 300).double()}, TypeError, "x: expected torch.float32 or"),
        ({"weight": WEIGHT.float()}, TypeError, "weight: expected torch.float8_e4m3fn, got torch.float32"),
        ({"weight": WEIGHT[:0]}, ValueError, "weight: expected shape [N, K], none of them 0, got [0, 300]"),
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


def test_integers_give_exact_products(path: Path) -> None:
    """All ones among them, of more than 128 tokens: what an assembler gets wrong shows here."""
    num_tokens = 3 if path.device == "cpu" else 330
    weight = normal(128, 256).mul(2).round().to(torch.float8_e4m3fn).to(path.device)
    for x in (torch.ones(num_tokens, 256), normal(num_tokens, 256).round()):
        out = torch.full((num_tokens, 128), torch.nan, dtype=path.dtype, device=path.device)
        path.multiply_fp8(x.to(path.device, path.dtype), weight, torch.ones(1, 2, device=path.device), out)
        exact = x.double() @ weight.double().cpu().T
        assert torch.equal(out.cpu(), exact.to(path.dtype))
