"""rms_norm and add_rms_norm on a GPU: in graphs, beyond 2**31 values, without a wait, and compiled once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rigs.kernels.graphs import check_replay, no_waits
from torch import Tensor

from deltaline_kernels import add_rms_norm, gated_rms_norm, rms_norm, silu_and_mul

pytestmark = pytest.mark.gpu

BF16, MANY = torch.bfloat16, 2**31
D, EPS = 5120, 1e-6


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return rms_norm(x, weight, EPS), *add_rms_norm(x, residual, weight, EPS, scale=0.5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_graph_follows_what_its_tensors_hold() -> None:
    x, residual, weight = draw(5, D), draw(5, D), draw(D, dtype=torch.float32)

    def change() -> None:
        x.normal_()

    check_replay(lambda: run(x, residual, weight), [x, residual], change)
    with no_waits():
        run(x, residual, weight)


@pytest.mark.parametrize("num_tokens", [1, 64, 2000])
def test_launches_that_begin_early_have_the_bits_of_those_that_wait(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """In graphs of layers, with activations, gated norms and products between."""
    layers = [(draw(2 * D, D) * D**-0.5, draw(D, D) * D**-0.5) for _ in range(3)]
    x, weight = draw(num_tokens, D), torch.ones(D, device="cuda")

    def compute() -> tuple[Tensor, Tensor]:
        residual, entering = x, x
        for up, down in layers:
            heads = silu_and_mul(F.linear(entering, up)).unflatten(1, (-1, 128))
            made = F.linear(gated_rms_norm(heads, heads, weight[:128], EPS), down)
            residual, entering = add_rms_norm(made, residual, weight, EPS)
        return residual, entering

    def capture() -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
        compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = compute()
        return graph, made

    early, got = capture()
    for kernels in ("norm.hidden", "norm.kernel", "activation.kernel"):
        monkeypatch.setattr(f"deltaline_kernels.{kernels}.can_overlap", lambda _: False)
    late, want = capture()
    for _ in range(20):
        x.normal_()
        early.replay()
        late.replay()
        assert all(map(torch.equal, got, want)) and got[0].isfinite().all()


def test_tokens_beyond_int32() -> None:
    """More than 2**31 values of each tensor; about 26 GB."""
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GB of GPU memory")
    num_tokens = MANY // D + 9
    x, residual = (torch.zeros(num_tokens, D, dtype=BF16, device="cuda") for _ in range(2))
    x[-5:], residual[-5:] = draw(5, D), draw(5, D)
    weight = draw(D, dtype=torch.float32)
    want = run(x[-5:].clone(), residual[-5:].clone(), weight)
    assert x.numel() > MANY
    for got, few in zip(run(x, residual, weight), want, strict=True):
        assert torch.equal(got[-5:], few) and not got[:-5].any()


def test_nothing_is_compiled_while_serving() -> None:
    from deltaline_kernels.norm import hidden

    def variants() -> int:
        device, kernels = torch.cuda.current_device(), (hidden.rms_norm_kernel, hidden.add_rms_norm_kernel)
        return sum(len(kernel.device_caches[device][0]) for kernel in kernels)

    weight = draw(D, dtype=torch.float32)
    run(draw(1, D), draw(1, D), weight)
    before = variants()
    assert before > 0
    for num_tokens in (1, 2, 16, 17, 1000):
        run(draw(num_tokens, D), draw(num_tokens, D), weight)
    assert variants() == before
