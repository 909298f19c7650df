"""Mistakes of other LoRA kernels, one test each. How wide an index may be and what a graph replays needs a GPU."""

from __future__ import annotations

import pytest
import torch
from rigs.kernels.graphs import no_waits
from rigs.kernels.lora_batches import Batch, make_batch
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import LoraWeights, add_lora, add_lora_reference, group_tokens
from deltaline_kernels.lora import plan


def check_exact(path: Path, batch: Batch) -> None:
    """Check the outputs bit by bit against sums that are exact, rounded once."""
    assert torch.equal(batch.run(path), batch.exact().to(batch.out.dtype))


@pytest.mark.parametrize(
    ("num_tokens", "rank", "inputs"),
    [
        (130, 64, 130),
        (plan.FEW_TOKENS + 130, 64, 130),
        (plan.DENSE_TOKENS + 130, 64, 130),
        (plan.DENSE_TOKENS + 130, 256, 1000),
    ],
    ids=str,
)
def test_products_are_right_beyond_128_tokens(path: Path, num_tokens: int, rank: int, inputs: int) -> None:
    """An assembler used to overwrite operands in registers too early: wrong numbers from token 128 on, or NaN."""
    check_exact(path, make_batch(path, [0] * num_tokens, [[rank]], (70,), inputs, integers=True))
    ones = make_batch(path, [0] * num_tokens, [[rank]], (70,), inputs, integers=True)
    for tensor in (ones.x, ones.out, ones.weights.a, ones.weights.b, ones.weights.scales):
        tensor.fill_(1)
    assert (ones.run(path) == torch.tensor(1.0 + rank * inputs).to(path.dtype).to(path.device)).all()


def test_what_is_added_is_rounded_once(path: Path) -> None:
    """Not to 16 bits before it is added: 257 is no bf16, 2049 no fp16."""
    batch = make_batch(path, [0, 0, 0], [[1]], (4,), 3, integers=True)
    batch.x.zero_()
    batch.x[:, 0] = 1
    batch.weights.a.fill_(1)
    batch.weights.b.fill_(1)
    for delta, before in ((257.0, 1.0), (2049.0, 1.0), (-257.0, 256.0)):
        batch.weights.scales.fill_(delta)
        batch.out.fill_(before)
        assert (batch.run(path).double() == torch.tensor(before + delta).to(path.dtype).double().item()).all()


def test_tokens_without_an_adapter_keep_their_bits(path: Path) -> None:
    batch = make_batch(path, [-1, 0, -1, 1], [[4, 0], [0, 4]], (8, 8), factors=True)
    batch.out[0, :2] = torch.tensor([torch.nan, -0.0])
    batch.out[1, 8:] = -0.0
    before, after = batch.out.clone(), batch.run(path)
    kept = torch.zeros_like(before, dtype=torch.bool)
    kept[[0, 2]] = True
    kept[1, 8:] = True
    kept[3, :8] = True
    assert torch.equal(bits(after)[kept], bits(before)[kept])
    assert not torch.equal(after[1, :8], before[1, :8])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def test_a_rank_above_the_weights_counts_as_theirs(path: Path) -> None:
    batch = make_batch(path, [0, 1], [[8], [8]])
    want = batch.run(path)
    batch.weights.ranks[0], batch.weights.ranks[1] = 9, 1 << 30
    assert torch.equal(batch.run(path), want)
    batch.weights.ranks[1] = -5
    assert torch.equal(batch.run(path)[1], batch.out[1])


def gpu_batch(num_tokens: int, token_slots: Tensor, num_slots: int = 3, rank: int = 16) -> Batch:
    """Make a batch of bf16 on the GPU."""
    # Every slot is used for a start: those that are not hold NaN.
    used = [t % num_slots for t in range(max(num_tokens, num_slots))]
    made = make_batch(Path("cuda", torch.bfloat16), used, [[rank, rank // 2]] * num_slots, (256, 40), 128)
    made = Batch(made.x[:num_tokens], made.out[:num_tokens], made.weights, made.token_slots[:num_tokens])
    made.token_slots.copy_(token_slots)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "rank"), [(1, 16), (40, 16), (600, 16), (1100, 16), (1100, 80)])
def test_a_graph_follows_slots_and_weights(num_tokens: int, rank: int) -> None:
    """A replay after a slot got another tenant's adapter serves that one; a memo of the mapping would serve the old."""
    batch = gpu_batch(num_tokens, torch.zeros(num_tokens, dtype=torch.int32), rank=rank)
    out, before = batch.out.clone(), batch.out.clone()

    def run() -> None:
        add_lora(batch.x, out, batch.weights, group_tokens(batch.token_slots, batch.weights.num_slots))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        slots = torch.randint(-1, 3, (num_tokens,), generator=generator, dtype=torch.int32)
        batch.token_slots.copy_(slots)
        for tensor in (batch.weights.a, batch.weights.b):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 8)
        batch.weights.ranks.copy_(torch.randint(0, rank + 1, batch.weights.ranks.shape, generator=generator))
        out.copy_(before)
        graph.replay()
        want = before.clone()
        add_lora_reference(batch.x, want, batch.weights, batch.token_slots)
        assert_close("out", out, want, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 256, 8192])
def test_base_rows_cost_two_launches(num_tokens: int) -> None:
    batch = gpu_batch(num_tokens, torch.full((num_tokens,), -1, dtype=torch.int32))
    before = batch.out.clone()
    tiles = group_tokens(batch.token_slots, batch.weights.num_slots)
    add_lora(batch.x, batch.out, batch.weights, tiles)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        add_lora(batch.x, batch.out, batch.weights, tiles)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
    # Filling new memory with NaN is these tests' own doing.
    own = [name for name in kernels if "fill" not in name.lower() and "elementwise" not in name.lower()]
    assert 1 <= len(own) <= 2, kernels
    assert torch.equal(batch.out, before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    batch = gpu_batch(40, torch.tensor([t % 4 - 1 for t in range(40)], dtype=torch.int32))
    add_lora(batch.x, batch.out, batch.weights, group_tokens(batch.token_slots, batch.weights.num_slots))
    with no_waits():
        add_lora(batch.x, batch.out, batch.weights, group_tokens(batch.token_slots, batch.weights.num_slots))


@pytest.mark.gpu
def test_offsets_of_tokens_and_slots_are_64_bits() -> None:
    """Tokens times outputs, and slots times ranks times inputs or outputs, each above 2**31."""
    device, dtype = "cuda", torch.bfloat16
    num_tokens, outputs, inputs, num_slots, rank = 90_000, 24_576, 8192, 600, 512
    ends = [0, 1, 44_000, 87_382, 87_383, num_tokens - 1]
    slots = torch.full((num_tokens,), -1, dtype=torch.int32)
    slots[ends] = torch.tensor([0, 599, 300, 598, 1, 599], dtype=torch.int32)
    x = torch.zeros(num_tokens, inputs, dtype=dtype, device=device)
    out = torch.zeros(num_tokens, outputs, dtype=dtype, device=device)
    a = torch.zeros(num_slots, 1, rank, inputs, dtype=dtype, device=device)
    b = torch.zeros(num_slots, rank, outputs, dtype=dtype, device=device)
    assert min(out.numel(), a.numel(), b.numel()) > 2**31
    used = [0, 1, 300, 598, 599]
    a[used], b[used] = (torch.randn(5, *tensor.shape[1:], device=device).to(dtype) for tensor in (a, b))
    x[ends], out[ends] = (torch.randn(6, tensor.shape[1], device=device).to(dtype) for tensor in (x, out))
    ranks = torch.full((num_slots, 1), 5, dtype=torch.int32, device=device)
    ranks[598:] = rank
    weights = LoraWeights(a, b, ranks, torch.full((num_slots, 1), 0.01, device=device), (outputs,))
    want = out[ends].clone()
    small = slots[ends].to(device)
    add_lora_reference(x[ends], want, weights, small)
    add_lora(x, out, weights, group_tokens(slots.to(device), num_slots))
    assert_close("out", out[ends], want, dtype)
    rest = torch.ones(num_tokens, dtype=torch.bool, device=device)
    rest[ends] = False
    assert not out[rest].any()
