"""The command line: options in, exit code out. The work of a command is in its own module."""

from __future__ import annotations

import argparse
import importlib.metadata
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from deltaline.sizes import readable_bytes
from deltaline_cli.adapters import add_adapters
from deltaline_cli.address import add_server, advise, tls_of, token_of
from deltaline_cli.bench.command import bench
from deltaline_cli.bench.options import BenchOptions, Lengths, bytes_of, parse_mix
from deltaline_cli.bench.run import BenchError
from deltaline_cli.demo import DemoError, demo, missing_packages
from deltaline_cli.drain import add_drain
from deltaline_cli.health import add_health
from deltaline_cli.snapshots import add_snapshots
from deltaline_cli.text import plural, table
from deltaline_cli.top.command import add_top
from deltaline_client import Client, DeadlineExceeded, DeltalineError, LayerSpan, Output, ServerInfo, Unavailable

_ABOUT = """\
Talks to a deltaline server: a service that holds the recurrent layers of a language model and their state.

  deltaline demo                      see it work, with a server of its own; needs no network and no checkpoint
  deltaline info                      what the server on this machine serves
  deltaline load HOST                 how full that server is
  deltaline top                       the same and more, again and again; needs deltaline[top]
  deltaline health                    whether the server on this machine is ready; for probes
  deltaline drain HOST --wait         let that server finish its sequences, and stop
  deltaline size --model DIR          what a server of that checkpoint takes; needs deltaline[server]
  deltaline adapters list             which adapters (LoRA) it holds
  deltaline snapshots list            which states of sequences it holds
  deltaline bench --clients 4         how fast it answers
"""
_BENCH = """\
Loads a server and tells what its steps took. In a closed loop every client sends its next step when the last is
answered: that finds the most that the server does. With --rate steps arrive by themselves, at random (Poisson) and at
that rate, and whichever client is idle sends them: that finds what a step takes under a given load. A step's time then
counts from when it was due, not from when a client came to it, so that a slow server can't hide its queue; and when
the load was not held, the command says which side was slow, and reports no latencies (exit code 1).

A decode or verify step holds a row of each of the client's sequences; a prefill is a step of one row. A sequence that
has no room for its next tokens makes way for a new one, between steps and not in their time. The ramp-up and
a first step of each kind are not measured. Printed are percentiles of the time that a step took (total), of the wait
for a client (open loop), of the server's stages, and of what is left (transport: gRPC, both ends). The stages of a step
that was computed in several batches are sums: they can exceed the total, and leave no transport.

  deltaline bench --mix decode=1 --rows 32 --clients 8           the most decode rows per second
  deltaline bench --rate 200 --mix prefill=1,decode=20           latencies at 200 steps per second
  deltaline bench --clients 4 --shared-memory-bytes 256MiB       through memory shared with a server on this host
"""
_DEMO = """\
Writes a small checkpoint, starts a server for it as a process of its own, lets four clients step at once, then
generates tokens with examples/generate.py, plain and speculatively, and compares them with transformers where that is
installed. Takes about 20 seconds, longer where others use the CPU. Needs deltaline[server].
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0; 1 after an error, 2 for wrong options, both printed; 130 after a signal."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "size":  # the options of size are the server's: it knows them
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with _terminable():
            return size(rest) if options.command == "size" else int(options.run(options))
    except (BenchError, DeltalineError, DemoError, MemoryError, ValueError) as error:
        print(f"deltaline: error: {error}", file=sys.stderr)
        is_unreached = isinstance(error, Unavailable | DeadlineExceeded)
        if is_unreached and hasattr(options, "server"):  # the demo has a server of its own
            advise(options.server, tls_of(options), error)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the block as SIGINT does, so that what was started and opened is cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def bench_options(options: argparse.Namespace) -> BenchOptions:
    """What `deltaline bench` was asked for. Raises ValueError naming the option."""
    values: dict[str, Any] = {option.name: getattr(options, option.name, None) for option in fields(BenchOptions)}
    values |= {"tls": tls_of(options), **token_of(options)}
    values["mix"] = parse_mix(options.mix)
    values["shared_memory_bytes"] = bytes_of(options.shared_memory_bytes, "--shared-memory-bytes")
    values["prefill_tokens"] = Lengths.parse(options.prefill_tokens)
    return BenchOptions(**values)


def run_bench(options: argparse.Namespace) -> int:
    """Load a server; 2 for options that make no sense, as for those that the parser refuses."""
    try:
        asked = bench_options(options)
    except ValueError as error:
        print(f"deltaline: error: {error}", file=sys.stderr)
        return 2
    return bench(options.server, asked)


def show_info(options: argparse.Namespace) -> int:
    """Print what a server serves."""
    with Client(options.server, timeout=5.0, tls=tls_of(options), **token_of(options)) as client:
        info = client.info()
    spans = ", ".join(
        f"{index}: layers {span.first}-{span.first + span.count - 1}{_streams(span)}"
        for index, span in enumerate(info.spans)
    )
    adapters = "none"
    if info.adapter_bytes:
        slots = f"{info.adapter_slots} {plural(info.adapter_slots, 'slot')} on the device"
        kept = f"{readable_bytes(info.adapter_bytes)} of host memory, {slots}"
        adapters = f"{kept}, rank at most {info.max_adapter_rank}"
    pages = "none"
    if info.kv_pages:
        kept = f"{info.kv_pages} of {info.kv_page_tokens} tokens and {readable_bytes(info.kv_page_bytes)}"
        pages = f"{kept}, at most {info.max_context} tokens of a sequence"
    rows = [
        ("server", f"deltaline {info.version} on {info.device}, epoch {info.server_epoch:#x}"),
        ("name", info.server or "none"),
        ("model", f"{info.model_type}, hidden size {info.hidden_size}, {info.dtype}, state in {info.state_dtype}"),
        ("spans", f"{spans} ({info.scope} scope)"),
        ("sequences", f"at most {info.max_sequences}, {readable_bytes(info.sequence_state_bytes)} of state each"),
        ("pages", pages),
        ("steps", f"at most {info.max_draft_tokens} tokens to verify, {info.max_steps_in_flight} steps in flight"),
        ("calls go by", "the local link" if info.is_linked else "gRPC"),
        ("inline tensors", f"at most {readable_bytes(info.inline_limit_bytes)}"),
        ("leases", f"{info.default_lease_s:g} s, at most {info.max_lease_s:g} s"),
        ("snapshots", _snapshots(info)),
        ("adapters", adapters),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(info.versions.items()))),
    ]
    print(table(rows, align="<<"))
    return 0


def _snapshots(info: ServerInfo) -> str:
    """What a server keeps of states."""
    if not info.serves_state:
        return "none"
    return f"{info.snapshot_lines} {plural(info.snapshot_lines, 'line')} beyond those of sequences"


def _streams(span: LayerSpan) -> str:
    """What comes in and goes out of a span where either has residual streams."""
    if not (span.input_streams or span.output_streams):
        return ""
    return f" ({span.input_streams or 'no'} streams in, {span.output_streams or 'none'} out)"


def show_load(options: argparse.Namespace) -> int:
    """Print how full a server is."""
    with Client(options.server, timeout=5.0, tls=tls_of(options), **token_of(options)) as client:
        load = client.load()
    rows = [
        ("", "used", "limit"),
        ("state lines", str(load.lines_used), str(load.lines_total)),
        *([("pages", str(load.kv_pages_used), str(load.kv_pages_total))] if load.kv_pages_total else []),
        ("queued rows", str(load.queued_rows), str(load.queued_rows_limit)),
        ("queued bytes", readable_bytes(load.queued_bytes), readable_bytes(load.queued_bytes_limit)),
        ("kept replies", readable_bytes(load.reply_bytes), readable_bytes(load.reply_bytes_limit)),
    ]
    print(table(rows, align="<>>"))
    print(
        f"{load.sequences_open} {plural(load.sequences_open, 'sequence')} open{', draining' if load.draining else ''}"
    )
    return 0


def size(arguments: Sequence[str]) -> int:
    """Hand the arguments to the server's own calculator, a process of its own: only the server knows what it allocates.

    Returns its exit code. Raises ValueError where the server is not installed.
    """
    missing = missing_packages()
    if missing:
        raise ValueError(f"size needs {', '.join(missing)}: pip install 'deltaline[server]'")
    code = subprocess.run([sys.executable, "-m", "deltaline_server.sizing", *arguments], check=False).returncode
    return code if code >= 0 else 128 - code  # of a signal, as a shell has it


def _version() -> str:
    try:
        return importlib.metadata.version("deltaline")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="deltaline", description=_ABOUT, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"deltaline {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    served = argparse.ArgumentParser(add_help=False)
    add_server(served)
    about = "what a server serves, and its limits"
    commands.add_parser("info", parents=[served], help=about, description=about).set_defaults(run=show_info)
    about = "how full a server is now"
    commands.add_parser("load", parents=[served], help=about, description=about).set_defaults(run=show_load)
    add_top(commands, served)
    add_health(commands)
    add_drain(commands, served)
    add_adapters(commands)
    add_snapshots(commands)
    _add_bench(commands, served)
    commands.add_parser("size", help="what a server of a model takes, and what a budget holds", add_help=False)
    about = "start a server and drive it from a few clients"
    shows = commands.add_parser("demo", help=about, description=_DEMO, formatter_class=raw)
    shows.add_argument("--keep", action="store_true", help="leave the server running afterwards, until Ctrl-C")
    shows.set_defaults(run=lambda options: demo(keep=options.keep))
    return parser


def _add_bench(commands: Any, served: argparse.ArgumentParser) -> None:
    """The options of `deltaline bench`; their defaults are those of BenchOptions."""
    about, default = "load a server, and tell what its steps took", BenchOptions()
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("bench", parents=[served], help=about, description=_BENCH, formatter_class=raw)
    parser.set_defaults(run=run_bench)
    mix = ",".join(f"{kind}={weight:g}" for kind, weight in default.mix.items())

    def add(group: Any, flag: str, value: object, metavar: str, text: str, **more: Any) -> None:
        kind = more.pop("type", type(value))
        group.add_argument(flag, default=value, metavar=metavar, help=text, type=kind, **more)

    load = parser.add_argument_group("load")
    add(load, "--clients", default.clients, "N", "steps that may be under way at once [%(default)s]")
    add(load, "--rows", default.rows, "N", "sequences of each client, all in one decode or verify step [%(default)s]")
    text = "steps per second that arrive by themselves, in all (open loop); without it, a closed loop"
    add(load, "--rate", default.rate, "R", text, type=float)
    add(load, "--mix", mix, "KIND=WEIGHT,...", "how often a step is a prefill, decode or verify [%(default)s]")
    text = (
        "tokens of a prefill: N, LOW:HIGH (all alike), or lognormal:MEDIAN,P99 (many short ones, few long ones) "
        "[%(default)s]"
    )
    add(load, "--prefill-tokens", str(default.prefill_tokens), "TOKENS", text)
    text = "which outputs of a prefill the server sends: all, last or none [%(default)s]"
    outputs = get_args(Output)
    add(load, "--prefill-output", default.prefill_output, "ROWS", text, choices=outputs)
    add(load, "--drafts", default.drafts, "N", "tokens of a verify row [%(default)s]")
    text = (
        "memory that each client shares with the server, such as 256MiB: tensors then lie there and not in messages. "
        "Needs the server's host, and a server with at least so much for all clients (its option of the same name); "
        "if a step finds no room there, nothing is reported [0, for none]"
    )
    add(load, "--shared-memory-bytes", str(default.shared_memory_bytes), "BYTES", text)
    text = "processes that the clients are spread over, when one core can't keep up [%(default)s]"
    add(load, "--processes", default.processes, "N", text)
    time = parser.add_argument_group("time")
    end = time.add_mutually_exclusive_group()
    text = "seconds that are measured [%(default)s]"
    add(end, "--duration", default.duration_s, "SECONDS", text, type=float, dest="duration_s")
    text = "or the number of steps that are, by all clients together"
    add(end, "--steps", default.steps, "N", text, type=int)
    text = "seconds in which the load grows, before anything is measured [%(default)s]"
    add(time, "--ramp-up", default.ramp_up_s, "SECONDS", text, type=float, dest="ramp_up_s")
    text = "seconds until a step has failed, which ends the run [%(default)s]"
    add(time, "--timeout", default.timeout_s, "SECONDS", text, type=float, dest="timeout_s")
    report = parser.add_argument_group("report")
    text = "the server's metrics (http://HOST:9464/metrics), for the share of the time in which the device was busy"
    add(report, "--metrics-url", default.metrics_url, "URL", text, type=str)
    text = "write the figures to this file, and with matplotlib a plot beside it (FILE.svg)"
    add(report, "--output", default.output, "FILE.json", text, type=Path)
