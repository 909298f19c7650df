"""The command from arguments to files and exit status, with a timer that needs no device."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rigs.fake_timer import FakeTimer

from deltaline_bench import ceilings, cuda_timer, device
from deltaline_bench.__main__ import SUITES, main
from deltaline_bench.bar import at_most_us
from deltaline_bench.case import Suite
from deltaline_bench.ceilings import Ceilings
from deltaline_bench.conv1d import cases as conv1d
from deltaline_bench.conv1d.batch import Shape
from deltaline_bench.family import Row
from deltaline_bench.lines import Mode
from deltaline_bench.record import RunRecord

SHAPE = Shape(Mode.DECODE, (1,), channels=5, dtype=torch.float32)
ROWS = (Row("quick", "", SHAPE, (at_most_us(5),)), Row("slow", "", SHAPE, (at_most_us(4),)))


@pytest.fixture
def device_for_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command believe in a device; its tensors are on the CPU, and every run takes 5 us."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "describe_device", lambda _: {"name": "NVIDIA Fake 1"})
    monkeypatch.setattr(cuda_timer, "CudaTimer", lambda: FakeTimer(5.0))
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *_: Ceilings(4.0, 1e12, 1e12))
    on_cpu = {
        name: lambda _, peers, make=make: make(torch.device("cpu"), peers)
        for name, make in conv1d.FAMILY.cases(ROWS).items()
    }
    monkeypatch.setattr(conv1d, "SUITE", Suite("conv1d", on_cpu))


@pytest.mark.usefixtures("device_for_the_command")
@pytest.mark.parametrize(
    ("arguments", "status", "names"),
    [
        (["--case", "quick"], 0, ["quick"]),
        ([], 1, ["quick", "slow"]),
    ],
    ids=["met", "missed"],
)
def test_run_is_written_and_judged(tmp_path: Path, arguments: list[str], status: int, names: list[str]) -> None:
    assert main(["conv1d", "--rounds", "2", "--output", str(tmp_path / "new"), *arguments]) == status
    partial = "" if len(names) == 2 else "-partial"
    (path,) = (tmp_path / "new").glob(f"*-fake-1-conv1d{partial}.json")
    run = RunRecord.from_json(path.read_text(encoding="utf-8"))
    assert [case.name for case in run.cases] == names
    assert (run.rounds, run.floor_us) == (2, 4.0)
    assert path.with_suffix(".md").read_text(encoding="utf-8").startswith("# conv1d, NVIDIA Fake 1, ")


@pytest.mark.usefixtures("device_for_the_command")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "none"], "--case: expected names among quick, slow; got none"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--peers", "nowhere"], "--peers: expected a directory with peer_loader.py"),
    ],
    ids=["case", "rounds", "peers"],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conv1d", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_measuring_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["conv1d"]) == 2
    assert capsys.readouterr().err == "deltaline_bench: needs a CUDA device; torch finds none\n"


def test_all_measures_every_suite_and_returns_the_worst_status(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        told.append(command[3:])
        return SimpleNamespace(returncode=[0, 1, 0][len(told) % 3])

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["all", "--output", "all", "--rounds", "7"]) == 1
    assert told == [[suite, "--output", "all", "--rounds", "7"] for suite in SUITES]


def test_every_suite_of_the_program_is_a_command() -> None:
    root = Path(device.__file__).parent
    assert {path.parent.name for path in root.glob("*/cases.py")} == set(SUITES)
