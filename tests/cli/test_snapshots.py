"""`deltaline snapshots`: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rigs.running_sum import tokens

from deltaline.sizes import readable_bytes
from deltaline_cli import snapshots as command
from deltaline_cli.main import main
from deltaline_client import Client

NOW_S = 1_700_000_000.5 + 3 * 3600 + 60


@pytest.fixture
def ids(server: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three snapshots; the second was made first, and has an adapter."""
    monkeypatch.setattr(command, "time", SimpleNamespace(time=lambda: NOW_S))
    server.adapters["french"] = b"\xab" * 32
    with Client(server.address) as client:
        one, other = client.open(), client.open(adapter="french")
        for span in (0, 1):
            client.prefill([one, other], [tokens(5), tokens(12)], span=span)
        made = client.snapshots.create([one, other, client.open()], pin=True, lease_s=90.0)
    kept = server.states.kept
    for number, snapshot in enumerate(made):  # ids that differ at their beginning
        new = bytes([0x1F, number]) + bytes(13) + b"\x07"
        kept[new] = kept.pop(snapshot.id)
        kept[new].message.snapshot_id = new
    first, second, third = kept
    kept[second].message.created_ms -= 2 * 86_400_000
    kept[third].message.pinned, kept[third].message.lease_remaining_ms = False, 59_999
    return [first.hex(), second.hex(), third.hex()]


def snapshots(server: Any, *arguments: str) -> int:
    return main(["snapshots", *arguments, "--server", server.address])


def test_a_list_begins_with_the_oldest_and_lines_up(
    server: Any, ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert snapshots(server, "list") == 0
    heading, *rows, total = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        [ids[1][:12], "12", "french", "yes", "3.0", "MiB", "device", "2", "d", "1", "min"],
        [ids[0][:12], "5", "-", "yes", "3.0", "MiB", "device", "3", "h", "1", "min"],
        [ids[2][:12], "0", "-", "no", "3.0", "MiB", "device", "3", "h", "59", "s"],
    ]
    for name, cell in (("adapter", "french"), ("pinned", "yes"), ("tier", "device")):
        assert heading.index(name) == rows[0].index(cell)
    assert heading.index("position") + len("position") == rows[0].index("12  ") + 2
    assert {len(row) for row in (heading, *rows)} == {len(heading)}
    assert total == "3 snapshots, 9.0 MiB"


def test_an_empty_list(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert snapshots(server, "list") == 0
    assert capsys.readouterr().out == "no snapshots, 0 B\n"


def test_ids_that_begin_alike_are_shown_apart(server: Any, ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    kept, twin = server.states.kept, bytes.fromhex(ids[0])[:15] + b"\x08"
    kept[twin] = copy.deepcopy(kept[bytes.fromhex(ids[0])])
    kept[twin].message.snapshot_id = twin
    assert snapshots(server, "list") == 0
    rows = capsys.readouterr().out.splitlines()[1:-1]
    assert {ids[0], twin.hex()} <= {row.split()[0] for row in rows}
    assert snapshots(server, "show", ids[0][:31]) == 1
    assert "with which 2 begin: give more digits" in capsys.readouterr().err


def test_a_list_for_programs(server: Any, ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert snapshots(server, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["snapshots"]
    assert [one["id"] for one in listed] == [ids[1], ids[0], ids[2]]
    assert listed[0] == {
        "id": ids[1],
        "position": 12,
        "adapter": "french",
        "adapter_hash": "ab" * 32,
        "pinned": True,
        "size_bytes": 3 << 20,
        "tier": "device",
        "created_s": 1_700_000_000.5 - 2 * 86_400,
        "lease_remaining_s": 90.0,
    }
    assert listed[1]["adapter"] is None


def test_one_is_shown(server: Any, ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert snapshots(server, "show", "1F01") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"id        {ids[1]}",
        "position  12 tokens",
        f"adapter   french, hash {'ab' * 32}",
        "pinned    yes",
        "size      3.0 MiB, what it shares with others included",
        "tier      device",
        "made      2023-11-12 22:13:20 UTC, 2 d ago",
        "lease     1 min left",
    ]
    assert snapshots(server, "show", ids[2]) == 0
    shown = capsys.readouterr().out
    assert "adapter   none" in shown and "pinned    no, it gives way when memory is short" in shown


def test_some_are_released(server: Any, ids: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    server.lose("ReleaseSnapshots")
    assert snapshots(server, "release", "1f00", "1f02", "1f00") == 0
    assert capsys.readouterr().out == f"{ids[0]} is released\n{ids[2]} is released\n"
    assert [one.hex() for one in server.states.kept] == [ids[1]]


def test_one_that_is_over_meanwhile_is_no_error(
    server: Any, ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone(dict[bytes, Any]):
        def pop(self, *_: Any) -> None:
            """Nothing: it was released since it was listed."""

    server.states.kept = Gone(server.states.kept)
    assert snapshots(server, "release", "1f01") == 0
    assert capsys.readouterr().out == f"{ids[1]} was over: unknown\n"


def test_nothing_is_released_when_one_id_is_wrong(
    server: Any, ids: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in (
        (["1f00", "77"], "expected the beginning of one snapshot's id, got 77, with which none begins"),
        (["1f"], "got 1f, with which 3 begin: give more digits"),
    ):
        assert snapshots(server, "release", *arguments) == 1
        assert told in capsys.readouterr().err
    for wrong in ("xyz", "", "0" * 33):
        with pytest.raises(SystemExit) as ended:
            snapshots(server, "release", wrong)
        assert ended.value.code == 2
        assert f"expected 1 to 32 hexadecimal digits, got {wrong!r}" in capsys.readouterr().err
    assert len(server.states.kept) == 3 and not server.requests["ReleaseSnapshots"]


def test_the_help_tells_what_a_snapshot_is(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in ((["snapshots"], "go on"), (["snapshots", "list"], "lease"), (["snapshots", "show"], "ID")):
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        shown = capsys.readouterr().out
        assert told in shown and all(len(line) <= 120 for line in shown.splitlines())


def test_info_tells_of_snapshots(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for serves, told in ((True, "4 lines beyond those of sequences"), (False, "none")):
        server.info.serves_state = serves
        assert main(["info", server.address]) == 0
        assert f"snapshots       {told}" in capsys.readouterr().out.splitlines()


def test_a_state_is_saved_to_a_file_and_loaded_from_it(
    server: Any, ids: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "state"
    assert snapshots(server, "save", ids[1][:4], str(path)) == 0
    size = path.stat().st_size
    assert capsys.readouterr().out == f"{ids[1]} is saved, {readable_bytes(size)}\n" and size > 0
    assert snapshots(server, "load", str(path), "--pin", "--lease", "9") == 0
    id, said = capsys.readouterr().out.split(" ", 1)
    assert said == "has 12 tokens\n" and id not in ids
    made = server.states.kept[bytes.fromhex(id)].message
    assert (made.position, made.pinned, made.lease_remaining_ms, made.adapter) == (12, True, 9000, "french")
    for arguments, why in (
        (("save", ids[1], str(tmp_path / "none" / "state")), "FILE: "),
        (("load", str(tmp_path / "nothing")), "FILE: "),
        (("save", "77", str(path)), "ID: "),
    ):
        assert snapshots(server, *arguments) == 1
        assert capsys.readouterr().err.startswith(f"deltaline: error: {why}")
    assert path.stat().st_size == size
