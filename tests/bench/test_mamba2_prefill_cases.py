"""The field's prefill of Mamba2: called as our function of the same name is, it has to find the truth."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from deltaline_bench.gated_delta.shape import Mode
from deltaline_bench.mamba2 import field_prefill
from deltaline_bench.mamba2.batch import Batch
from deltaline_bench.mamba2.field import peers
from deltaline_bench.mamba2.shape import Shape
from deltaline_bench.peers import Peers
from deltaline_kernels.compat import mamba_chunk_scan_combined_varlen

CPU = torch.device("cpu")
CHUNK = 64
SHAPE = Shape(Mode.PREFILL, (3, 70, 1, 64, 130), 2, 4, 16, 24, torch.float32)


def test_the_field_is_told_what_our_own_function_takes() -> None:
    batch = Batch(SHAPE, "prefill", CPU)
    told: dict[str, Any] = {}

    def function(x: torch.Tensor, dt: torch.Tensor, **arguments: Any) -> None:
        told.update(arguments)
        mamba_chunk_scan_combined_varlen(x, dt, **arguments)

    side = field_prefill._vllm(batch, function, CHUNK)
    found, expected = side.outputs(side.call()), batch.expected()
    for name in ("y", "state"):
        assert (found[name] - expected[name]).norm() <= 1e-5 * expected[name].norm()
    side.reset()
    assert side.outputs(None)["state"][0].isnan().all()
    # Chunks of at most 64 tokens, cut where rows end and at multiples of 64.
    ends = told["cu_chunk_seqlens"].tolist()
    starts = batch.starts()
    assert all(0 < end - begin <= CHUNK and begin // CHUNK == (end - 1) // CHUNK for begin, end in pairwise(ends))
    assert ends[0] == 0 and set(starts) <= set(ends)
    rows, last = told["seq_idx"].tolist(), told["last_chunk_indices"].tolist()
    assert all(starts[row] <= begin < starts[row + 1] for row, begin in zip(rows, ends, strict=False))
    assert [ends[i + 1] for i in last] == starts[1:]


def test_a_prefill_meets_vllm_with_both_chunks() -> None:
    assert set(peers(Batch(SHAPE, "prefill", CPU), Peers())) == {"vLLM, chunks of 128", "vLLM, chunks of 256"}
