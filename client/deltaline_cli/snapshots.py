"""`deltaline snapshots`: lists, shows, saves, loads and releases the snapshots of a server."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from deltaline.sizes import readable_bytes
from deltaline_cli.address import add_actions, tls_of, token_of
from deltaline_cli.text import plural, table
from deltaline_client import Client, Snapshot, SnapshotState

_ABOUT = """\
Snapshots of sequences: states that a server holds, from which any number of sequences may go on. They are of whoever
made them, so this sees those of the principal that calls (--token-file), and of no other. Prefills leave them on their
way, and opens that are given a prompt's keys begin with them.

  deltaline snapshots list                 what there is, the oldest first
  deltaline snapshots show 1f3a            one of them, by the beginning of its id
  deltaline snapshots release 1f3a 77c0    end them; sequences that were restored from them go on
  deltaline snapshots save 1f3a FILE       its state as a file of this machine
  deltaline snapshots load FILE            a snapshot of such a file, on this or another server of the same model
"""
_LIST = """\
Lists the caller's snapshots, the oldest first: the beginning of each one's id; the tokens that its state has seen; the
name under which its adapter was opened; whether it stays when memory is short (pinned); its size, with what it shares
with others; where it lies (device, host or file); how old it is; and how long its lease still lasts.
"""
_SHOW = """\
Shows what is known of a snapshot. ID is the beginning of an id as `list` prints it, as much of it as no other has.
"""
_RELEASE = """\
Ends snapshots and frees what only they hold. Each ID is the beginning of an id as `list` prints it, as much of it as
no other has; when one of them means none or several, nothing is released. What is over already is no error.
"""
_SAVE = """\
Writes a snapshot's state to a file, whole or not at all. ID is the beginning of an id as `list` prints it, as much of
it as no other has. The snapshot stays. The server has to have host memory for states (--host-state-bytes).
"""
_LOAD = """\
Makes a snapshot of a file that `save` wrote, and prints its id. It is the caller's own. The server has to be of the
same model and settings as the one that it is from, to have its adapter loaded, and host memory for states.
"""
# Hexadecimal digits of an id that `list` shows; more where two begin alike.
_DIGITS = 12
_TIMEOUT_S, _FILE_TIMEOUT_S = 5.0, 600.0
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def add_snapshots(commands: Any) -> None:
    """Add `snapshots` and its commands to those of the command line."""
    about = "list, show, save, load and release the snapshots of a server"
    add = add_actions(commands, "snapshots", about, _ABOUT, run_snapshots)
    listing = add("list", "what snapshots there are", _LIST, _TIMEOUT_S)
    listing.add_argument(
        "--json", action="store_true", help="print JSON, with whole ids, sizes in bytes, times in seconds"
    )
    show = add("show", "one snapshot", _SHOW, _TIMEOUT_S)
    show.add_argument("id", metavar="ID", type=_beginning, help="the beginning of an id, in hexadecimal digits")
    release = add("release", "end snapshots", _RELEASE, _TIMEOUT_S)
    release.add_argument("ids", nargs="+", metavar="ID", type=_beginning, help="the beginnings of ids")
    save = add("save", "write one to a file", _SAVE, _FILE_TIMEOUT_S)
    save.add_argument("id", metavar="ID", type=_beginning, help="the beginning of an id, in hexadecimal digits")
    save.add_argument("file", metavar="FILE", help="the file to write; one that is there is replaced")
    load = add("load", "make one of a file", _LOAD, _FILE_TIMEOUT_S)
    load.add_argument("file", metavar="FILE", help="a file that `save` wrote")
    load.add_argument("--pin", action="store_true", help="let it stay when memory is short")
    load.add_argument("--lease", type=float, metavar="SECONDS", help="how long it lives [the server's default]")


def run_snapshots(options: argparse.Namespace) -> int:
    """Run one of the commands; 0. Raises DeltalineError, ValueError."""
    with Client(options.server, timeout=options.timeout, tls=tls_of(options), **token_of(options)) as client:
        if options.action == "load":
            with _named():
                came = client.snapshots.load(options.file, pin=options.pin, lease_s=options.lease)
            print(f"{came.id.hex()} has {came.position} {plural(came.position, 'token')}")
            return 0
        held = sorted(client.snapshots.list(), key=lambda one: (one.created_s, one.id))
        match options.action:
            case "list":
                print(_json(held) if options.json else _table(held, time.time()))
            case "show":
                print(_shown(_meant(held, options.id), time.time()))
            case "save":
                one = _meant(held, options.id)
                with _named():
                    one.save(options.file)
                print(f"{one.id.hex()} is saved, {readable_bytes(os.stat(options.file).st_size)}")
            case _:
                which = list(dict.fromkeys(_meant(held, beginning) for beginning in options.ids))
                for one, state in zip(which, client.snapshots.release(which), strict=True):
                    was = "is released" if state is SnapshotState.RELEASED else f"was over: {state.name.lower()}"
                    print(f"{one.id.hex()} {was}")
    return 0


@contextmanager
def _named() -> Iterator[None]:
    """What fails inside is of the file. Raises ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"FILE: {error}") from error


def _meant(held: Sequence[Snapshot], beginning: str) -> Snapshot:
    """The one snapshot whose id begins so. Raises ValueError."""
    found = [one for one in held if one.id.hex().startswith(beginning)]
    if len(found) != 1:
        many = f"{len(found)} begin: give more digits" if found else "none begins"
        raise ValueError(f"ID: expected the beginning of one snapshot's id, got {beginning}, with which {many}")
    return found[0]


def _beginning(text: str) -> str:
    """The beginning of an id. Raises ArgumentTypeError."""
    digits = text.lower()
    if not 1 <= len(digits) <= 32 or set(digits) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"expected 1 to 32 hexadecimal digits, got {text!r}")
    return digits


def _table(held: Sequence[Snapshot], now_s: float) -> str:
    heading = ("id", "position", "adapter", "pinned", "size", "tier", "age", "lease left")
    digits = _digits([one.id.hex() for one in held])
    rows = [
        (
            one.id.hex()[:digits],
            str(one.position),
            one.adapter or "-",
            "yes" if one.pinned else "no",
            readable_bytes(one.size_bytes),
            one.tier.name.lower(),
            _time(now_s - one.created_s),
            _time(one.lease_remaining_s),
        )
        for one in held
    ]
    lines = [table([heading, *rows], align="<><<><>>")] if rows else []
    size = readable_bytes(sum(one.size_bytes for one in held))
    return "\n".join([*lines, f"{len(rows) or 'no'} {plural(len(rows), 'snapshot')}, {size}"])


def _digits(ids: Sequence[str]) -> int:
    """How many digits tell ids apart, _DIGITS at least."""
    digits = _DIGITS
    while len({one[:digits] for one in ids}) < len(ids):
        digits += 4
    return digits


def _shown(one: Snapshot, now_s: float) -> str:
    made = datetime.fromtimestamp(one.created_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    adapter = "none" if one.adapter is None else f"{one.adapter}, hash {one.adapter_hash.hex()}"
    rows = [
        ("id", one.id.hex()),
        ("position", f"{one.position} {plural(one.position, 'token')}"),
        ("adapter", adapter),
        ("pinned", "yes" if one.pinned else "no, it gives way when memory is short"),
        ("size", f"{readable_bytes(one.size_bytes)}, what it shares with others included"),
        ("tier", one.tier.name.lower()),
        ("made", f"{made}, {_time(now_s - one.created_s)} ago"),
        ("lease", f"{_time(one.lease_remaining_s)} left"),
    ]
    return table(rows, align="<<")


def _json(held: Sequence[Snapshot]) -> str:
    listed = [
        {
            "id": one.id.hex(),
            "position": one.position,
            "adapter": one.adapter,
            "adapter_hash": one.adapter_hash.hex(),
            "pinned": one.pinned,
            "size_bytes": one.size_bytes,
            "tier": one.tier.name.lower(),
            "created_s": one.created_s,
            "lease_remaining_s": one.lease_remaining_s,
        }
        for one in held
    ]
    return json.dumps({"snapshots": listed}, indent=2)


def _time(seconds: float) -> str:
    """A time in its largest unit, rounded down: 59 s, 1 min, 3 h, 2 d."""
    seconds = max(0.0, seconds)  # the server's clock may be ahead
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
