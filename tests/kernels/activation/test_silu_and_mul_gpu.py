"""silu_and_mul on a GPU: in graphs, beyond 2**31 values, without a wait, and compiled once."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.graphs import check_replay, no_waits

from deltaline_kernels import silu_and_mul

pytestmark = pytest.mark.gpu

BF16, MANY = torch.bfloat16, 2**31
N = 17408


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_graph_follows_what_its_tensors_hold() -> None:
    gate_up = torch.randn(5, 2 * N, dtype=BF16, device="cuda")

    def change() -> None:
        gate_up.normal_()

    check_replay(lambda: [silu_and_mul(gate_up)], [gate_up], change)
    with no_waits():
        silu_and_mul(gate_up)


def test_tokens_beyond_int32() -> None:
    """More than 2**31 values of the result; about 13 GB."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    gate_up = torch.zeros(MANY // N + 9, 2 * N, dtype=BF16, device="cuda")
    gate_up[-5:].normal_()
    got = silu_and_mul(gate_up)
    assert got.numel() > MANY
    assert torch.equal(got[-5:], silu_and_mul(gate_up[-5:].clone())) and not got[:-5].any()


def test_nothing_is_compiled_while_serving() -> None:
    from deltaline_kernels.activation.kernel import silu_and_mul_kernel

    def variants() -> int:
        return len(silu_and_mul_kernel.device_caches[torch.cuda.current_device()][0])

    silu_and_mul(torch.randn(1, 2 * N, dtype=BF16, device="cuda"))
    before = variants()
    assert before > 0
    for num_tokens in (1, 2, 16, 17, 1000):
        silu_and_mul(torch.randn(num_tokens, 2 * N, dtype=BF16, device="cuda"))
    assert variants() == before
