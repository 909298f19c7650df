"""The command line: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from deltaline.v1 import layer_service_pb2 as layers
from deltaline_client import _cli_demo
from deltaline_client._cli import main
from deltaline_client._cli_text import mebibytes, table
from deltaline_server.errors import Reason


def test_info_tells_what_is_served(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", server.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "server          deltaline 0.1.0 on cpu, epoch 0x4d"
    assert "spans           0: layers 0-1, 1: layers 2-3 (block scope)" in lines
    assert {line[15] for line in lines} == {" "}


def test_load_tells_how_full_it_is(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", server.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["state", "lines", "0", "16"]
    assert lines[-1] == "0 sequences open"


def test_bench_steps_every_kind_and_closes_what_it_opened(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--clients", "2", "--rows", "3", "--steps", "4", "--prefill", "5", "--drafts", "2"]
    assert main(["bench", server.address, *arguments]) == 0
    out, err = capsys.readouterr()
    kinds = [request.kind[0] for request in server.requests["Step"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        layers.ROW_KIND_PREFILL: 2,
        layers.ROW_KIND_DECODE: 8,
        layers.ROW_KIND_VERIFY: 8,
    }
    assert server.streams == {}
    assert [line.split()[:2] for line in out.splitlines()[1:4]] == [["prefill", "2"], ["decode", "8"], ["verify", "8"]]
    assert out.count("transport") == 3
    assert "decode steps: 8/8" in err


@pytest.mark.parametrize("option", ["clients", "rows", "steps", "prefill", "drafts"])
def test_bench_refuses_sizes_that_make_no_sense(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "127.0.0.1:1", f"--{option}", "-1"]) == 1
    assert f"--{option}" in capsys.readouterr().err


def test_errors_are_one_line(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.refuse("GetLoad", Reason.BUG)
    assert main(["load", server.address]) == 1
    assert capsys.readouterr().err == "deltaline: error: refused: BUG\n"


def test_demo_tells_why_the_server_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    monkeypatch.setattr(_cli_demo, "_EXAMPLES", tmp_path)
    assert main(["demo"]) == 1
    assert "no such model" in capsys.readouterr().err


def test_tables_line_up() -> None:
    assert table([("a", "1"), ("long", "100")], align="<>") == "a       1\nlong  100"
    assert (mebibytes(3 << 19), mebibytes(512)) == ("1.5 MiB", "0.5 KiB")
