"""The service bench judges: made-up figures go through its bars, and its raw bytes are those of the contract."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import service

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_bench.service import decode, echo, memory, mixed, prefill, soak, steady, throughput
from deltaline_bench.service.engine_loop import rows_per_second
from deltaline_bench.service.figure import Bar, Figure, missed, write_table
from deltaline_bench.service.host import Host
from deltaline_bench.service.raw import DecodeStream, RawStream, Times
from deltaline_bench.service.size import H200, SIZES, SMALL

US = 1e-6
HOST: Any = None


def names(figures: Sequence[Figure]) -> list[str]:
    return [figure.name for figure in missed(figures)]


def steps(total_us: float, compute_us: float = 500.0, slowest_us: float | None = None) -> list[Times]:
    """100 steps of which two are slow, 20 us in each stage besides the computation."""
    totals = [total_us] * 98 + [total_us if slowest_us is None else slowest_us] * 2
    return [Times(total * US, 20 * US, 20 * US, compute_us * US, 20 * US) for total in totals]


def record(rows_per_s: float) -> dict[str, Any]:
    decode_record = {"rows_per_s": rows_per_s, "ms": {"total": [1.0, 1.0, 1.0]}}
    return {"kinds": {"decode": decode_record}, "device_busy": None, "device_busy_unknown": "no counter"}


@pytest.mark.parametrize(
    ("bar", "value", "is_met"),
    [(Bar(2.0), 2.0, True), (Bar(2.0), 2.1, False), (Bar(2.0, True), 1.9, False), (Bar(2.0), float("nan"), False)],
)
def test_a_bar_is_kept_to_or_not(bar: Bar, value: float, is_met: bool) -> None:
    assert bar.is_met(value) is is_met
    assert Figure("part", "name", value, "us", "raw", bar).is_missed is not is_met


def test_what_has_a_bar_and_no_value_is_missed() -> None:
    assert missed([Figure("part", "a", None, "", "raw", Bar(1.0)), Figure("part", "b", None, "", "raw")])[0].name == "a"


@pytest.mark.parametrize(("value", "code"), [(0.9, 0), (1.1, 1)])
def test_a_planted_miss_exits_with_1(
    value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def running(size: object, folder: Path) -> AsyncIterator[Host]:
        assert size is SMALL
        yield HOST

    async def measured(part: str, measure: object, host: Host) -> list[Figure]:
        assert part == "decode"
        return [Figure(part, "ratio", value, "echoes", "raw", Bar(1.0)), Figure(part, "p50", 5.0, "us", "raw")]

    monkeypatch.setattr(service, "running", running)
    monkeypatch.setattr(service, "measure_part", measured)
    output = tmp_path / "figures.json"
    assert service.main(["--size", "small", "--part", "decode", "--output", str(output)]) == code
    table = capsys.readouterr().out
    assert ("MISSED" in table, "missed: decode, ratio" in table) == (bool(code), bool(code))
    written = json.loads(output.read_text())
    assert written["missed"] == ["decode, ratio"] * code
    assert written["figures"][0]["value"] == value and written["figures"][0]["bar"] == "<= 1"
    assert written["size"]["name"] == "small"


def test_a_run_that_is_cut_short_leaves_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def running(size: object, folder: Path) -> AsyncIterator[Host]:
        yield HOST

    async def first(host: Host) -> list[Figure]:
        return [Figure("decode", "ratio", 0.5, "echoes", "raw", Bar(1.0))]

    async def cut(host: Host) -> list[Figure]:
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "running", running)
    output = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(service.run(SMALL, ["decode", "soak"], {"decode": first, "soak": cut}, output))
    assert "ratio" in capsys.readouterr().out
    assert [figure["name"] for figure in json.loads(output.read_text())["figures"]] == ["ratio"]


async def test_a_part_that_fails_is_a_miss(capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(host: Host) -> list[Figure]:
        raise RuntimeError("the device is gone")

    [figure] = await service.measure_part("soak", fails, HOST)
    assert figure.is_missed and "the device is gone" in figure.note
    assert "the device is gone" in capsys.readouterr().err


def test_tables_line_up_and_say_why_there_is_no_value() -> None:
    figures = [Figure("a", "long name", 12345.6, "us", "raw"), Figure("b", "x", None, "", "client", Bar(1), "why not")]
    lines = write_table(figures).splitlines()
    assert lines[1].index("12,346") + 5 == lines[2].index(" - ") + 1
    assert lines[2].endswith("MISSED  (why not)")


def test_decode_is_held_to_its_bars() -> None:
    echo_s, client_s = [400 * US] * 100, [900 * US] * 100
    assert names(decode.judge(H200, steps(1200), echo_s, client_s)) == []
    assert names(decode.judge(H200, steps(1215), echo_s, client_s)) == ["added by the server, p50"]
    quick_s = [300 * US] * 100
    assert names(decode.judge(H200, steps(1050), quick_s, client_s)) == ["end to end less compute, p50s"]
    slow = decode.judge(H200, steps(1200, slowest_us=3700), echo_s, client_s)
    assert names(slow) == ["end to end, p99"]
    added = {figure.name: figure.value for figure in slow}
    assert added["added by the server, p50"] == pytest.approx(1200 - 560 - 400)
    # A small run is only held to its echoes, and to fewer of them.
    small = decode.judge(SMALL, steps(1101, slowest_us=9000), echo_s, client_s)
    assert names(small) == ["end to end less compute, p50s"]


def test_throughput_is_held_to_the_engine() -> None:
    runs = {"inline": record(10.0), "shared memory": record(86.0)}
    assert names(throughput.judge(H200, runs, (100.0, 0.99))) == []
    runs["shared memory"] = record(84.0)
    assert names(throughput.judge(H200, runs, (100.0, 0.99))) == ["shared memory / the engine alone"]
    assert names(throughput.judge(SMALL, runs, (100.0, 0.99))) == []


def test_prefill_is_held_to_echo_and_copies() -> None:
    assert names(prefill.judge(H200, (1.3, 0.5), (0.74, 0.5), 0.5, 0.1)) == []
    both = ["inline / (echo + compute)", "shared memory / (compute + copies)"]
    assert names(prefill.judge(H200, (1.31, 0.5), (0.76, 0.5), 0.5, 0.1)) == both
    assert names(prefill.judge(H200, (1.2, 0.5), (0.76, 0.5), 0.5, 0.1)) == both[1:]


def test_mixed_load_is_held_to_each_alone() -> None:
    alone_s = [500 * US] * 100
    assert names(mixed.judge(H200, alone_s, [1500 * US] * 100, 1000.0, 701.0)) == []
    assert names(mixed.judge(H200, alone_s, [1501 * US] * 100, 1000.0, 699.0)) == [
        "decode beside prefills, p99",
        "prefills beside decode / alone",
    ]


def test_steady_needs_metrics_that_stand_still() -> None:
    page = {
        memory.COMPILATIONS: 30.0,
        memory.CAPTURES: 12.0,
        memory.ALLOCATIONS: 40.0,
        "deltaline_device_bytes": 1e9,
    }
    assert names(steady.judge(H200, 5, page, dict(page))) == []
    for name, figure in (
        (memory.COMPILATIONS, "compilations"),
        (memory.CAPTURES, "graph captures"),
        (memory.ALLOCATIONS, "device allocations"),
        ("deltaline_device_bytes", "device memory, growth"),
    ):
        assert names(steady.judge(H200, 5, page, page | {name: 2e9})) == [figure]
        bare = {key: value for key, value in page.items() if key != name}
        [missing] = missed(steady.judge(H200, 5, bare, bare))
        assert missing.name == figure and "the server's metrics have no " in missing.note


def test_soak_is_flat_and_does_its_rows() -> None:
    flat: list[float | None] = [1e9, 1.009e9, 0.991e9]
    assert names(soak.judge(H200, 1_000_000, [1000, 1005], flat)) == []
    assert names(soak.judge(H200, 999_999, [1000, 1011], [1e9, 1.02e9])) == [
        "decode rows",
        "resident memory, growth",
        "device memory, growth",
    ]
    assert names(soak.judge(H200, 1_000_000, [1000], [None])) == ["device memory, growth"]
    assert names(soak.judge(replace(H200, soak_s=300.0), 500_000, [1000, 1005], flat)) == []


def test_sizes_are_models_that_the_server_can_read() -> None:
    for size in SIZES.values():
        assert len(size.model()["layer_types"]) == size.layers
        assert size.max_sequences >= size.clients * size.decode_rows
    assert H200.token_bytes == 4096


def test_raw_steps_are_the_contracts() -> None:
    hidden = np.arange(8, dtype=np.float32).reshape(2, 4)
    stream = DecodeStream("unix:/nowhere", 7, [11, 12], hidden)
    stream.next_message()
    message = pb.StepStreamRequest.FromString(stream.next_message())
    step = message.step
    assert (message.correlation_id, step.server_epoch, list(step.sequence)) == (2, 7, [11, 12])
    assert (list(step.step), list(step.position), list(step.accepted)) == ([2, 2], [1, 1], [-1, -1])
    assert list(step.query_start_loc) == [0, 1, 2]
    np.testing.assert_array_equal(wire.decode(step.hidden, limit_bytes=64), hidden)


async def test_the_echo_answers_with_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "echo.sock"
    serving = asyncio.create_task(echo.serve(str(path)))
    while not path.exists():  # noqa: ASYNC110 nothing tells of a file
        await asyncio.sleep(0.01)
    async with RawStream(f"unix:{path}", echo.METHOD) as stream:
        reply, seconds = await asyncio.wait_for(stream.exchange(b"\x00raw"), 10)
    assert reply == b"\x00raw" and 0 < seconds < 10
    assert await prefill._echo(f"unix:{path}", 3 * 2**20 + 1) > 0
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


async def test_the_engine_is_driven_without_a_service(tmp_path: Path) -> None:
    size = replace(SMALL, throughput_s=0.05, hidden=64)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(size.model()))
    rows, busy = await rows_per_second(size, model, 8)
    assert rows > 0 and 0 < busy <= 1
