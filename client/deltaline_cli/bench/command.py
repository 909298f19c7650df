"""`deltaline bench`: loads a server, judges whether the load was held, and reports."""

from __future__ import annotations

import sys

from deltaline_cli.bench.busy import BusyMeter, read_metrics
from deltaline_cli.bench.options import BenchOptions
from deltaline_cli.bench.plot import PlotUnavailable, write_plot
from deltaline_cli.bench.report import NO_METRICS, Report
from deltaline_cli.bench.run import BenchError, OnStart, OnStep, run
from deltaline_cli.bench.verdict import Verdict
from deltaline_cli.text import ProgressLine
from deltaline_client import Client


def bench(address: str, options: BenchOptions) -> int:
    """Measure a server and print what came of it; 1 when the offered load was not held, and no latencies then.

    Raises ValueError, DeltalineError, BenchError.
    """
    with ProgressLine("steps, ramp-up included") as progress:
        report = measured(address, options, progress.advance)
    verdict = report.verdict
    if verdict.refusal:
        print(f"deltaline: the load was not held, no latencies to report: {verdict.refusal}", file=sys.stderr)
        if verdict.offered_per_s is not None:
            print(f"offered {verdict.offered_per_s:.1f} steps/s, done {verdict.done_per_s:.1f}", file=sys.stderr)
        return 1
    print(report.text())
    if options.output is not None:
        _write(report, options)
    return 0


def measured(
    address: str, options: BenchOptions, on_step: OnStep = lambda steps: None, on_start: OnStart = lambda start_s: None
) -> Report:
    """Load a server and return what came of it, whether or not the load was held. See `run` for the arguments.

    Raises ValueError, DeltalineError, BenchError.
    """
    if options.metrics_url is not None:
        try:
            read_metrics(options.metrics_url, options.tls)
        except (OSError, ValueError) as error:
            why = str(error).removeprefix("--metrics-url: ")
            raise ValueError(f"--metrics-url: {options.metrics_url}: {why}") from error
    with Client(
        address, timeout=options.timeout_s, tls=options.tls, token=options.token, token_file=options.token_file
    ) as client:
        info = client.info()
    options.check(info)
    meters: list[BusyMeter] = []

    def begin(start_s: float) -> None:
        on_start(start_s)
        if options.metrics_url is not None:
            begin_s = start_s + options.ramp_up_s
            end_s = None if options.steps is not None else begin_s + options.duration_s
            meters.append(BusyMeter(options.metrics_url, begin_s, end_s, options.tls))
            meters[0].start()

    try:
        samples = run(address, options, on_step, begin)
    finally:
        busy = meters[0].share() if meters else NO_METRICS
    return Report(options, info, samples, Verdict.of(samples, options), busy)


def _write(report: Report, options: BenchOptions) -> None:
    assert options.output is not None
    try:
        report.write(options.output)
        write_plot(report, options.output.with_suffix(".svg"))
    except PlotUnavailable as error:
        print(error, file=sys.stderr)
    except OSError as error:
        raise BenchError(f"--output: {options.output} can't be written: {error.strerror}") from error
