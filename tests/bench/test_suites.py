"""Every suite on small shapes: our sides, and the field's where ours has its signature, find the truth of the bench."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.fake_timer import FakeTimer

from deltaline_bench.__main__ import main
from deltaline_bench.attention import cases as attention
from deltaline_bench.attention.shape import Shape as Attention
from deltaline_bench.conv1d import cases as conv1d
from deltaline_bench.conv1d.batch import Shape as Conv1d
from deltaline_bench.family import Family, Row
from deltaline_bench.gated_delta import cases as gated_delta
from deltaline_bench.gated_delta.shape import Inputs
from deltaline_bench.gated_delta.shape import Shape as GatedDelta
from deltaline_bench.kda import cases as kda
from deltaline_bench.kda.shape import Shape as Kda
from deltaline_bench.lines import Mode
from deltaline_bench.lora import cases as lora
from deltaline_bench.lora.batch import Shape as Lora
from deltaline_bench.mamba1 import cases as mamba1
from deltaline_bench.mamba1.shape import Shape as Mamba1
from deltaline_bench.mamba1.sides import MAMBA_SSM, VLLM
from deltaline_bench.mamba2 import cases as mamba2
from deltaline_bench.mamba2.shape import Shape as Mamba2
from deltaline_bench.mamba2.sides import cut_chunks
from deltaline_bench.measurement import measure_case
from deltaline_bench.mhc import cases as mhc
from deltaline_bench.mhc.batch import FUSED, HEAD, POST, PRE
from deltaline_bench.mhc.batch import Shape as Mhc
from deltaline_bench.moe import cases as moe
from deltaline_bench.moe.batch import Shape as Moe
from deltaline_bench.peers import Function, PeerMissing, Peers
from deltaline_bench.record import RunRecord, Status
from deltaline_kernels import compat

CPU = torch.device("cpu")
# Rows around chunks and histories; rows of one length; 5 decodes; 6 verifies.
RAGGED, EVEN, ONES, THREES = (3, 70, 1, 64, 130, 3), (9, 9, 9), (1,) * 5, (3,) * 6
FLOAT = torch.float32


class OurPeers(Peers):
    """Peers whose functions are ours of the same names."""

    def load(self, module: str, name: str) -> Function:
        scans = {
            "vllm": "selective_scan_varlen",
            "mamba_ssm": "selective_scan_fn",
            "selective_scan_cuda": "selective_scan_fn",
        }
        if "selective_scan" in f"{module}.{name}":
            name = scans[module.partition(".")[0]]
        function = getattr(compat, name.removeprefix("_"), None)
        if function is None:
            raise PeerMissing("not installed")

        def call(*arguments: Any, **told: Any) -> Any:
            told.pop("dst_state_batch_indices", None)  # ours writes where it reads
            return function(*arguments, **told)

        return call


def delta(mode: Mode, lengths: tuple[int, ...], **sizes: Any) -> GatedDelta:
    return GatedDelta(mode, lengths, 2, 4, 16, 24, **{"dtype": FLOAT, **sizes})


def keyed(mode: Mode, lengths: tuple[int, ...], **sizes: Any) -> Kda:
    return Kda(mode, lengths, **{"num_key_heads": 4, "num_value_heads": 4, "key_dim": 16, "value_dim": 24, **sizes})


def scan(mode: Mode, lengths: tuple[int, ...], **sizes: Any) -> Mamba1:
    return Mamba1(mode, lengths, **{"key_dim": 6, "value_dim": 20, "dtype": FLOAT, **sizes})


def ssd(mode: Mode, lengths: tuple[int, ...], **sizes: Any) -> Mamba2:
    return Mamba2(mode, lengths, 2, 4, 24, 16, FLOAT, **sizes)


def conv(mode: Mode, lengths: tuple[int, ...], width: int = 4, split: tuple[int, ...] | None = None) -> Conv1d:
    return Conv1d(mode, lengths, 37, width, FLOAT, split)


def pages(lengths: tuple[int, ...], **sizes: Any) -> Attention:
    return Attention(lengths, num_queries=4, num_keys=2, dim=32, page_size=16, dtype=FLOAT, **sizes)


def latents(lengths: tuple[int, ...], **sizes: Any) -> Attention:
    return replace(pages(lengths, **sizes), num_keys=1, dim=48, value_dim=32, scale=0.2)


RULE, MIXER = gated_delta.RULE, gated_delta.MIXER
HARD = Inputs(0.95, (1e-5, 1e-4), 4.0)
DECODES, SSD_DECODES = delta(Mode.DECODE, (1,) * 6), ssd(Mode.DECODE, (1,) * 6)
# The family and shape of a case; the peers that are right when ours stand in for them; the shape beside it.
SMALL: dict[str, tuple[Family[Any, Any], Any, set[str]]] = {
    "gated_delta prefill": (RULE, delta(Mode.PREFILL, RAGGED), {"vLLM"}),
    "gated_delta keys alike": (RULE, delta(Mode.PREFILL, RAGGED, inputs=HARD), {"vLLM"}),
    "gated_delta decode": (RULE, delta(Mode.DECODE, ONES), {"SGLang"}),
    "gated_delta decode bf16 state": (RULE, delta(Mode.DECODE, ONES, state=torch.bfloat16), {"SGLang"}),
    "gated_delta verify": (RULE, delta(Mode.VERIFY, THREES), {"decode"}),
    "gated_delta mixer": (MIXER, delta(Mode.DECODE, ONES), {gated_delta.DECODE}),
    "gated_delta mixer bf16": (MIXER, delta(Mode.DECODE, ONES, dtype=torch.bfloat16), {gated_delta.DECODE}),
    "kda prefill": (kda.FAMILY, keyed(Mode.PREFILL, RAGGED, dtype=FLOAT), {"fla"}),
    "kda prefill of groups": (
        kda.FAMILY,
        keyed(Mode.PREFILL, EVEN, dtype=FLOAT, num_key_heads=2, lower_bound=None),
        {"fla"},
    ),
    "kda decode": (kda.FAMILY, keyed(Mode.DECODE, ONES, dtype=FLOAT), {"fla", "SGLang"}),
    "kda decode bf16 state": (kda.FAMILY, keyed(Mode.DECODE, ONES, dtype=FLOAT, state=torch.bfloat16), {"SGLang"}),
    "kda verify": (kda.FAMILY, keyed(Mode.VERIFY, THREES, dtype=FLOAT), {"decode"}),
    "mamba1 prefill": (mamba1.FAMILY, scan(Mode.PREFILL, RAGGED), {"vLLM", "vLLM, tokens contiguous"}),
    "mamba1 prefill of even rows": (
        mamba1.FAMILY,
        scan(Mode.PREFILL, EVEN),
        {"vLLM", "vLLM, tokens contiguous", "mamba-ssm"},
    ),
    "mamba1 decode": (mamba1.FAMILY, scan(Mode.DECODE, ONES), {"vLLM"}),
    "mamba1 verify": (mamba1.FAMILY, scan(Mode.VERIFY, THREES), {"vLLM", "decode"}),
    "mamba2 prefill": (mamba2.FAMILY, ssd(Mode.PREFILL, RAGGED), {"vLLM, chunks of 128", "vLLM, chunks of 256"}),
    "mamba2 decode": (mamba2.FAMILY, ssd(Mode.DECODE, ONES), {"vLLM", "SGLang"}),
    "mamba2 verify": (mamba2.FAMILY, ssd(Mode.VERIFY, THREES), {"vLLM", "decode"}),
    "conv1d prefill": (conv1d.FAMILY, conv(Mode.PREFILL, RAGGED), {"vLLM"}),
    "conv1d prefill split": (conv1d.FAMILY, conv(Mode.PREFILL, EVEN, 2, (30, 7)), {"vLLM"}),
    "conv1d update": (conv1d.FAMILY, conv(Mode.DECODE, ONES), {"vLLM", "causal-conv1d"}),
    "conv1d verify": (conv1d.FAMILY, conv(Mode.VERIFY, THREES), {"vLLM"}),
    "gated_delta waypoints": (RULE, delta(Mode.PREFILL, (200, 64, 300), waypoints=64), {"vLLM", "plain"}),
    "mamba1 waypoints": (mamba1.FAMILY, scan(Mode.PREFILL, (200, 64, 300), waypoints=128), {"plain"}),
    "mamba2 waypoints": (mamba2.FAMILY, ssd(Mode.PREFILL, (200, 64, 300), waypoints=128), {"plain"}),
    "conv1d waypoints": (conv1d.FAMILY, replace(conv(Mode.PREFILL, (200, 300)), waypoints=64), {"vLLM", "plain"}),
    "lora slices": (lora.FAMILY, Lora(20, 24, (16, 8, 3), (4, 1, 8), 8, FLOAT), {"vLLM"}),
    "lora prefill": (lora.FAMILY, Lora(300, 24, (40,), (4, 8), 8, FLOAT), {"vLLM"}),
    "lora base": (lora.FAMILY, Lora(5, 24, (40,), (), 4, FLOAT), {"vLLM"}),
    "mhc post": (mhc.FAMILY, Mhc(POST, 270, 24, 4, FLOAT), {"FlagGems"}),
    "mhc pre": (mhc.FAMILY, Mhc(PRE, 5, 24, 4, FLOAT), {"FlagGems"}),
    "mhc fused": (mhc.FAMILY, Mhc(FUSED, 5, 24, 3, FLOAT), set()),
    "mhc head": (mhc.FAMILY, Mhc(HEAD, 5, 24, 3, FLOAT), set()),
    "moe gated": (moe.FAMILY, Moe(9, 6, 2, 24, 16, dtype=FLOAT), {"vLLM"}),
    "moe groups": (moe.FAMILY, Moe(5, 12, 3, 24, 16, 2, (4, 2), True, False, 2.5, FLOAT), {"vLLM"}),
    "attention ragged": (attention.FAMILY, pages((1, 130, 65, 64)), set()),
    "attention verify": (attention.FAMILY, pages((70, 70), tokens=3, soft_cap=2.0), set()),
    "attention window": (attention.FAMILY, pages((200, 50), window=20, tokens=2), {"decode"}),
    "attention prefill": (attention.FAMILY, pages((96, 96), tokens=96), {"SDPA"}),
    "attention prefill behind": (attention.FAMILY, pages((96, 96), tokens=20), set()),
    "attention latent": (attention.FAMILY, latents((1, 130, 65, 64)), set()),
    "attention latent of one length": (attention.FAMILY, latents((96, 96)), {"SDPA"}),
    "attention latent verify": (attention.FAMILY, latents((70, 70), tokens=3), set()),
    "attention plain": (attention.FAMILY, pages((96, 96), is_causal=False), {"SDPA"}),
}
BESIDE = {
    "gated_delta verify": DECODES,
    "kda verify": keyed(Mode.DECODE, (1,) * 6, dtype=FLOAT),
    "mamba1 verify": scan(Mode.DECODE, (1,) * 6),
    "mamba2 verify": SSD_DECODES,
    "attention window": pages((20, 20)),
    "gated_delta waypoints": delta(Mode.PREFILL, (200,)),
    "mamba1 waypoints": scan(Mode.PREFILL, (200,)),
    "mamba2 waypoints": ssd(Mode.PREFILL, (200,)),
    "conv1d waypoints": conv(Mode.PREFILL, (200,)),
}


@pytest.mark.parametrize("name", SMALL)
def test_sides_find_the_truth_of_the_bench(name: str) -> None:
    family, shape, peers = SMALL[name]
    beside = ("plain" if "waypoints" in name else "decode", BESIDE[name]) if name in BESIDE else None
    narrow = shape.dtype is not FLOAT or getattr(shape, "state", FLOAT) is not FLOAT
    row = Row(name, "", shape, beside=beside, max_error=1e-2 if narrow else 1e-5)
    case = family.make(row, CPU, OurPeers())
    # PyTorch's compiled side takes a compiler.
    case = replace(case, peers={key: make for key, make in case.peers.items() if key != "flex_attention"})
    record = measure_case(case, FakeTimer(1.0), copy_bytes_per_s=1e12, rounds=1)
    statuses = {side.name: side.status for side in record.sides}
    assert record.judged.status is Status.RIGHT, record.judged
    assert not record.failures(), record.sides
    assert {side: statuses[side] for side in peers} == dict.fromkeys(peers, Status.RIGHT)
    assert Status.WRONG not in statuses.values()


def test_verify_starts_from_some_but_not_all_drafts() -> None:
    batch = RULE.batch(delta(Mode.VERIFY, THREES), "accepted", CPU)
    assert set(batch.accepted.tolist()) == {1, 2, 3}
    again = RULE.batch(delta(Mode.VERIFY, THREES), "accepted", CPU)
    assert torch.equal(batch.states, again.states) and torch.equal(batch.accepted, again.accepted)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_chunks_of_kdas_truth_are_its_tokens_one_by_one(lower_bound: float | None) -> None:
    """Also where channels forget all that there was."""
    shape = keyed(Mode.PREFILL, EVEN, num_key_heads=2, lower_bound=lower_bound)
    batch = kda.FAMILY.batch(shape, "chunks", CPU)
    qkv, a, b = batch.draw(3 * 45)
    for width in (1, 30):
        tokens = batch.read((qkv, a * width, b)).map(lambda x: x.unflatten(0, (3, 45)))
        states = batch.states.double()
        o, after = tokens.advance(states)
        walked = tokens.walk(states)
        torch.testing.assert_close(o.float(), walked["o"])
        torch.testing.assert_close(after.float(), walked["token_states"][:, -1])


@pytest.mark.parametrize(
    "name",
    ["gated_delta prefill", "gated_delta verify", "kda verify", "mamba1 verify", "mamba2 prefill", "mamba2 verify"],
)
def test_what_no_row_may_read_is_not_a_number(name: str) -> None:
    family, shape, _ = SMALL[name]
    batch = family.batch(shape, "poison", CPU)
    read = torch.zeros(batch.num_lines, dtype=torch.bool)
    read[batch.line_index[batch.continues]] = True
    state = batch.new_state()
    assert state[~read].isnan().all() and not state[read].isnan().any()
    state.zero_()
    batch.reset_state(state)
    assert torch.equal(state[batch.line_index].isnan().flatten(1).any(1), ~batch.continues)


@pytest.mark.parametrize(("side", "module"), [("vLLM", VLLM), ("mamba-ssm", MAMBA_SSM)])
def test_a_scan_whose_kernel_is_not_there_is_missing(
    side: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader of sources puts stand-ins, which do nothing, in the place of what is compiled."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "peer_loader.py").write_text(
        "import sys, types\n"
        "def install(directory):\n"
        "    sys.path.insert(0, directory)\n"
        "    for name in ('vllm._custom_ops', 'selective_scan_cuda'):\n"
        "        stub = sys.modules[name] = types.ModuleType(name)\n"
        "        stub.selective_scan_fwd = stub.fwd = lambda *_: None\n"
    )
    ops = tmp_path.joinpath(*module.split(".")[:-1])
    ops.mkdir(parents=True)
    ops.joinpath(module.rpartition(".")[2] + ".py").write_text(
        "def selective_scan_fn(*inputs):\n    return inputs[7]\n"
    )
    batch = mamba1.FAMILY.batch(scan(Mode.PREFILL, (5,)), "stand-in", CPU)
    with pytest.raises(PeerMissing, match="not installed"):
        mamba1.FAMILY.peers(batch, Peers(tmp_path))[side]()


def test_chunks_of_a_peer_end_with_rows_and_at_multiples_of_their_length() -> None:
    borders, rows, last = cut_chunks([0, 3, 73, 128, 300], 64)
    assert borders == [0, 3, 64, 73, 128, 192, 256, 300]
    assert rows == [0, 1, 1, 2, 3, 3, 3]
    assert last == [0, 2, 3, 6]


def test_adapters_of_a_prefill_have_neighbouring_tokens() -> None:
    assert [SMALL["lora prefill"][1].slot(token) for token in (0, 149, 150, 299)] == [0, 0, 1, 1]
    assert [SMALL["lora slices"][1].slot(token) for token in range(4)] == [0, 1, 2, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("suite", "cases"),
    {
        "attention": ["decode-1x32768"],
        "conv1d": ["update-1"],
        "gated_delta": ["decode-1", "verify-64"],
        "kda": ["decode-1", "verify-64"],
        "lora": ["r16-1-of-1", "base-64"],
        "mamba1": ["decode-1", "verify-64"],
        "mamba2": ["decode-1", "verify-64"],
        "mhc": ["pre-1x4096", "fused-64x4096"],
        "moe": ["35b-a3b-1", "35b-a3b-64", "deepseek-v3-1"],
    }.items(),
)
def test_suite_runs_end_to_end(suite: str, cases: list[str], tmp_path: Path) -> None:
    told = [word for case in cases for word in ("--case", case)]
    assert main([suite, *told, "--rounds", "3", "--output", str(tmp_path)]) in (0, 1)
    (path,) = tmp_path.glob(f"*-{suite}-partial.json")
    for case in RunRecord.from_json(path.read_text(encoding="utf-8")).cases:
        assert case.judged.status is Status.RIGHT, case.judged
        assert case.judged.is_captured
