"""Hyper-connections on a GPU: in graphs, without a wait, compiled once, and what overlaps does not race."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.kernels.graphs import no_waits
from rigs.kernels.mhc_batches import (
    Streams,
    check_head,
    check_post_pre,
    check_pre,
    make_streams,
    run_head,
    run_post,
    run_post_pre,
    run_pre,
)
from rigs.kernels.paths import Path

pytestmark = pytest.mark.gpu

PATH = Path("cuda", torch.bfloat16)
RUNS = {"pre": run_pre, "post": run_post, "post-pre": run_post_pre, "head": run_head}


def refill(given: Streams, seed: int) -> None:
    num_tokens, streams, hidden = given.residual.shape
    other = make_streams(num_tokens, streams, hidden, PATH, seed=seed)
    for name in ("x", "residual", "post", "comb"):
        getattr(given, name).copy_(getattr(other, name))


@pytest.mark.parametrize("num_tokens", [1, 64, 3000])
@pytest.mark.parametrize("name", RUNS)
def test_a_graph_follows_its_inputs(name: str, num_tokens: int) -> None:
    given = make_streams(num_tokens, 4, 1280, PATH)
    run: Any = RUNS[name]
    run(PATH, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(PATH, given)
    for seed in range(1, 4):
        refill(given, seed)
        for tensor in captured if isinstance(captured, tuple) else (captured,):
            tensor.fill_(torch.nan)
        graph.replay()
        want = run(PATH, given)
        for got, one in zip(*((t if isinstance(t, tuple) else (t,)) for t in (captured, want)), strict=True):
            assert torch.equal(got, one)


@pytest.mark.parametrize(
    "shape",
    [(1, 4, 4096), (64, 4, 4096), (5000, 4, 4096), (3000, 4, 7168), (13000, 4, 1280), (20000, 2, 200)],
    ids=str,
)
def test_launches_that_overlap_do_not_race(shape: tuple[int, int, int]) -> None:
    """The same again and again, with other work between: bitwise equal.

    From three chunks of tokens on, sums take the memory of earlier ones.
    """
    given = make_streams(*shape, PATH)
    want = run_pre(PATH, given, given.norm)
    both = run_post_pre(PATH, given, given.norm)
    check_pre(want, given, given.norm)
    check_post_pre(both, given, given.norm)
    check_head(run_head(PATH, given), given)
    for _ in range(20):
        for got, one in zip(run_pre(PATH, given, given.norm), want, strict=True):
            assert torch.equal(got, one)
        for got, one in zip(run_post_pre(PATH, given, given.norm), both, strict=True):
            assert torch.equal(got, one)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_mhc_does_not_wait_for_the_device() -> None:
    given = make_streams(5, 4, 1280, PATH)
    for run in RUNS.values():
        run(PATH, given)  # type: ignore[operator]
    with no_waits():
        for run in RUNS.values():
            run(PATH, given)  # type: ignore[operator]


def test_mhc_compiles_nothing_while_serving() -> None:
    """Within a bucket one variant serves every number of tokens."""
    from deltaline_kernels.mhc.collapse import collapse_kernel
    from deltaline_kernels.mhc.post import post_kernel
    from deltaline_kernels.mhc.product import product_kernel

    def variants() -> list[int]:
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in (collapse_kernel, post_kernel, product_kernel)]

    def serve(num_tokens: int) -> None:
        given = make_streams(num_tokens, 4, 1280, PATH)
        run_pre(PATH, given)
        run_post_pre(PATH, given)

    for num_tokens in (1, 16, 17, 64, 65, 512, 513, 5000):
        serve(num_tokens)
    before = variants()
    for num_tokens in (2, 3, 15, 18, 33, 63, 100, 300, 511, 514, 1000, 5001, 6000):
        serve(num_tokens)
    assert variants() == before
