"""Experts of tokens, against the reference in fp64; the interpreter runs these again with the Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.expert_batches import Choose, anything, make_batch, one, some
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close

from deltaline_kernels.moe import plan

# Tokens, choices, experts, channels outside and inside.
CASES: dict[str, tuple[int, int, int, int, int]] = {
    "one-token": (1, 3, 8, 48, 40),
    "one-choice": (1, 1, 2, 16, 8),
    "few-tokens": (4, 3, 5, 70, 33),
    "all-experts": (3, 6, 6, 32, 16),
    "tiles": (9, 3, 7, 48, 40),
    "odd-sizes": (7, 2, 5, 71, 37),
    "long-inputs": (6, 2, 3, 600, 260),
    "long-inputs-of-one": (2, 2, 3, 1100, 600),
    "several-tiles": (40, 2, 3, 48, 40),
    "one-expert": (21, 1, 1, 32, 48),
}


@pytest.fixture(params=["direct", "grouped", "tiles-of-16", "tiles-of-32", "tiles-of-64", "tiles-of-128"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Each of the ways in which a GPU computes experts, whatever the batch."""
    if request.param != "direct" and not path.serial:
        pytest.skip("on the CPU there is one way")
    monkeypatch.setattr(plan, "DIRECT_TOKENS", plan.ANY if request.param == "direct" else 0)
    monkeypatch.setattr(plan, "GROUPED_CHOICES", 0 if request.param == "grouped" else plan.ANY)
    if request.param == "grouped":
        if isinstance(path, InterpretedPath):
            # On the CPU torch has them for these sizes.
            monkeypatch.setattr(
                "deltaline_kernels.moe.launch.has_grouped",
                lambda _, down: all(size % 8 == 0 for size in down.shape[1:]),
            )
        elif path.dtype != torch.bfloat16:
            pytest.skip("torch has grouped products of bf16 alone")
    elif request.param != "direct":
        rows = int(request.param.rpartition("-")[2])
        chosen = next(bucket.plan for bucket in plan.BUCKETS if bucket.plan.rows == rows)
        monkeypatch.setattr(plan, "BUCKETS", (plan.Bucket(plan.ANY, chosen),))
        monkeypatch.setattr(plan, "EXACT_PLAN", replace(plan.EXACT_PLAN, rows=rows))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("choose", [anything, one, some], ids=lambda choose: choose.__name__)
@pytest.mark.parametrize("case", CASES)
def test_experts_match_the_reference(path: Path, case: str, choose: Choose) -> None:
    batch = make_batch(path, *CASES[case], choose)
    got = batch.run(path)
    assert got.dtype == path.dtype
    assert_close("out", got, batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["few-tokens", "odd-sizes", "tiles"])
def test_experts_without_gates_match_the_reference(path: Path, case: str) -> None:
    batch = make_batch(path, *CASES[case], some, activation="relu2")
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("kernels")
def test_nan_stays_nan_without_gates(path: Path) -> None:
    batch = make_batch(path, 9, 2, 3, 48, 40, activation="relu2")
    batch.x[4] = torch.nan
    got = batch.run(path)
    assert got[4].isnan().all() and got[[0, 8]].isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_plan_of_a_batch_matches_the_reference(path: Path, case: str) -> None:
    """As the tables have it."""
    batch = make_batch(path, *CASES[case])
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("kernels")
def test_integers_give_exact_products(path: Path) -> None:
    """Gate and up are sums of small integers: what differs is what the compiler made of the products."""
    batch = make_batch(path, 37, 2, 3, 64, 64, integers=True)
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("kernels")
def test_row_does_not_depend_on_its_neighbours(path: Path) -> None:
    """Its bits are those it has beside other tokens, of other experts, in another place."""
    for num_tokens, width, inner in ((24, 48, 40), (2, 48, 40), (2, 31, 13)):
        batch, row = make_batch(path, num_tokens, 3, 5, width, inner), num_tokens // 2
        got = batch.run(path)
        assert same_bits(batch.alone(row).run(path)[row], got[row])
        assert same_bits(batch.rolled(7).run(path).roll(-7, 0), got)
        assert same_bits(batch.run(path), got)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_token_that_is_not_finite_spoils_no_other(path: Path, wrong: float) -> None:
    batch = make_batch(path, 12, 2, 3)
    want = batch.run(path)
    batch.x[5] = wrong
    got = batch.run(path)
    assert not got[5].isfinite().all()
    assert same_bits(torch.cat((got[:5], got[6:])), torch.cat((want[:5], want[6:])))


@pytest.mark.usefixtures("kernels")
def test_a_token_without_experts_gets_zeros(path: Path) -> None:
    """Whatever it holds: padding may hold anything."""
    batch = make_batch(path, 12, 2, 3)
    batch.experts[5], batch.x[5] = -1, torch.nan
    got = batch.run(path)
    assert got.isfinite().all() and not got[5].any()


@pytest.mark.usefixtures("kernels")
def test_the_same_expert_twice_counts_twice(path: Path) -> None:
    batch = make_batch(path, 6, 2, 3)
    batch.experts[:, 1] = batch.experts[:, 0]
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


def test_many_tokens_are_computed_one_part_after_the_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is kept of their choices is bounded; a token's bits do not tell in which part it was."""
    monkeypatch.setattr(plan, "MAX_TOKENS", 5)
    batch = make_batch(path, 11, 2, 3)
    got = batch.run(path)
    assert_close("out", got, batch.run_reference(), path.dtype)
    turned = replace(batch, x=batch.x.flip(0), weights=batch.weights.flip(0), experts=batch.experts.flip(0))
    assert same_bits(turned.run(path).flip(0), got)


def test_no_tokens_give_nothing(path: Path) -> None:
    batch = make_batch(path, 3, 2, 3)
    none = replace(batch, x=batch.x[:0], weights=batch.weights[:0], experts=batch.experts[:0])
    if path.device != "cpu" or type(path) is Path:
        assert none.run(path).shape == (0, 48)
