"""The command line: options in, exit code out. The work of a command is in its own module."""

from __future__ import annotations

import argparse
import importlib.metadata
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from deltaline_client._cli_bench import BenchOptions, bench
from deltaline_client._cli_demo import DemoError, demo
from deltaline_client._cli_text import mebibytes, table
from deltaline_client._client import Client
from deltaline_client._exceptions import DeltalineError

_ABOUT = """\
Talks to a deltaline server: a service that holds the recurrent layers of a language model and their state.

  deltaline demo                      see it work, with a server of its own; needs no network and no checkpoint
  deltaline info                      what the server on this machine serves
  deltaline load HOST:PORT            how full that server is
  deltaline bench --clients 4         how fast it answers
"""
_SERVER = "host:port, or unix:/path [%(default)s]"
_BENCH = """\
Drives a server in a closed loop: every client sends its next step when the last is answered. Prefills, decodes and
verifies are measured one after the other, so that the kinds do not disturb each other. Prints percentiles of the time
that a step took as the client saw it (total), of the server's stages, and of what is left (transport: gRPC, both ends).
The stages of a step that was computed in several batches are sums: they can exceed the total, and leave no transport.
"""
_DEMO = """\
Writes a small checkpoint, starts a server for it as a process of its own, lets four clients step at once, then
generates tokens with examples/generate.py, plain and speculatively, and compares them with transformers where that is
installed. Takes about 20 seconds. Needs deltaline[server].
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 after an error, which is printed, or 130 after SIGINT or SIGTERM."""
    options = _parser().parse_args(arguments)
    try:
        with _terminable():
            return _run(options)
    except (DeltalineError, DemoError, ValueError) as error:
        print(f"deltaline: error: {error}", file=sys.stderr)
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


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "info":
            return show_info(options.server)
        case "load":
            return show_load(options.server)
        case "demo":
            return demo(keep=options.keep)
        case _:
            sizes = {size.name: getattr(options, size.name) for size in fields(BenchOptions)}
            return bench(options.server, BenchOptions(**sizes))


def show_info(address: str) -> int:
    """Print what a server serves."""
    with Client(address, timeout=5.0) as client:
        info = client.info()
    spans = ", ".join(
        f"{index}: layers {span.first}-{span.first + span.count - 1}" for index, span in enumerate(info.spans)
    )
    rows = [
        ("server", f"deltaline {info.version} on {info.device}, epoch {info.server_epoch:#x}"),
        ("model", f"{info.model_type}, hidden size {info.hidden_size}, {info.dtype}, state in {info.state_dtype}"),
        ("spans", f"{spans} ({info.scope} scope)"),
        ("sequences", f"at most {info.max_sequences}, {mebibytes(info.sequence_state_bytes)} of state each"),
        ("steps", f"at most {info.max_draft_tokens} tokens to verify, {info.max_steps_in_flight} steps in flight"),
        ("inline tensors", f"at most {mebibytes(info.inline_limit_bytes)}"),
        ("leases", f"{info.default_lease_s:g} s, at most {info.max_lease_s:g} s"),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(info.versions.items()))),
    ]
    print(table(rows, align="<<"))
    return 0


def show_load(address: str) -> int:
    """Print how full a server is."""
    with Client(address, timeout=5.0) as client:
        load = client.load()
    rows = [
        ("", "used", "limit"),
        ("state lines", str(load.lines_used), str(load.lines_total)),
        ("queued rows", str(load.queued_rows), str(load.queued_rows_limit)),
        ("queued bytes", mebibytes(load.queued_bytes), mebibytes(load.queued_bytes_limit)),
        ("kept replies", mebibytes(load.reply_bytes), mebibytes(load.reply_bytes_limit)),
    ]
    print(table(rows, align="<>>"))
    print(f"{load.sequences_open} sequences open{', draining' if load.draining else ''}")
    return 0


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
    served.add_argument("server", nargs="?", default="127.0.0.1:50051", help=_SERVER)
    about = "what a server serves, and its limits"
    commands.add_parser("info", parents=[served], help=about, description=about)
    about = "how full a server is now"
    commands.add_parser("load", parents=[served], help=about, description=about)
    about = "measure a server in a closed loop"
    runs = commands.add_parser("bench", parents=[served], help=about, description=_BENCH, formatter_class=raw)
    runs.add_argument("--clients", type=int, default=4, help="clients that step at once [%(default)s]")
    runs.add_argument("--rows", type=int, default=8, help="sequences of each client, all in one step [%(default)s]")
    runs.add_argument("--steps", type=int, default=100, help="decode steps, and verify steps, per client [%(default)s]")
    runs.add_argument("--prefill", type=int, default=128, help="tokens of the prefill of each sequence [%(default)s]")
    runs.add_argument("--drafts", type=int, default=4, help="tokens of a verify row; 0 for no verifies [%(default)s]")
    runs.add_argument("--timeout", type=int, default=10, help="seconds until a step has failed [%(default)s]")
    about = "start a server and drive it from a few clients"
    shows = commands.add_parser("demo", help=about, description=_DEMO, formatter_class=raw)
    shows.add_argument("--keep", action="store_true", help="leave the server running afterwards, until Ctrl-C")
    return parser
