"""Products with FP8 weights on a GPU: in graphs, without a wait, compiled once, in every bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.fp8_batches import make_batch
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import multiply_fp8, pack_fp8

pytestmark = pytest.mark.gpu

GPU = Path("cuda", torch.bfloat16)
# Tokens of every bucket, at both of its ends.
TOKENS = (1, 2, 16, 17, 32, 33, 64, 128, 129, 1100)


@pytest.fixture(autouse=True)
def nan_memory() -> None:
    """Leave torch.empty as it is: while a graph is captured, what fills it would be captured."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_sizes_of_a_model_match_the_reference(num_tokens: int, dtype: torch.dtype) -> None:
    path = Path("cuda", dtype)
    for outputs, inputs in ((5120, 6144), (1000, 2048), (384, 4100)):
        batch = make_batch(path, num_tokens, outputs, inputs)
        assert_close("out", batch.run(path), batch.run_reference(), dtype)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_a_row_does_not_depend_on_its_place(num_tokens: int) -> None:
    batch = make_batch(GPU, num_tokens, 640, 2048)
    whole, shift = batch.run(GPU), num_tokens // 3
    x = torch.empty_strided(batch.x.shape, batch.x.stride(), dtype=GPU.dtype, device="cuda").copy_(
        batch.x.roll(shift, 0)
    )
    assert same_bits(replace(batch, x=x).run(GPU).roll(-shift, 0), whole)
    assert same_bits(batch.run(GPU), whole)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_nothing_waits_and_a_graph_follows_what_its_tensors_hold(num_tokens: int) -> None:
    batch = make_batch(GPU, num_tokens, 640, 2048)
    out = torch.empty(num_tokens, 640, dtype=GPU.dtype, device="cuda")
    words = pack_fp8(batch.weight)

    def run() -> list[torch.Tensor]:
        multiply_fp8(batch.x, words, batch.scales, out)
        return [out.clone()]

    def change() -> None:
        batch.x.normal_()
        batch.scales.mul_(2.0)

    run()
    with no_waits():
        multiply_fp8(batch.x, words, batch.scales, out)
    check_replay(run, (), change)


def test_nothing_is_compiled_within_a_bucket() -> None:
    from deltaline_kernels.fp8.few_rows import add_parts_kernel, few_rows_kernel

    def variants() -> int:
        device = torch.cuda.current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in (few_rows_kernel, add_parts_kernel))

    for tokens in ((2, 15, 16), (33, 64, 65, 128)):
        make_batch(GPU, tokens[0], 640, 2048).run(GPU)
        before = variants()
        assert before > 0
        for num_tokens in tokens:
            make_batch(GPU, num_tokens, 640, 2048).run(GPU)
        assert variants() == before
