"""What a step by the local link costs besides its layers, in time of the processors, which waits do not count to."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from deltaline_bench.service.decode import MAX_LINK_ECHOES
from deltaline_bench.service.host import running
from deltaline_bench.service.processor import cost_ns
from deltaline_bench.service.raw import decoding, echoing
from deltaline_bench.service.raw_link import decoding_by_link
from deltaline_bench.service.size import CPU

ROUNDS, STEPS, WARM_UP = 20, 50, 50


@pytest.mark.alone
async def test_a_step_of_64_rows_costs_about_an_echo_by_grpc(tmp_path: Path) -> None:
    async with running(CPU, tmp_path, "deltaline_bench.service.copying", has_link=True) as host:
        assert host.link_address is not None
        rows = CPU.decode_rows
        async with (
            decoding(host.address, rows, "unary") as inline,
            decoding_by_link(host.link_address, rows) as steps,
            echoing(host.echo_address, "unary", inline) as echo,
        ):
            await inline.step()  # its message is what is echoed
            ways = {host.server.pid: steps.step, host.echo.pid: echo}
            for pid, step in ways.items():
                await cost_ns(pid, step, WARM_UP)
            turns = [[await cost_ns(pid, step, STEPS) for pid, step in ways.items()] for _ in range(ROUNDS)]
    # Of neighbours in time: processors change their speed within seconds, and caches are lost to whatever else runs.
    echoes = statistics.median(by_link / by_echo for by_link, by_echo in turns)
    assert echoes <= MAX_LINK_ECHOES, f"{echoes:.2f} echoes; in us, {[[ns // 1000 for ns in turn] for turn in turns]}"
