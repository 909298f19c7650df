"""`deltaline adapters` on a real AdapterService: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rigs.adapter_host import LIMIT_BYTES, AdapterHost

from deltaline_cli import adapters as command
from deltaline_cli.main import main


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterHost]:
    made = AdapterHost(tmp_path_factory.mktemp("host") / "root")
    yield made
    made.stop()


@pytest.fixture
def host(running: AdapterHost) -> AdapterHost:
    for adapter in running.do(running.registry.describe):
        running.do(partial(running.registry.unload, adapter.name, drain=True))
    return running


def adapters(host: AdapterHost, action: str, *arguments: object) -> int:
    return main(["adapters", action, *map(str, arguments), "--server", host.address])


def test_adapters_are_loaded_listed_and_unloaded(host: AdapterHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert adapters(host, "list") == 0
    assert capsys.readouterr().out == "no adapters, 0 B of 1.0 MiB in use, 0 of 2 slots on the device\n"
    assert adapters(host, "load", "good", "--pin") == 0
    [one] = host.do(host.registry.describe)
    size, digits = f"{one.num_bytes / 1024:.1f} KiB", one.content_hash.hex()
    assert capsys.readouterr().out == f"good is loaded: rank 3, {size}, hash {digits[:16]}, pinned\n"
    assert adapters(host, "load", "another-one", "--from", host.directory) == 0
    out, err = capsys.readouterr()
    assert out == f"another-one is loaded: rank 3, {size}, hash {digits[:16]}\n"
    sent = f"{(host.directory / 'adapter_model.safetensors').stat().st_size / 1024:.1f} KiB"
    assert err.startswith(f"sent: {sent} of {sent}, ") and err.count("\n") == 1
    assert adapters(host, "load", "good") == 0
    assert capsys.readouterr().out.startswith("good was loaded before: rank 3, ")
    number = host.do(lambda: host.registry.bind("good", 12))
    assert adapters(host, "list") == 0
    heading, first, second, total = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "rank", "size", "state", "pinned", "shared", "sequences", "hash"]
    assert first.split() == ["another-one", "3", *size.split(), "registered", "no", "no", "0", digits[:16]]
    assert second.split() == ["good", "3", *size.split(), "registered", "no", "no", "12", digits[:16]]
    assert heading.index("hash") == first.index(digits[:16]) == second.index(digits[:16])
    assert heading.index("state") == first.index("registered") == second.index("registered")
    assert heading.index("sequences") + len("sequences") - 2 == second.index("12")
    assert total == f"2 adapters, {2 * one.num_bytes / 1024:.1f} KiB of 1.0 MiB in use, 0 of 2 slots on the device"
    assert adapters(host, "unload", "good", "--drain") == 0
    assert capsys.readouterr().out == "good is unloaded; 12 open sequences still have it\n"
    host.do(lambda: host.registry.release(number, 11))
    assert adapters(host, "load", "good") == 0
    again = host.do(lambda: host.registry.bind("good"))
    capsys.readouterr()
    assert adapters(host, "unload", "good", "--drain") == 0
    assert capsys.readouterr().out == "good is unloaded; 1 open sequence still has it\n"
    host.do(lambda: host.registry.release(number))
    host.do(lambda: host.registry.release(again))
    assert adapters(host, "unload", "another-one") == 0
    assert capsys.readouterr().out == "another-one is unloaded\n"


def test_a_list_for_programs(host: AdapterHost, capsys: pytest.CaptureFixture[str]) -> None:
    adapters(host, "load", "good")
    capsys.readouterr()
    assert adapters(host, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    [one] = host.do(host.registry.describe)
    assert listed == {
        "adapters": [
            {
                "name": "good",
                "content_hash": one.content_hash.hex(),
                "rank": 3,
                "size_bytes": one.num_bytes,
                "state": "registered",
                "pinned": False,
                "sequences": 0,
                "modules_elsewhere": 0,
                "shared": False,
            }
        ],
        "used_bytes": one.num_bytes,
        "limit_bytes": LIMIT_BYTES,
        "slots_used": 0,
        "slots_total": 2,
    }


def test_what_is_wrong_is_told_in_one_line(
    host: AdapterHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: dict[tuple[object, ...], str] = {
        ("load", "nothing"): "name: expected a directory of adapters, found none",
        ("load", ".hidden"): "name: expected 1 .. 64 of",
        (
            "load",
            "mine",
            "--from",
            tmp_path / "none",
        ): f"--from: {tmp_path / 'none'}: expected a directory, found nothing",
        ("load", "good", "--timeout", "-1"): "timeout: expected a positive number of seconds",
        ("unload", "nothing"): "no adapter has the name 'nothing'",
    }
    for (action, *arguments), message in wrong.items():
        assert adapters(host, str(action), *arguments) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"deltaline: error: {message}") and err.count("\n") == 1
    adapters(host, "load", "good")
    number = host.do(lambda: host.registry.bind("good"))
    capsys.readouterr()
    assert adapters(host, "unload", "good") == 1
    message = "open sequences that use the adapter: 1; close them, or unload it with drain"
    assert capsys.readouterr().err == f"deltaline: error: {message}\n"
    host.do(lambda: host.registry.release(number))


@pytest.fixture
def full(host: AdapterHost) -> Iterator[int]:
    """A host whose memory is taken by "good", which a sequence uses; yields what to release."""
    assert adapters(host, "load", "good") == 0
    [one] = host.do(host.registry.describe)
    host.do(lambda: setattr(host.registry, "limit_bytes", 2 * one.num_bytes - 1))
    number = host.do(lambda: host.registry.bind("good"))
    yield number
    host.service.before_load = lambda: None
    host.do(lambda: setattr(host.registry, "limit_bytes", LIMIT_BYTES))


def test_a_load_that_waits_for_memory_says_so_once(
    host: AdapterHost, full: int, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    before = len(host.service.calls)

    def before_load() -> None:
        if len(host.service.calls) == before + 3:
            host.registry.release(full)

    host.service.before_load = before_load
    assert adapters(host, "load", "mine", "--from", host.directory, "--timeout", 100) == 0
    out, err = capsys.readouterr()
    assert out.startswith("mine is loaded") and len(host.service.calls) == before + 3
    notes = [line for line in err.splitlines() if not line.startswith("sent: ")]
    assert len(notes) == 1 and notes[0].startswith("refused, waiting for adapter memory: ")
    assert notes[0].endswith("; up to 100 s, see --timeout")


def test_a_load_gives_up_waiting_for_memory(
    host: AdapterHost, full: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    clock = itertools.count(0.0, 60.0)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    before = len(host.service.calls)
    assert adapters(host, "load", "mine", "--from", host.directory) == 1
    assert len(host.service.calls) == before + 2  # the server says: again after a second
    note, error = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("sent: "))
    assert note.endswith("; up to 60 s, see --timeout")
    message = note.removeprefix("refused, waiting for adapter memory: ").removesuffix("; up to 60 s, see --timeout")
    assert error == f"deltaline: error: {message}"
    host.do(lambda: host.registry.release(full))


class Terminal(io.StringIO):
    """Where progress is shown in place."""

    def isatty(self) -> bool:
        return True


def test_progress_at_a_terminal(host: AdapterHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert adapters(host, "load", "mine", "--from", host.directory) == 0
    shown = terminal.getvalue().split("\r")[1:]
    assert shown[0].startswith("sent: 0 B of ") and shown[0].endswith(" s\x1b[K")
    assert shown[-1].endswith(" s\x1b[K\n") and len(shown) >= 2


def test_modules_that_are_served_elsewhere_are_told(host: AdapterHost, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = dict(host.tensors)
    for part, shape in (("lora_A", (3, 24)), ("lora_B", (512, 3))):
        like = host.tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
        name = f"base_model.model.model.layers.2.self_attn.k_proj.{part}.weight"
        tensors[name] = like.new_zeros(shape)
    host.write("wide", tensors)
    assert adapters(host, "load", "wide") == 0
    assert capsys.readouterr().out.endswith("\nit changes 1 more module, which this server does not serve\n")
