"""The service bench judges: made-up figures go through its bars, and its raw bytes are those of the contract."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import service

from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb
from deltaline_bench.service import decode, echo, memory, mixed, prefill, pretending, soak, steady, throughput, tls
from deltaline_bench.service.engine_loop import rows_per_second
from deltaline_bench.service.figure import Bar, Figure, missed, write_table
from deltaline_bench.service.host import Host
from deltaline_bench.service.raw import DecodeSteps, RawCalls, measured, window
from deltaline_bench.service.size import CPU, H200, SMALL
from deltaline_cli.bench.options import BenchOptions
from deltaline_cli.bench.report import Report
from deltaline_cli.bench.samples import Sample, Samples, sample
from deltaline_cli.bench.verdict import Verdict
from deltaline_server.batch import StepBatch
from deltaline_server.front.trust.tls import Tls

US = 1e-6
HOST: Any = None


def names(figures: Sequence[Figure]) -> list[str]:
    return [figure.name for figure in missed(figures)]


def values(figures: Sequence[Figure]) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures}


def steps(total_us: float, compute_us: float = 500.0, slowest_us: float | None = None) -> Samples:
    """100 steps of which two are slow, 20 us in each stage besides the computation."""
    totals = [total_us] * 98 + [total_us if slowest_us is None else slowest_us] * 2
    stages = (20 * US, 20 * US, compute_us * US, 20 * US)
    return window([sample("decode", 64, 0.0, total * US, stages) for total in totals])


def echoes(total_us: float) -> Samples:
    return window([sample("decode", 0, 0.0, total_us * US)] * 100)


def report(rows_per_s: int) -> Report:
    """Decode steps of one row through a second."""
    samples = Samples.of([sample("decode", 1, 0.5, 0.6)] * rows_per_s, 0.0, 1.0, [], 0.0)
    options = BenchOptions(rows=1)
    info: Any = None
    return Report(options, info, samples, Verdict.of(samples, options), "no counter")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is started."""

    @asynccontextmanager
    async def nothing(
        size: object, folder: Path, server_module: str, *, has_link: bool, front_ends: int
    ) -> AsyncIterator[Host]:
        assert size is SMALL and not has_link and not front_ends
        yield HOST

    monkeypatch.setattr(service, "running", nothing)


@pytest.mark.parametrize(
    ("bar", "value", "is_met"),
    [(Bar(2.0), 2.0, True), (Bar(2.0), 2.1, False), (Bar(2.0, True), 1.9, False), (Bar(2.0), float("nan"), False)],
)
def test_a_bar_is_kept_to_or_not(bar: Bar, value: float, is_met: bool) -> None:
    assert Figure("part", "name", value, "us", "raw", bar).is_missed is not is_met


def test_what_has_a_bar_and_no_value_is_missed() -> None:
    figures = [Figure("part", "a", None, "", "raw", Bar(1.0), "why not"), Figure("part", "b", None, "", "raw")]
    assert names(figures) == ["a"]
    assert write_table(figures).splitlines()[1].endswith("-        raw      <= 1  MISSED  (why not)")


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize(("value", "code"), [(0.9, 0), (1.1, 1)])
def test_a_planted_miss_exits_with_1(
    value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(part: str, measure: object, host: Host) -> list[Figure]:
        return [Figure(part, "ratio", value, "echoes", "raw", Bar(1.0)), Figure(part, "p50", 5.0, "us", "raw")]

    monkeypatch.setattr(service, "measure_part", measured)
    output = tmp_path / "figures.json"
    assert service.main(["--size", "small", "--part", "decode", "--output", str(output)]) == code
    assert ("missed: decode, ratio" in capsys.readouterr().out) == bool(code)
    written = json.loads(output.read_text())
    assert written["missed"] == ["decode, ratio"] * code
    assert written["figures"][0]["value"] == value and written["figures"][0]["bar"] == "<= 1"
    assert written["size"]["name"] == "small"


@pytest.mark.usefixtures("running")
def test_a_run_that_is_cut_short_leaves_what_it_had(tmp_path: Path) -> None:
    async def first(host: Host) -> list[Figure]:
        return [Figure("decode", "ratio", 0.5, "echoes", "raw", Bar(1.0))]

    async def cut(host: Host) -> list[Figure]:
        raise KeyboardInterrupt

    output = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(service.run(SMALL, ["decode", "soak"], {"decode": first, "soak": cut}, output))
    assert [figure["name"] for figure in json.loads(output.read_text())["figures"]] == ["ratio"]


async def test_a_part_that_fails_is_a_miss() -> None:
    async def fails(host: Host) -> list[Figure]:
        raise RuntimeError("the device is gone")

    [figure] = await service.measure_part("soak", fails, HOST)
    assert figure.is_missed and "the device is gone" in figure.note


def test_decode_is_held_to_its_bars() -> None:
    def judged(samples: Samples, echo_us: float = 400, size: Any = H200) -> list[Figure]:
        return decode.judge(size, "stream", samples, echoes(echo_us), None)

    assert names(judged(steps(1139))) == []
    assert names(judged(steps(1715), 900)) == ["stream, added by the server, p50"]
    assert names(judged(steps(1000), 300)) == ["stream, end to end less compute, p50"]
    slow = judged(steps(1139, slowest_us=3700))
    assert names(slow) == ["stream, end to end, p99"]
    assert values(slow)["stream, added by the server, p50"] == pytest.approx(1139 - 560 - 400)
    # Others are only held to their echoes, and to fewer of them.
    assert names(judged(steps(1101, slowest_us=9000), size=SMALL)) == ["stream, end to end less compute, p50"]
    around = decode.judge(CPU, "unary", steps(1200), echoes(400), steps(1000))
    assert values(around)["unary, the same, the echo around the same layer"] == pytest.approx(700 / 500)


def test_the_link_is_held_to_its_bars() -> None:
    assert names(decode.judge_link(H200, steps(950, slowest_us=1900), echoes(410))) == []
    assert names(decode.judge_link(H200, steps(951, slowest_us=1903), echoes(400))) == [
        "link, end to end, p99",
        "link, end to end less compute, p50",
        "link, less compute beside it",
    ]
    assert names(decode.judge_link(SMALL, steps(951, slowest_us=1903), echoes(410))) == []


def test_the_client_is_held_to_what_it_adds_to_raw_steps() -> None:
    assert names(decode.judge_beside_raw(H200, steps(1000), steps(1150), steps(1300), steps(1150))) == []
    slow = decode.judge_beside_raw(H200, steps(1000), steps(1151), steps(1300), steps(1152))
    assert names(slow) == ["added by the Python client, p50", "the same, the client for threads, p50"]
    assert list(values(slow).values()) == pytest.approx([151, 300, 152])
    assert names(decode.judge_beside_raw(SMALL, steps(1000), steps(1151), steps(1300), steps(1151))) == []


def test_throughput_is_held_to_the_engine() -> None:
    engine = (100.0, 0.99)
    runs = {"inline": report(70), "shared memory": report(89)}
    assert names(throughput.judge(H200, runs, engine, by_link=False)) == []
    assert names(throughput.judge(H200, runs, engine, by_link=True)) == ["shared memory / the engine alone"]
    runs = {"inline": report(69), "shared memory": report(90)}
    assert names(throughput.judge(H200, runs, engine, by_link=False)) == ["inline / the engine alone"]
    assert names(throughput.judge(H200, runs, engine, by_link=True)) == []
    assert names(throughput.judge(SMALL, runs, engine, by_link=False)) == []


def test_prefill_is_held_to_echo_and_copies() -> None:
    assert names(prefill.judge(H200, (1.25, 0.5), (0.74, 0.5), 0.5, 0.1, by_link=False)) == []
    both = ["inline / (echo + compute)", "shared memory / (compute + copies)"]
    assert names(prefill.judge(H200, (1.26, 0.5), (0.76, 0.5), 0.5, 0.1, by_link=False)) == both
    assert names(prefill.judge(H200, (1.25, 0.5), (0.65, 0.5), 0.5, 0.1, by_link=True)) == []
    assert names(prefill.judge(H200, (1.25, 0.5), (0.67, 0.5), 0.5, 0.1, by_link=True)) == both[1:]


def test_mixed_load_is_held_to_each_alone() -> None:
    assert names(mixed.judge(H200, steps(500), steps(1400, slowest_us=5200), 1000.0, 801.0)) == []
    assert names(mixed.judge(H200, steps(500), steps(1400, slowest_us=5201), 1000.0, 799.0)) == [
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
    figures = ["compilations", "graph captures", "device allocations", "device memory, growth"]
    assert names(steady.judge(H200, 5, page, page)) == []
    for name, figure in zip(page, figures, strict=True):
        assert names(steady.judge(H200, 5, page, page | {name: 2e9})) == [figure]
        bare = {key: value for key, value in page.items() if key != name}
        [missing] = missed(steady.judge(H200, 5, bare, bare))
        assert missing.name == figure and "the server's metrics have no " in missing.note
    gauges = {"deltaline_device_free_bytes": 5.0, "deltaline_device_used_bytes": 7.0, "deltaline_host_bytes": 9.0}
    assert memory.device_bytes(gauges) == 7.0


def test_soak_is_flat_and_does_its_rows() -> None:
    flat: list[float | None] = [1e9, 1.009e9, 0.991e9]
    assert names(soak.judge(H200, 1_000_000, [1000, 1005], flat)) == []
    assert names(soak.judge(H200, 999_999, [1000, 989], [1e9, 1.02e9])) == [
        "decode rows",
        "resident memory, growth",
        "device memory, growth",
    ]
    assert names(soak.judge(H200, 1_000_000, [1000], [None])) == ["device memory, growth"]
    assert names(soak.judge(replace(H200, soak_s=300.0), 500_000, [1000, 1005], flat)) == []


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_raw_steps_are_the_contracts(way: Literal["unary", "stream"]) -> None:
    hidden = np.arange(8, dtype=np.float32).reshape(2, 4)
    steps = DecodeSteps("unix:/nowhere", way, 7, [11, 12], hidden)
    steps.next_message()
    message = steps.next_message()
    if way == "stream":
        streamed = pb.StepStreamRequest.FromString(message)
        assert streamed.correlation_id == 2
        step = streamed.step
    else:
        step = pb.StepRequest.FromString(message)
    assert (step.server_epoch, list(step.sequence)) == (7, [11, 12])
    assert (list(step.step), list(step.position), list(step.accepted)) == ([2, 2], [1, 1], [-1, -1])
    assert list(step.query_start_loc) == [0, 1, 2]
    np.testing.assert_array_equal(wire.decode(step.hidden, limit_bytes=64), hidden)


async def test_steps_are_made_in_turns_and_a_warm_up_is_left_out() -> None:
    made: list[str] = []

    async def step(name: str) -> Sample:
        made.append(name)
        return sample("decode", 1, 0.0, float(len(made)))

    left, right = await measured(lambda: step("left"), lambda: step("right"), rounds=2, warm_up=1)
    assert made == ["left", "right"] * 3
    assert list(left.stages_s("decode")["total"]) == [3.0, 5.0]
    assert list(right.stages_s("decode")["total"]) == [4.0, 6.0]


@pytest.mark.parametrize("by", ["clock", "processors"])
def test_what_tls_adds_to_a_step_is_held_to_what_it_adds_to_an_echo(by: str) -> None:
    def judged(step_tls_us: float) -> Figure:
        took = {"step": [900.0, 2000, 9000], "step by TLS": [step_tls_us, step_tls_us + 1100, 9000]}
        took |= {"bare echo": [400.0, 900, 800], "bare echo by TLS": [600.0, 1100, 3000]}
        turns = {side: np.array(us) for side, us in took.items()}
        other = turns | {"step by TLS": turns["step"]}
        *_, clock = tls.judge("unary", turns, other)[:5]
        *_, processors = tls.judge("unary", other, turns)
        return {"clock": clock, "processors": processors}[by]

    assert judged(1100).value == pytest.approx(1.0)
    assert not judged(1159).is_missed and judged(1161).is_missed


def test_the_certificate_of_the_bench_is_believed(tmp_path: Path) -> None:
    made = tls.certificate(tmp_path)
    assert made.credentials() and Tls(str(made.cert), str(made.key), None).expires_s > 0


async def test_echoes_answer_with_the_same_bytes_and_tell_of_the_layer(tmp_path: Path) -> None:
    path, model = tmp_path / "echo.sock", tmp_path / "config.json"
    size = replace(CPU, hidden=64, intermediate=64, key_heads=2, value_heads=2, head_dim=16)
    model.write_text(json.dumps(size.model()))
    serving = asyncio.create_task(echo.serve(str(path), model))
    while not path.exists():  # noqa: ASYNC110 nothing tells of a file
        await asyncio.sleep(0.01)
    address, message = f"unix:{path}", b"\x00 a raw message"
    for way in size.ways:
        async with RawCalls(address, way, f"/bare.Echo/{way}") as calls:
            reply, sent_s, done_s = await calls.exchange(message)
            assert reply == message and sent_s < done_s
        async with RawCalls(address, way, f"/bare.Echo/{way}-around-layer") as calls:
            reply, sent_s, done_s = await calls.exchange(message)
            assert reply[8:] == message[8:] and 0 < struct.unpack("d", reply[:8])[0] < done_s - sent_s
    assert await prefill.echo_s_of(address, 3 * 2**20 + 1, rounds=1) > 0
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


async def test_the_engine_is_driven_without_a_service(tmp_path: Path) -> None:
    size = replace(SMALL, throughput_s=0.05, hidden=64)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(size.model()))
    rows, busy = await rows_per_second(size, model, 8)
    assert rows > 0 and 0 < busy <= 1


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_device_that_only_waits_gives_inputs_back_where_outputs_are_wanted(is_shared: bool) -> None:
    hidden, room = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    control = np.zeros((7, 3), np.int32)
    control[0] = [0, 1, 2]
    batch = StepBatch(0, control, 2, (hidden,), None, (room,) if is_shared else ())
    result = pretending.Pretender().launch(batch).result()
    assert not result.failed and result.is_placed is is_shared
    assert result.compute_s == pytest.approx(pretending.BATCH_S + 2 * pretending.ROW_S)
    assert np.array_equal(room if is_shared else result.hidden, hidden)
