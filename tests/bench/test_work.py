"""The least work of a case, which bandwidths and shares are taken of, is what a count by hand gives."""

from __future__ import annotations

import pytest
import torch

from deltaline_bench.attention.shape import Shape as Attention
from deltaline_bench.conv1d.batch import Shape as Conv1d
from deltaline_bench.gated_delta.batch import Batch as GatedDeltaBatch
from deltaline_bench.gated_delta.mixer import Mixer
from deltaline_bench.gated_delta.shape import Shape as GatedDelta
from deltaline_bench.kda.shape import Shape as Kda
from deltaline_bench.lines import Mode
from deltaline_bench.lora.batch import Shape as Lora
from deltaline_bench.mamba1.shape import Shape as Mamba1
from deltaline_bench.mamba2.shape import Shape as Mamba2
from deltaline_bench.mhc.batch import FUSED, HEAD, POST, PRE
from deltaline_bench.mhc.batch import Shape as Mhc
from deltaline_bench.moe.batch import Batch as MoeBatch
from deltaline_bench.moe.batch import Shape as Moe

CPU = torch.device("cpu")


def test_gated_delta() -> None:
    # 8 tokens of 2*2*16 + 4*24 channels, 8 gates and 96 outputs; the second row reads a state, both write one.
    prefill = GatedDelta(Mode.PREFILL, (5, 3), 2, 4, 16, 24)
    assert prefill.num_bytes() == 2 * 8 * (160 + 8 + 96) + 4 * 3 * 4 * 24 * 16 + 4 * 8
    assert prefill.num_flops() == 8 * (2 * 2 * (64 * 16) * 2 + 4 * (3 * 2 * 16 * 24 + 2 * 2 * 64 * 24))
    verify = GatedDelta(Mode.VERIFY, (3, 3), 2, 4, 16, 24, state=torch.bfloat16)
    states, drafts = 2 * 2 * 2 * 4 * 24 * 16, 4 * (32 + 96 + 4) * (4 + 6)
    assert verify.num_bytes(num_replayed=4) == 2 * 6 * 264 + states + drafts + 4 * 8
    assert verify.num_flops(num_replayed=4) == 4 * 16 * 24 * (7 * 6 + 3 * 4)
    batch = GatedDeltaBatch(verify, "replayed", CPU)
    assert batch.num_bytes() == verify.num_bytes(int(batch.accepted.sum())) > verify.num_bytes()


def test_kda() -> None:
    # 8 tokens of 2*4*16 + 4*24 channels, 4*16 decays, 4 gates and 96 outputs; weights of 4 heads and of 64 channels.
    prefill = Kda(Mode.PREFILL, (5, 3), 4, 4, 16, 24)
    assert prefill.num_bytes() == 2 * 8 * (224 + 68 + 96) + 4 * 3 * 4 * 24 * 16 + 4 * 68
    assert prefill.num_flops() == 8 * 4 * (3 * 2 * 16 * 24 + 2 * 2 * 16 * (16 + 24))
    verify = Kda(Mode.VERIFY, (3, 3), 4, 4, 16, 24)
    assert verify.num_bytes(4) - verify.num_bytes() == 4 * 4 * (64 + 96 + 64)
    assert verify.num_flops(num_replayed=4) == 4 * 16 * 24 * (7 * 6 + 3 * 4)


def test_mixer_adds_gate_lines_weights_and_norm() -> None:
    shape = GatedDelta(Mode.DECODE, (1, 1), 2, 4, 16, 24)
    mixer = Mixer(shape, "mixer", CPU)
    # 2 rows of z, their lines of 3 columns read and written; 4 taps; a norm of 24 floats.
    assert mixer.num_bytes() == shape.num_bytes() + 2 * (2 * 96 + 2 * 2 * 3 * 160 + 4 * 160) + 4 * 24
    assert mixer.num_flops() == shape.num_flops() + 2 * 4 * 2 * 160


def test_mamba1() -> None:
    # A decode of one row: x, B, C, dt, z, y of 2 bytes; the state of 4 bytes in and out; A_log, D, dt_bias.
    shape = Mamba1(Mode.DECODE, (1,))
    state = 8192 * 16
    assert shape.num_bytes() == 2 * (4 * 8192 + 2 * 16) + 2 * 4 * state + 18 * 8192 * 4
    assert shape.num_flops() == 6 * state
    verify = Mamba1(Mode.VERIFY, (5,))
    assert verify.num_bytes(3) - verify.num_bytes() == 3 * (16 + 2 * 8192) * 4
    assert verify.num_flops(3) == (30 + 12) * state


def test_mamba2() -> None:
    # A decode of one row: x, B, C, dt, y of 2 bytes; the state of 4 bytes in and out; A_log, D, dt_bias.
    shape = Mamba2(Mode.DECODE, (1,))
    state = 128 * 64 * 128
    assert shape.num_bytes() == 2 * (8192 + 2 * 1024 + 128 + 8192) + 2 * 4 * state + 3 * 128 * 4
    assert shape.num_flops() == 5 * state
    verify = Mamba2(Mode.VERIFY, (5,))
    assert verify.num_bytes(3) - verify.num_bytes() == 3 * (1024 + 8192 + 128) * 4
    assert verify.num_flops(3) == (25 + 9) * state
    prefill = Mamba2(Mode.PREFILL, (64,))
    assert prefill.num_flops() == 64 * (8 * 2 * 64 * 128 + 128 * (4 * 64 * 128 + 2 * 64 * 64))


def test_conv1d() -> None:
    prefill = Conv1d(Mode.PREFILL, (5, 7), 8, 4, torch.bfloat16)  # the second row reads a history; both write one
    assert prefill.num_bytes() == 2 * 8 * (12 + 12 + 4 + 1 + 3 + 6)
    verify = Conv1d(Mode.VERIFY, (4, 4), 8, 4, torch.float32)
    assert verify.num_bytes() == 4 * 8 * (8 + 8 + 4 + 1 + 2 * 3 + 2 * 6)
    assert verify.num_flops() == 2 * 4 * 8 * 8


def test_lora() -> None:
    # 20 tokens of 24 inputs and 2 x 27 outputs; 13 ranks of 3 x 24 inputs and 27 outputs; 7, 7 and 6 tokens of each.
    slices = Lora(20, 24, (16, 8, 3), (4, 1, 8), 8, torch.float32)
    assert slices.num_bytes() == 4 * (20 * (24 + 2 * 27) + 13 * (3 * 24 + 27))
    assert slices.num_flops() == 2 * (7 * 4 + 7 * 1 + 6 * 8) * (3 * 24 + 27)
    base = Lora(5, 24, (40,), (), 4, torch.float32)
    assert (base.num_bytes(), base.num_flops()) == (0, 0)


def test_mhc() -> None:
    # 10 tokens of 3 streams of 24 channels; 3 + 9 gates of a token and 15 products.
    post, pre, both, head = (Mhc(work, 10, 24, 3, torch.float32) for work in (POST, PRE, FUSED, HEAD))
    gates, weight = 4 * 10 * 12, 4 * 15 * 72
    assert post.num_bytes() == 4 * 10 * 24 * 7 + gates
    assert pre.num_bytes() == 4 * 10 * 24 * 4 + gates + weight
    assert both.num_bytes() == 4 * 10 * 24 * 8 + 2 * gates + weight + 4 * 24
    assert head.num_bytes() == 4 * 10 * 24 * 4 + 4 * 3 * 72
    assert both.num_flops() == post.num_flops() + pre.num_flops() > head.num_flops() > 0


@pytest.mark.parametrize(("window", "seen"), [(None, 107), (10, 11 + 7)], ids=["all", "window"])
def test_attention(window: int | None, seen: int) -> None:
    shape = Attention((100, 7), 2, 4, 2, 32, window=window)
    # Keys and values that are seen, 4 tokens of queries and outputs, 2 bytes each.
    assert shape.num_bytes() == (2 * seen * 2 * 32 + 2 * 4 * 4 * 32) * 2
    assert shape.num_flops() == 4 * seen * 2 * 4 * 32


def test_attention_to_latents() -> None:
    """Of latents the values are not counted again, and outputs are as wide as these."""
    shape = Attention((100, 7), 2, 4, 1, 48, value_dim=32)
    assert shape.num_bytes() == (107 * 48 + 4 * 4 * (48 + 32)) * 2
    assert shape.num_flops() == 2 * 107 * 2 * 4 * (48 + 32)


def test_attention_of_a_prefill() -> None:
    """The last token of a row sees all of its keys, the first one 30 of 49."""
    shape = Attention((49, 49), 20, 4, 2, 32)
    assert shape.num_flops() == 4 * 2 * sum(range(30, 50)) * 4 * 32


def test_moe() -> None:
    # 3 tokens of 8 channels in and out, 7 logits each; 2 of 6 experts and a shared one, of 3 x 8 x 4 weights.
    shape = Moe(3, 6, 2, 8, 4)
    batch = MoeBatch(shape, "touched", CPU)
    touched = len(set(batch.routes[1].flatten().tolist()))
    assert batch.num_bytes() == 2 * (2 * 3 * 8) + 4 * 3 * 7 + 2 * touched * 96
    assert batch.num_flops() == 2 * 3 * 3 * 96
