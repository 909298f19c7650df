"""`deltaline drain`: begins a server's drain, and waits for its end if asked to."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from deltaline_cli.address import TokenArguments, tls_of, token_of
from deltaline_cli.text import plural, seconds_up_to
from deltaline_client import Client, DeadlineExceeded, MoveTargetRefused, Stopping, Tls, Unavailable

POLL_S = 0.2
# A server whose connection is refused or broken for so long is gone; one that does not answer then is asked again.
GONE_S = 2.0
# A server asks the one that is to take sequences, and waits ten seconds for its answer.
TARGET_S = 15.0
MAX_TIMEOUT_S = 24 * 3600.0
_ABOUT = """\
Begins the drain of a server: it is not ready any more and opens no sequences; those that are open are stepped until
they are closed or its time is over; then it stops. A drain can't be taken back, and a second call changes nothing, its
time neither. With --wait the command stays until the server is gone, and tells what is left whenever that has changed;
an interrupt ends the command, not the drain.

The exit code is 0 once the drain has begun, with --wait once the server has stopped, and 1 if it can't be reached or
refuses. Sequences that are open at the end are lost; how many is in the server's log ("drain over").

With --to the sequences are moved to that server while they are stepped, as far as it takes them; what could not be
moved is tried again until the time is over, and then lost. Of several servers those take turns that the drained one
accepts: it has to know them by its --move-peers. Where it accepts none the drain does not begin, and the exit code
is 1. It ends once those whose sequences were moved have been told where, or its time is over.

  deltaline drain                               the server on this machine, with its own --drain-timeout-s
  deltaline drain HOST --timeout 600 --wait     ten minutes for what is open there
  deltaline drain HOST --to OTHER:50051 --wait  what is open there goes on at the other
"""


def add_drain(commands: Any, served: argparse.ArgumentParser) -> None:
    """Add `drain` to the commands of the command line."""
    about, raw = "let a server finish its sequences, and stop", argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("drain", parents=[served], help=about, description=_ABOUT, formatter_class=raw)
    text = "seconds for which open sequences are stepped, a day at most; default: the server's own"
    parser.add_argument("--timeout", type=seconds_up_to(MAX_TIMEOUT_S, "a day"), metavar="SECONDS", help=text)
    parser.add_argument("--wait", action="store_true", help="stay until the server has stopped")
    text = "HOST:PORT of a server to which open sequences are moved; may be given again"
    parser.add_argument("--to", action="append", default=[], metavar="ADDRESS", help=text)
    parser.set_defaults(run=drain)


def drain(options: argparse.Namespace) -> int:
    """Begin the drain, and see its end if asked to; 0. Raises DeltalineError as the client does."""
    tls, token = tls_of(options), token_of(options)
    with Client(options.server, timeout=TARGET_S if options.to else 5.0, tls=tls, **token) as client:
        left = _begin(client, options.timeout, options.to) if options.to else client.drain(options.timeout)
    if left is None:
        print("deltaline: error: the drain has not begun: no server takes the sequences", file=sys.stderr)
        return 1
    print(f"{options.server} drains: {_open(left)}", flush=True)
    if options.wait:
        _wait(options.server, tls, token, left)
    return 0


def _begin(client: Client, timeout_s: float | None, targets: Sequence[str]) -> int | None:
    """Begin the drain with each target that is accepted; how many sequences are open, None where none is."""
    left: int | None = None
    for target in targets:
        try:
            left = client.drain(timeout_s, target=target)
        except MoveTargetRefused as error:
            print(f"{target} takes none: {error}", file=sys.stderr)
        except (Stopping, Unavailable):
            if left is None:
                raise
            break  # all had moved, and it has stopped
        else:
            print(f"sequences move to {target}", flush=True)
    return left


def _wait(address: str, tls: Tls | None, token: TokenArguments, left: int) -> None:
    """Tell how many sequences and rows are left when that changes, until the server is gone."""
    told = left, 0
    with Client(address, timeout=GONE_S, tls=tls, **token) as client:
        while True:
            try:
                load = client.load()
            except DeadlineExceeded:
                continue
            except (Stopping, Unavailable):
                break
            if not load.draining:  # what answers now is another process
                break
            if (load.sequences_open, load.queued_rows) != told:
                told = load.sequences_open, load.queued_rows
                rows = f", {load.queued_rows} {plural(load.queued_rows, 'row')} queued" if load.queued_rows else ""
                print(f"{_open(load.sequences_open)}{rows}", flush=True)
            time.sleep(POLL_S)
    print(f"{address} has stopped" + (f"; when it last answered, {_open(told[0])}" if told[0] else ""))


def _open(count: int) -> str:
    return f"{count} {plural(count, 'sequence')} open"
