"""rotate_and_store on a GPU: in graphs, beyond 2**31 values, without a wait, and compiled once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rigs.kernels.graphs import no_waits
from rigs.kernels.paths import Path
from rigs.kernels.rotary_batches import Heads, Row, bits, make_rotary_batch
from rigs.kernels.tolerance import assert_close

from deltaline_kernels import rotate_and_store

pytestmark = pytest.mark.gpu

PATH = Path("cuda", torch.bfloat16)
MODEL = Heads(HQ=16, HKV=2, D=256, DV=256, R=64, gate=256)
MANY = 2**31


@pytest.mark.parametrize("length", [1, 4])
def test_a_graph_follows_positions_that_grow(length: int) -> None:
    """Replays with other positions, pages and tokens, and with a row that is skipped from then on."""
    batch = make_rotary_batch([Row(length, position) for position in (60, 50, 95, 33)], PATH, MODEL)
    own = replace(batch.clone(), page_table=batch.page_table.clone(), q=batch.q.clone(), k=batch.k.clone())
    own.run(PATH)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = own.run(PATH)
    generator = torch.Generator().manual_seed(1)
    own.rows.position.sub_(30)
    for step in range(30):
        own.q.copy_(torch.randn(own.q.shape, generator=generator))
        own.k.copy_(torch.randn(own.k.shape, generator=generator))
        own.rows.position.add_(1)
        if step == 10:
            other = torch.randperm(own.k_pages.shape[0] - 1, generator=generator, dtype=torch.int32) + 1
            moved = torch.cat((torch.zeros(1, dtype=torch.int32), other)).cuda()
            own.page_table.copy_(moved[own.page_table.long()])
        if step == 20:
            own.rows.control[1:3, 2] = -1
        want = own.clone()
        want_q = want.run_reference()
        graph.replay()
        assert_close("q", got, want_q, PATH.dtype)
        assert_close("k_pages", own.k_pages, want.k_pages, PATH.dtype)
        assert torch.equal(bits(own.v_pages), bits(want.v_pages))


def test_pages_beyond_int32() -> None:
    """Pages, tokens and lines whose offsets are above 2**31 values; about 11 GB."""
    heads = Heads(HQ=2, HKV=1, D=64, DV=32, R=16, gate=0, page_size=16)
    near = make_rotary_batch([Row(1, 20), Row(3, 14)], PATH, heads, tokens_of_no_row=0)
    far_pages, far_lines, max_pages = MANY // (16 * 32) + 5, MANY // 8192 + 3, 8192
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    k_pages = torch.zeros(far_pages + 12, 16, 1, 64, dtype=PATH.dtype, device="cuda")
    v_pages = torch.zeros(far_pages + 12, 16, 1, 32, dtype=PATH.dtype, device="cuda")
    page_table = torch.zeros(far_lines + 8, max_pages, dtype=torch.int32, device="cuda")
    assert v_pages[:far_pages].numel() > MANY and page_table[:far_lines].numel() > MANY
    live = near.rows.write_line.long()
    moved = near.page_table[live]
    page_table[live + far_lines, : moved.shape[1]] = torch.where(moved > 0, moved + far_pages, 0).int()
    control = near.rows.control.clone()
    control[1:3, :-1] += far_lines
    far = replace(
        near, k_pages=k_pages, v_pages=v_pages, page_table=page_table, rows=replace(near.rows, control=control)
    )
    assert torch.equal(far.run(PATH), near.run(PATH))
    own = near.own.nonzero()
    assert own.shape[0] == 4
    for pages, small in ((k_pages, near.k_pages), (v_pages, near.v_pages)):
        assert torch.equal(pages[own[:, 0] + far_pages, own[:, 1]], small[own[:, 0], own[:, 1]])
        assert int(pages.count_nonzero()) == int(small[near.own].count_nonzero())


def test_tokens_beyond_int32() -> None:
    """More than 2**31 values of the queries' projection, and of the queries; about 14 GB."""
    if torch.cuda.mem_get_info()[0] < 32 << 30:
        pytest.skip("needs 32 GB of GPU memory")
    heads = Heads(HQ=128, HKV=1, D=128, DV=8, R=16)
    num_tokens = MANY // (128 * 128) + 9
    few = make_rotary_batch([Row(5, 14)], PATH, heads, tokens_of_no_row=0)
    q, k, v = (tensor.new_zeros(num_tokens, *tensor.shape[1:]) for tensor in (few.q, few.k, few.v))
    for many, tensor in ((q, few.q), (k, few.k), (v, few.v)):
        many[-5:] = tensor
    control = few.rows.control.clone()
    control[0] += num_tokens - 5
    many_rows = replace(few.clone(), q=q, k=k, v=v, rows=replace(few.rows, control=control))
    got = many_rows.run(PATH)
    assert got.numel() > MANY
    assert torch.equal(got[-5:], few.run(PATH))
    assert torch.equal(bits(many_rows.k_pages), bits(few.k_pages))
    assert not got[:-5].any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_rotary_does_not_wait_for_the_device() -> None:
    batch = make_rotary_batch([Row(1, 20), Row(3, 14)], PATH, MODEL)
    batch.run(PATH)
    with no_waits():
        batch.run(PATH)


def test_rotary_compiles_nothing_while_serving() -> None:
    from deltaline_kernels.rotary.kernel import rotate_kernel

    def variants() -> int:
        return len(rotate_kernel.device_caches[torch.cuda.current_device()][0])

    make_rotary_batch([Row(1, 3)], PATH, MODEL).run(PATH)
    before = variants()
    assert before > 0
    for num_rows in (1, 2, 16, 17, 63, 64, 65, 200):
        for length in (1, 3, 16):
            make_rotary_batch([Row(length, i % 40) for i in range(num_rows)], PATH, MODEL).run(PATH)
    batch = make_rotary_batch([Row(1, 3), Row(500, 700)], PATH, MODEL, tokens_of_no_row=11)
    replace(batch, rows=batch.rows.long()).run(PATH)
    assert variants() == before


def test_rotary_of_many_tokens() -> None:
    """More programs than the second axis of a grid takes; the CPU path is what it is compared with."""
    heads = Heads(HQ=16, HKV=8, D=128, DV=128, R=128, page_size=256)
    batch = make_rotary_batch([Row(1, 9), Row(20_000, 100), Row(3000)], PATH, heads)
    inputs = [x.cpu() if isinstance(x, torch.Tensor) else x for x in batch.clone().inputs]
    inputs[-1] = replace(batch.rows, control=batch.rows.control.cpu())
    got = batch.run(PATH)
    assert_close("q", got, rotate_and_store(*inputs), PATH.dtype)  # type: ignore[arg-type]
    assert_close("k_pages", batch.k_pages, inputs[7], PATH.dtype)  # type: ignore[arg-type]
    assert torch.equal(bits(batch.v_pages).cpu(), bits(inputs[8]))  # type: ignore[arg-type]
