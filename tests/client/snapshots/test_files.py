"""Snapshots as files through both clients: whole or not at all, and sent again when an answer is lost."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from client.snapshots.test_snapshots import follows, prompted

from deltaline_client import HostTierOff, NoSnapshotLines, SnapshotUnknown, StateDamaged, Unavailable
from deltaline_server.errors import Reason


def saved(driven: Any) -> tuple[Any, bytes]:
    """A sequence, and a snapshot of it as a file."""
    sequence = prompted(driven)
    return sequence, driven.do(driven.do(sequence.snapshot()).export())


def test_what_was_saved_is_loaded_and_gone_on_from(driven: Any, server: Any, tmp_path: Path) -> None:
    sequence, content = saved(driven)
    path = tmp_path / "state"
    [snapshot] = driven.do(driven.client.snapshots.list())
    driven.do(snapshot.save(path))
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["state"]
    driven.do(snapshot.save(str(path)))
    for source in (path, str(path), content):
        came = driven.do(driven.client.snapshots.load(source, pin=True, lease_s=9.0))
        assert (came.position, came.pinned, came.lease_remaining_s) == (5, True, 9.0) and came.id != snapshot.id
        [child] = driven.do(came.restore())
        assert follows(driven, child)
    assert follows(driven, sequence)


def test_a_state_goes_in_chunks_that_the_server_takes(driven: Any, server: Any) -> None:
    _, content = saved(driven)
    server.info.inline_limit_bytes = 64
    driven.do(driven.client.info(refresh=True))
    driven.do(driven.client.snapshots.load(content))
    [pieces] = server.states.pieces
    assert pieces[0] == b"" and b"".join(pieces) == content
    assert set(map(len, pieces[1:-1])) == {64} and 0 < len(pieces[-1]) <= 64


def test_a_load_whose_answer_is_lost_is_done_once(driven: Any, server: Any) -> None:
    _, content = saved(driven)
    num_before = len(driven.do(driven.client.snapshots.list()))
    server.lose("ImportState")
    server.refuse("ImportState", Reason.NO_SNAPSHOT_LINES, retry_after_s=0.001)
    server.lose("ImportState")
    came = driven.do(driven.client.snapshots.load(content))
    asked = server.requests["ImportState"]
    assert len(asked) == 4 and len({one.request_id for one in asked}) == 1
    assert len(driven.do(driven.client.snapshots.list())) == num_before + 1
    other = driven.do(driven.client.snapshots.load(content))
    assert other.id != came.id and asked[-1].request_id != asked[0].request_id


def test_an_export_that_breaks_begins_anew(driven: Any, server: Any, tmp_path: Path) -> None:
    _, content = saved(driven)
    [snapshot] = driven.do(driven.client.snapshots.list())
    for _ in range(2):
        server.lose("ExportState")
    driven.do(snapshot.save(tmp_path / "state"))
    assert (tmp_path / "state").read_bytes() == content
    server.lose("ExportState", grpc.StatusCode.CANCELLED)
    assert driven.do(snapshot.export()) == content


def test_what_is_refused_leaves_no_file(driven: Any, once: Any, server: Any, tmp_path: Path) -> None:
    saved(driven)
    path = tmp_path / "state"
    path.write_bytes(b"before")
    [snapshot] = driven.do(once.snapshots.list())
    server.lose("ExportState")
    with pytest.raises(Unavailable):
        driven.do(snapshot.save(path))
    server.refuse("ExportState", Reason.HOST_TIER_OFF)
    with pytest.raises(HostTierOff):
        driven.do(snapshot.save(path))
    driven.do(snapshot.release())
    with pytest.raises(SnapshotUnknown):
        driven.do(snapshot.save(path))
    assert os.listdir(tmp_path) == ["state"] and path.read_bytes() == b"before"
    for reason, error in ((Reason.STATE_DAMAGED, StateDamaged), (Reason.NO_SNAPSHOT_LINES, NoSnapshotLines)):
        server.refuse("ImportState", reason)
        with pytest.raises(error):
            driven.do(once.snapshots.load(b"x"))


def test_a_disk_that_fails_ends_the_call(driven: Any, server: Any, tmp_path: Path) -> None:
    saved(driven)
    [snapshot] = driven.do(driven.client.snapshots.list())
    server.states.kept[snapshot.id].streams[0].total = np.ones(10_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            driven.do(snapshot.save(tmp_path / "state"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []
    driven.do(snapshot.save(tmp_path / "state"))
    assert len(server.requests["ExportState"]) == 3 and os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("source", [None, bytearray(b"x"), "a file that is open"])
def test_a_source_is_a_path_or_bytes(driven: Any, tmp_path: Path, source: Any) -> None:
    """Not a number, which `open` would take for a file that is open, and close."""
    with open(tmp_path / "other", "wb") as other:
        given = other.fileno() if source == "a file that is open" else source
        for load in (driven.client.snapshots.load, driven.client.load_sequence):
            expected = f"^source: expected a file's path, or the bytes, got {type(given).__name__}$"
            with pytest.raises(TypeError, match=expected):
                driven.do(load(given))
        os.fstat(other.fileno())
