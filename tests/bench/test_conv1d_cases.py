"""The convolution's cases on small shapes: bytes counted by hand, and our side agrees with the bench's own truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.fakes import FakeTimer

from deltaline_bench.__main__ import main
from deltaline_bench.conv1d.batch import Mode, Shape
from deltaline_bench.conv1d.cases import SUITE, Row
from deltaline_bench.measurement import measure_case
from deltaline_bench.peers import PeerMissing, Peers
from deltaline_bench.record import RunRecord, Status

SMALL = [
    Row("prefill", "rows around the history", Mode.PREFILL, [1, 2, 3, 9, 17, 1], channels=37, dtype=torch.float32),
    Row("update", "one token", Mode.UPDATE, [1] * 5, channels=37, dtype=torch.float32),
    Row("verify", "four tokens", Mode.VERIFY, [4] * 5, channels=37, dtype=torch.float32),
    Row("two taps", "a short history", Mode.PREFILL, [3, 4], channels=37, width=2, dtype=torch.float32),
]


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_our_side_agrees_with_the_truth_of_the_bench(row: Row) -> None:
    case = measure_case(row(torch.device("cpu"), Peers()), FakeTimer(1.0), copy_bytes_per_s=1e12, rounds=1)
    assert case.judged.status is Status.RIGHT, case.judged


def test_least_bytes_are_counted() -> None:
    prefill = Shape(Mode.PREFILL, (5, 7), 8, 4, torch.bfloat16)  # the second row reads a history; both write one
    assert prefill.num_bytes() == 2 * 8 * (12 + 12 + 4 + 1 + 3 + 6)
    verify = Shape(Mode.VERIFY, (4, 4), 8, 4, torch.float32)
    assert verify.num_bytes() == 4 * 8 * (8 + 8 + 4 + 1 + 2 * 3 + 2 * 6)
    assert verify.num_flops() == 2 * 4 * 8 * 8


def test_same_name_gives_the_same_inputs() -> None:
    first, second = (SMALL[2](torch.device("cpu"), Peers()).expected for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_cases_have_their_own_names() -> None:
    assert all(name == case.name for name, case in SUITE.cases.items() if isinstance(case, Row))
    assert {"prefill-8x2048", "prefill-ragged", "update-1024", "verify-256"} <= set(SUITE.cases)


def test_peers_that_are_not_there_say_so() -> None:
    peers = Peers()
    with pytest.raises(PeerMissing, match="not installed"):
        peers.load("deltaline_no_such_peer.ops", "function")


def test_directory_of_peers_must_have_its_loader(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"peer_loader\.py"):
        Peers(tmp_path)


@pytest.mark.gpu
def test_suite_runs_end_to_end(tmp_path: Path) -> None:
    assert main(["conv1d", "--case", "update-1", "--rounds", "3", "--output", str(tmp_path)]) in (0, 1)
    (path,) = tmp_path.glob("*-conv1d-partial.json")
    (case,) = RunRecord.from_json(path.read_text(encoding="utf-8")).cases
    assert case.judged.status is Status.RIGHT, case.judged
    assert case.judged.is_captured
