"""Experts of tokens, against the reference in fp64; the interpreter runs these again with the Triton kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.draws import normal
from rigs.kernels.expert_batches import Choose, anything, make_batch, one, some
from rigs.kernels.paths import InterpretedPath, Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import Router, route_and_run_experts
from deltaline_kernels.moe import plan

# As below, with weights of several blocks, cut ones among them; and where choices are sorted.
FP8_CASES: dict[str, tuple[int, int, int, int, int]] = {
    "few-tokens": (3, 3, 5, 300, 140),
    "odd-sizes": (7, 2, 5, 141, 133),
    "sorted": (9, 2, 3, 144, 272),
}
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


@pytest.fixture(params=["direct", "sorted", "tiles-of-16", "tiles-of-32", "tiles-of-64", "tiles-of-128"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Each of the ways in which a GPU computes experts, whatever the batch."""
    if request.param != "direct" and not path.serial:
        pytest.skip("on the CPU there is one way")
    monkeypatch.setattr(plan, "DIRECT_TOKENS", plan.ANY if request.param == "direct" else 0)
    monkeypatch.setattr(plan, "SORTED_CHOICES", 0 if request.param == "sorted" else plan.ANY)
    if request.param == "sorted":
        if path.dtype == torch.float32 and not isinstance(path, InterpretedPath):
            pytest.skip("sorted choices are for tensor cores")
        if isinstance(path, InterpretedPath):
            monkeypatch.setattr(plan, "is_sorted", lambda *given: all(size % 8 == 0 for size in given[3].shape[1:]))
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
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("case", FP8_CASES)
def test_experts_in_fp8_match_the_reference(path: Path, case: str, activation: str) -> None:
    batch = make_batch(path, *FP8_CASES[case], some, activation=activation).in_fp8()
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


def test_halves_of_experts_in_fp8_have_blocks_of_their_own() -> None:
    """The reference is that of weights times scales, each found by hand."""
    batch = make_batch(Path("cpu", torch.float32), 7, 2, 3, 141, 133, one).in_fp8()
    assert batch.gate_up_scales is not None and batch.down_scales is not None
    rows, width, inner = torch.arange(266), torch.arange(141) // 128, torch.arange(133) // 128
    of_rows = rows // 133 * 2 + rows % 133 // 128
    gate_up = batch.gate_up.double() * batch.gate_up_scales.double()[:, of_rows[:, None], width]
    down = batch.down.double() * batch.down_scales.double()[:, width[:, None], inner]
    plain = replace(batch, gate_up=gate_up, down=down, gate_up_scales=None, down_scales=None)
    assert_close("out", batch.run_reference(), plain.run_reference(), torch.float32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["few-tokens", "odd-sizes", "tiles"])
def test_experts_without_gates_match_the_reference(path: Path, case: str) -> None:
    batch = make_batch(path, *CASES[case], some, activation="relu2")
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["few-tokens", "tiles"])
def test_experts_within_a_limit_match_the_reference(path: Path, case: str) -> None:
    """Of gates from above alone, of what they multiply from both sides; it tells in most of them."""
    batch = replace(make_batch(path, *CASES[case], some), limit=0.4)
    assert_close("out", batch.run(path), batch.run_reference(), path.dtype)
    batch.x[0] = torch.nan
    assert batch.run(path)[0].isnan().all() and not batch.run_reference()[1:].isnan().any()


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


ROUTERS = {
    "gated": Router(2, num_shared=1, shared_gate=True),
    "two-shared": Router(3, "sigmoid", num_groups=3, top_groups=2, scale=2.5, num_shared=2),
    "none-shared": Router(2),
}


@pytest.mark.parametrize("num_tokens", [1, 3, 12])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_routes_and_experts_at_once_have_the_bits_of_one_after_the_other(
    path: Path, router: Router, num_tokens: int
) -> None:
    """Padding among the tokens; experts that no token has are NaN, but the shared ones, which may be read for it."""
    num_experts, width = 6, 48
    made = make_batch(path, num_tokens, 1, num_experts + router.num_shared, width, 40)
    logits = normal(num_tokens, num_experts + router.shared_gate).to(path.device)
    bias = normal(num_experts, seed=1).to(path.device) if router.scoring == "sigmoid" else None
    for num_live in (num_tokens, num_tokens - 1):
        starts = torch.tensor([0, num_live], dtype=torch.int32, device=path.device)
        weights, experts = path.route(logits, router, bias, starts)
        for stack in (made.gate_up, made.down):
            stack[~torch.isfinite(stack)] = 0.5
            unused = [i for i in range(num_experts) if i not in experts.unique().tolist()]
            stack[unused] = torch.nan
        got = path.route_and_run(made.x, logits, router, made.gate_up, made.down, bias, starts)
        want = path.run_experts(made.x, made.gate_up, made.down, weights, experts)
        assert got.isfinite().all() and same_bits(got, want)
        assert not got[num_live:].any()


def test_experts_behind_routes_are_those_of_the_router() -> None:
    x, logits, router = torch.zeros(3, 8), torch.zeros(3, 5), Router(2, num_shared=1, shared_gate=True)
    with pytest.raises(ValueError, match=r"^down: expected 5 experts, those of the logits and the shared ones, got 4"):
        route_and_run_experts(x, logits, router, torch.zeros(4, 8, 8), torch.zeros(4, 8, 4))
    with pytest.raises(ValueError, match=r"^x: expected shape \[3, \*\]"):
        route_and_run_experts(x[:2], logits, router, torch.zeros(5, 8, 8), torch.zeros(5, 8, 4))


@pytest.mark.parametrize(
    ("size", "at_once"),
    [((1, 1, 1), 256), ((7, 3, 5), 256), ((70, 4, 40), 256), ((300, 2, 600), 256), ((1200, 2, 5), 16)],
    ids=str,
)
def test_choices_are_sorted_by_their_experts(
    path: Path, size: tuple[int, int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stably, those of no expert left out; each tile is one expert's, and there is one for each of its places. Also
    where there are more blocks of choices than are added up at once."""
    if not path.serial:
        pytest.skip("on the CPU there is another way")
    from deltaline_kernels.moe import sort

    monkeypatch.setattr(sort, "BLOCK_ROWS", at_once)
    num_tokens, choices, num_experts = size
    generator = torch.Generator().manual_seed(3)
    experts = torch.randint(-1, num_experts + 2, (num_tokens, choices), generator=generator, dtype=torch.int32)
    made = sort.sort_choices(experts.to(path.device), num_experts, 16)
    keys = experts.flatten().long()
    is_used = (keys >= 0) & (keys < num_experts)
    order = torch.where(is_used, keys, num_experts + 2).sort(stable=True).indices[: int(is_used.sum())]
    want = torch.full_like(keys, -1)
    want[order] = torch.arange(len(order))
    assert torch.equal(made.places.cpu().long(), want)
    assert torch.equal(made.tokens.cpu()[: len(order)].long(), order // choices)
    tiles, covered = made.tiles.cpu(), list[int]()
    count = int(made.num_tiles)
    assert (tiles[:count, 0] >= 0).all() and (tiles[count:, 0] == -1).all()
    for expert, begin, end in tiles[:count].tolist():
        places = range(begin, min(begin + 16, end))
        assert len(places) > 0 and (keys[order[list(places)]] == expert).all()
        covered += places
    assert covered == list(range(len(order)))
