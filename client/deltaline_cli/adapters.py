"""`deltaline adapters`: loads, unloads and lists the adapters of a server."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

from deltaline.sizes import readable_bytes
from deltaline_cli.address import add_actions, tls_of, token_of
from deltaline_cli.text import ProgressLine, plural, table
from deltaline_client import Adapter, AdapterBytesExhausted, AdapterList, Client, DeltalineError
from deltaline_client._adapters.types import HASH_DIGITS

_ABOUT = """\
Adapters (LoRA, DoRA) of a server's layers. A sequence names its adapter when it is opened, and one batch mixes them.

  deltaline adapters load french                       from the server's own folder of adapters
  deltaline adapters load french --from ./out/french   from this machine: a directory as PEFT writes it
  deltaline adapters list                              what there is, and who uses it
  deltaline adapters unload french --drain             sequences that use it go on, no new one gets it
"""
_LOAD = """\
Loads an adapter under NAME, which sequences are opened with from then on. Without --from the server reads the directory
NAME of its own folder (its option --adapter-root). With --from this machine's files are sent: adapter_config.json and
adapter_model.safetensors, as PEFT writes them; pickles are never read.

The same content may be loaded again under the same name: nothing is done then, except that --pin, or its absence,
counts. Other content is refused, until the name is unloaded. What can't be honoured is refused too, and the error names
the key or the tensor. When the server's memory for adapters is short, those that were used least recently go, but for
pinned ones and ones in use; when that is not enough the command says so and waits: for 60 s, or as --timeout says.
"""
_UNLOAD = """\
Frees the name of an adapter, and its memory. While open sequences use it this is refused, unless --drain is given: then
the name is free at once, those sequences go on with the adapter, and its memory is freed after the last of them.
"""
_LIST = """\
Lists the adapters of a server: each one's largest rank; its host memory; whether it is in host memory (registered), in
a slot on the device as well (resident), or unloaded and still in use (draining); whether it stays when memory is short;
whether it is everybody's; how many open sequences use it; and the beginning of its content's SHA-256, which is the same
on every server.
"""
# A load may send gigabytes; memory that is short for longer than a minute is somebody's to free.
_LOAD_S, _MEMORY_S = 600.0, 60.0


def add_adapters(commands: Any) -> None:
    """Add `adapters` and its commands to those of the command line."""
    add = add_actions(commands, "adapters", "load, unload and list the adapters of a server", _ABOUT, run_adapters)
    default = f"{_LOAD_S:g}, of them {_MEMORY_S:g} waiting for memory"
    load = add("load", "load an adapter from the server's folder, or from this machine", _LOAD, None, default)
    load.add_argument("name", metavar="NAME", help="1 to 64 of A-Z a-z 0-9 . _ - and no dot at its beginning")
    load.add_argument("--from", dest="path", metavar="DIR", help="the adapter's directory on this machine")
    load.add_argument("--shared", action="store_true", help="for everybody; takes the role admin")
    load.add_argument("--pin", action="store_true", help="keep it when memory is short")
    unload = add("unload", "free an adapter's name and memory", _UNLOAD, 30.0)
    unload.add_argument("name", metavar="NAME", help="the adapter's name")
    unload.add_argument("--drain", action="store_true", help="let the sequences that use it go on with it")
    unload.add_argument("--shared", action="store_true", help="one that is everybody's; takes the role admin")
    listing = add("list", "what adapters there are", _LIST, 5.0)
    listing.add_argument("--json", action="store_true", help="print JSON, with whole hashes and sizes in bytes")


def run_adapters(options: argparse.Namespace) -> int:
    """Run one of the commands. Raises ValueError, DeltalineError."""
    timeout_s = _LOAD_S if options.timeout is None else options.timeout
    with Client(options.server, timeout=timeout_s, tls=tls_of(options), **token_of(options)) as client:
        match options.action:
            case "load":
                memory_s = _MEMORY_S if options.timeout is None else options.timeout
                return _load(client, options, memory_s)
            case "unload":
                return _unload(client, options.name, options.drain, options.shared)
            case _:
                return _list(client, options.json)


class _MemoryWait:
    """Says once that a load waits for memory, and ends it when that has taken `limit_s` seconds."""

    def __init__(self, progress: ProgressLine, limit_s: float) -> None:
        self._progress, self._limit_s = progress, limit_s
        self._begin_s: float | None = None

    def note(self, error: DeltalineError) -> None:
        """A try was refused and another one is to come. Raises the error when there was enough waiting."""
        if not isinstance(error, AdapterBytesExhausted):
            return
        if self._begin_s is None:
            self._begin_s = time.monotonic()
            limit = f"up to {self._limit_s:g} s, see --timeout"
            self._progress.interrupt(f"refused, waiting for adapter memory: {error}; {limit}")
        elif time.monotonic() - self._begin_s >= self._limit_s:
            raise error


def _load(client: Client, options: argparse.Namespace, memory_s: float) -> int:
    try:
        with ProgressLine("sent", readable_bytes) as progress:
            waiting = _MemoryWait(progress, memory_s).note
            loaded = client.adapters.load(
                options.name,
                options.path,
                pinned=options.pin,
                shared=options.shared,
                progress=progress.reach,
                waiting=waiting,
            )
    except OSError as error:
        raise ValueError(f"--from: {error}") from error
    adapter = loaded.adapter
    done = "was loaded before" if loaded.already_loaded else "is loaded"
    pin = ", pinned" if adapter.pinned else ""
    size, digits = readable_bytes(adapter.size_bytes), _hash(adapter)
    print(f"{adapter.name} {done}: rank {adapter.rank}, {size}, hash {digits}{pin}")
    if adapter.modules_elsewhere:
        print(f"it changes {_count(adapter.modules_elsewhere, 'more module')}, which this server does not serve")
    return 0


def _unload(client: Client, name: str, is_draining: bool, is_shared: bool) -> int:
    count = client.adapters.unload(name, drain=is_draining, shared=is_shared)
    users = f"; {_count(count, 'open sequence')} still {'has' if count == 1 else 'have'} it" if count else ""
    print(f"{name} is unloaded{users}")
    return 0


def _list(client: Client, is_json: bool) -> int:
    listed = client.adapters.list()
    print(_json(listed) if is_json else _table(listed))
    return 0


def _table(listed: AdapterList) -> str:
    heading = ("name", "rank", "size", "state", "pinned", "shared", "sequences", "hash")
    rows = [
        (
            one.name,
            str(one.rank),
            readable_bytes(one.size_bytes),
            one.state.name.lower(),
            "yes" if one.pinned else "no",
            "yes" if one.shared else "no",
            str(one.sequences),
            _hash(one),
        )
        for one in listed.adapters
    ]
    memory = f"{readable_bytes(listed.used_bytes)} of {readable_bytes(listed.limit_bytes)} in use"
    slots = f"{listed.slots_used} of {listed.slots_total} {plural(listed.slots_total, 'slot')} on the device"
    lines = [table([heading, *rows], align="<>><<<><")] if rows else []
    return "\n".join([*lines, f"{_count(len(rows), 'adapter')}, {memory}, {slots}"])


def _json(listed: AdapterList) -> str:
    adapters = [
        asdict(one) | {"content_hash": one.content_hash.hex(), "state": one.state.name.lower()}
        for one in listed.adapters
    ]
    return json.dumps(asdict(listed) | {"adapters": adapters}, indent=2)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {plural(number, noun)}"


def _hash(adapter: Adapter) -> str:
    return adapter.content_hash.hex()[:HASH_DIGITS]
