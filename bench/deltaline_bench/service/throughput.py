"""Part `throughput`: many clients, each a process, in a closed loop; beside the bare engine."""

from __future__ import annotations

from deltaline_bench.service.engine_loop import rows_per_second
from deltaline_bench.service.figure import Figure
from deltaline_bench.service.host import Host
from deltaline_bench.service.size import Size
from deltaline_cli.bench.report import Report

PART = "throughput"
INLINE, SHARED = "inline", "shared memory"


async def measure(host: Host) -> list[Figure]:
    """Load the server with tensors in messages and in shared memory, then drive the engine in this process."""
    size = host.size
    room_bytes = max(64 * size.decode_rows * size.token_bytes, 2**24)
    runs = {way: await _load(host, num_bytes) for way, num_bytes in ((INLINE, 0), (SHARED, room_bytes))}
    engine = await rows_per_second(size, host.model, size.clients * size.decode_rows)
    return judge(size, runs, engine, by_link=host.link_address is not None)


def judge(size: Size, runs: dict[str, Report], engine: tuple[float, float], *, by_link: bool) -> list[Figure]:
    """Make the figures. runs: what came of the load by way; engine: rows per second, share computed.

    The link is held to tensors that a client makes in place, gRPC to those that come in its messages.
    """
    engine_rows, engine_busy = engine
    clients = f"{size.clients} clients x {size.decode_rows} rows"
    figures = [
        Figure(PART, "the engine alone", engine_rows, "rows/s", "engine", note="batches of all rows, two deep"),
        Figure(PART, "the engine alone, device busy", engine_busy, "", "engine"),
    ]
    rows = {way: report.speed("decode")["rows_per_s"] for way, report in runs.items()}
    for way, report in runs.items():
        [p50_ms, *_] = report.percentiles_ms("decode", "total") or [float("nan")]
        busy, why = (None, report.busy) if isinstance(report.busy, str) else (report.busy, "")
        figures += [
            Figure(PART, way, rows[way], "rows/s", "client", note=clients),
            Figure(PART, f"{way}, p50", p50_ms * 1e3, "us", "client"),
            Figure(PART, f"{way}, device busy", busy, "", "metrics", note=why),
        ]
    bars = {SHARED: size.bar(0.9, is_least=True)} if by_link else {INLINE: size.bar(0.7, is_least=True)}
    shares = [
        Figure(PART, f"{way} / the engine alone", rows[way] / engine_rows, "", "client", bars.get(way)) for way in rows
    ]
    return [*figures, *shares]


async def _load(host: Host, shared_memory_bytes: int) -> Report:
    """Decode with all clients."""
    size = host.size
    return await host.load(
        clients=size.clients,
        processes=size.clients,
        rows=size.decode_rows,
        duration_s=size.throughput_s,
        shared_memory_bytes=shared_memory_bytes,
        metrics_url=host.metrics_url,
    )
