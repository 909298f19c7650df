"""Forks and snapshots through both clients: sequences that go on from a state, and calls whose answers are lost."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from rigs.running_sum import HIDDEN, tokens

from deltaline_client import (
    ProtocolError,
    Retry,
    SequenceExpired,
    SnapshotState,
    SnapshotUnknown,
    SpansUneven,
    StepUnfinished,
    Tier,
    Unavailable,
    VerifyPending,
)
from deltaline_server.errors import Reason

PROMPT = tokens(5)


def prompted(driven: Any, **options: Any) -> Any:
    """A sequence with a prompt on both spans."""
    sequence = driven.do(driven.client.open(**options))
    for span in (0, 1):
        driven.do(sequence.prefill(PROMPT, span=span))
    return sequence


def follows(driven: Any, sequence: Any, seed: int = 1, before: Any = PROMPT) -> bool:
    """Whether a sequence goes on from the tokens before."""
    token = tokens(1, seed)[0]
    outputs = [driven.do(sequence.decode(token, span=span)) for span in (0, 1)]
    return all(np.array_equal(output, before.sum(axis=0) + token) for output in outputs)


@pytest.fixture
def asks(server: Any) -> Any:
    """How often each method was called, and with how many ids."""

    def told(method: str) -> tuple[int, int]:
        requests = server.requests[method]
        return len(requests), len({request.request_id for request in requests})

    return told


# -- forks -----------------------------------------------------------------------------------------------------------


def test_children_go_on_where_their_parent_is(driven: Any) -> None:
    parent = prompted(driven)
    children = driven.do(parent.fork(3))
    assert [child.position for child in children] == [5] * 3 and len({child.handle for child in children}) == 3
    assert {type(child) for child in children} == {type(parent)}
    assert all(child.server_epoch == parent.server_epoch for child in children)
    assert [child.progress(span).step for child in children for span in (0, 1)] == [0] * 6
    for seed, sequence in enumerate((parent, *children)):
        assert follows(driven, sequence, seed)
    [grandchild] = driven.do(children[0].fork())
    assert grandchild.position == 6
    outputs = driven.do(driven.client.decode([parent, grandchild], tokens(2)))
    assert outputs.shape == (2, HIDDEN), "they step in one batch"


def test_a_fork_whose_answer_is_lost_is_made_once(driven: Any, server: Any, asks: Any) -> None:
    parent = prompted(driven)
    server.lose("ForkSequences")
    server.refuse("ForkSequences", Reason.NO_FREE_LINES, 0.001)
    children = driven.do(parent.fork(2, lease_s=9.0))
    assert asks("ForkSequences") == (3, 1) and len(server.streams) == 3
    assert {request.lease_ms for request in server.requests["ForkSequences"]} == {9000}
    driven.do(parent.fork())
    assert asks("ForkSequences") == (4, 2), "another call is another fork"
    assert [child.position for child in children] == [5, 5]


def test_a_commit_that_waits_is_made_before_the_state_is_used(driven: Any, server: Any) -> None:
    parent, drafts = prompted(driven), tokens(3, seed=7)
    for span in (0, 1):
        driven.do(parent.verify(drafts, span=span))
    with pytest.raises(VerifyPending):
        driven.do(parent.fork())
    for span in (0, 1):
        driven.do(parent.commit(2, span=span))
    [child] = driven.do(parent.fork())
    [snapshot] = driven.do(driven.client.snapshots.create([parent]))
    assert child.position == parent.position == snapshot.position == 7
    assert follows(driven, child, before=np.concatenate([PROMPT, drafts[:2]]))
    assert follows(driven, parent, before=np.concatenate([PROMPT, drafts[:2]]))


def test_spans_at_different_positions_have_no_state_to_use(driven: Any) -> None:
    parent = prompted(driven)
    driven.do(parent.decode(tokens(1)[0]))
    with pytest.raises(SpansUneven):
        driven.do(parent.fork())
    driven.do(parent.decode(tokens(1)[0], span=1))
    assert len(driven.do(parent.fork())) == 1


def test_a_step_with_an_unknown_outcome_comes_first(driven: Any, server: Any, once: Any) -> None:
    parent = driven.do(once.open())
    server.lose("Step")
    with pytest.raises(Unavailable):
        driven.do(parent.decode(tokens(1)[0]))
    calls: Any = (parent.fork, lambda: once.snapshots.create([parent]))
    for call in calls:
        with pytest.raises(StepUnfinished, match="resume it first"):
            driven.do(call())
    assert not server.requests["ForkSequences"] and not server.requests["CreateSnapshots"]
    driven.do(parent.resume())
    driven.do(parent.decode(tokens(1)[0], span=1))
    assert [child.position for child in driven.do(parent.fork())] == [1]


def test_a_fork_lets_go_of_its_parent_however_it_ends(driven: Any, server: Any, once: Any) -> None:
    parent = driven.do(once.open())
    server.lose("ForkSequences")
    with pytest.raises(Unavailable):
        driven.do(parent.fork())
    server.streams.pop(parent.handle)
    with pytest.raises(SequenceExpired):
        driven.do(parent.fork())
    assert not any(parent.progress(span).busy for span in (0, 1))


@pytest.mark.parametrize("count", [1.5, "2", None])
def test_a_count_is_a_whole_number(driven: Any, server: Any, count: Any) -> None:
    sequence = prompted(driven)
    [snapshot] = driven.do(driven.client.snapshots.create([sequence]))
    for call in (sequence.fork, snapshot.restore):
        with pytest.raises(TypeError, match=f"count: expected a whole number, got {count!r}"):
            driven.do(call(count))


def test_more_than_a_server_has_are_not_asked_for(driven: Any, server: Any) -> None:
    sequence = prompted(driven)
    [snapshot] = driven.do(driven.client.snapshots.create([sequence]))
    most = driven.do(driven.client.info()).max_sequences
    for call in (sequence.fork, snapshot.restore):
        with pytest.raises(ValueError, match=f"count: expected 1 .. {most}, got {2**40}"):
            driven.do(call(2**40))
    assert not server.requests["RestoreSequences"] and not server.requests["ForkSequences"]


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_is_one_or_more(driven: Any, server: Any, count: int) -> None:
    parent = prompted(driven)
    [snapshot] = driven.do(driven.client.snapshots.create([parent]))
    for call in (parent.fork, snapshot.restore):
        with pytest.raises(ValueError, match=f"count: expected 1 or more, got {count}"):
            driven.do(call(count))
    assert not server.requests["ForkSequences"] and not server.requests["RestoreSequences"]


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_sequences_go_on_from_a_snapshot_after_its_own_is_closed(driven: Any, server: Any) -> None:
    server.adapters["french"] = b"\x01" * 32
    parent = prompted(driven, adapter="french")
    [child] = driven.do(parent.fork())
    assert (child.adapter, child.adapter_hash) == ("french", b"\x01" * 32)
    [snapshot] = driven.do(driven.client.snapshots.create([parent], pin=True, lease_s=30.0))
    assert (snapshot.position, snapshot.pinned, snapshot.lease_remaining_s, snapshot.tier) == (5, True, 30, Tier.DEVICE)
    assert (snapshot.adapter, snapshot.adapter_hash, snapshot.size_bytes) == ("french", b"\x01" * 32, 3 << 20)
    assert snapshot.created_s == 1_700_000_000.5
    assert repr(snapshot).endswith(f"Snapshot(id={snapshot.id.hex()}, position=5, adapter='french', pinned)")
    driven.do(parent.close())
    first, second = driven.do(snapshot.restore(2, lease_s=8.0))
    third = driven.do(driven.client.open(snapshot=snapshot))
    fourth, fifth = driven.do(driven.client.open_many(2, snapshot=snapshot.id))
    assert server.requests["RestoreSequences"][0].lease_ms == 8000
    for seed, sequence in enumerate((first, second, third, fourth, fifth)):
        assert (sequence.adapter, sequence.adapter_hash, sequence.position) == ("french", b"\x01" * 32, 5)
        assert type(sequence) is type(parent) and follows(driven, sequence, seed)


def test_calls_whose_answers_are_lost_are_done_once(driven: Any, server: Any, asks: Any) -> None:
    parent = prompted(driven)
    for method in ("CreateSnapshots", "RestoreSequences", "RenewSnapshots", "ReleaseSnapshots", "OpenSequences"):
        server.lose(method, grpc.StatusCode.UNAVAILABLE)
    [snapshot] = driven.do(driven.client.snapshots.create([parent]))
    driven.do(snapshot.restore())
    driven.do(driven.client.open(snapshot=snapshot))
    assert driven.do(snapshot.renew(5.0)) is SnapshotState.HELD
    driven.do(snapshot.release())
    for method in ("CreateSnapshots", "RestoreSequences", "RenewSnapshots", "ReleaseSnapshots"):
        assert asks(method) == (2, 1)
    assert len({request.open_token for request in server.requests["OpenSequences"]}) == 2
    assert len(server.streams) == 3 and not server.states.kept


def test_a_snapshot_that_is_over(driven: Any, server: Any) -> None:
    [snapshot] = driven.do(driven.client.snapshots.create([prompted(driven)]))
    driven.do(snapshot.release())
    driven.do(snapshot.release())
    assert driven.do(snapshot.renew()) is SnapshotState.UNKNOWN
    calls: Any = (snapshot.restore, lambda: driven.client.open(snapshot=snapshot))
    for call in calls:
        with pytest.raises(SnapshotUnknown):
            driven.do(call())


def test_many_snapshots_are_listed_renewed_and_released(driven: Any, server: Any) -> None:
    sequences = [prompted(driven) for _ in range(4)]
    mine = driven.client.snapshots
    made = driven.do(mine.create(sequences)) + driven.do(mine.create(sequences[:3]))
    listed = driven.do(mine.list())
    assert [one.id for one in listed] == sorted(one.id for one in made) and {type(one) for one in listed} == {
        type(made[0])
    }
    assert len(server.requests["ListSnapshots"]) == 3, "three at a time"
    held, unknown, released = SnapshotState.HELD, SnapshotState.UNKNOWN, SnapshotState.RELEASED
    assert driven.do(mine.renew([made[0], bytes(16)], 7.0)) == [held, unknown]
    assert driven.do(mine.release([made[0].id, made[1], bytes(16)])) == [released, released, unknown]
    assert len(driven.do(mine.list())) == 5
    [child] = driven.do(listed[-1].restore())
    assert follows(driven, child)
    assert driven.do(mine.renew([])) == [] and driven.do(mine.release([bytes(16)] * 5000)) == [unknown] * 5000
    assert [len(request.snapshot_id) for request in server.requests["ReleaseSnapshots"]] == [3, 4096, 904]


def test_a_snapshot_as_a_context_is_released(driven: Any, server: Any) -> None:
    [snapshot] = driven.do(driven.client.snapshots.create([prompted(driven)]))
    if hasattr(snapshot, "__enter__"):
        with snapshot as same:
            assert same is snapshot and server.states.kept
    else:

        async def enter() -> None:
            async with snapshot as same:
                assert same is snapshot and server.states.kept

        driven.do(enter())
    assert not server.states.kept


def test_the_error_of_a_context_goes_before_that_of_its_release(driven: Any, server: Any, once: Any) -> None:
    [snapshot] = driven.do(once.snapshots.create([driven.do(once.open())]))
    for _ in range(2):
        server.lose("ReleaseSnapshots")

    def use(error: Exception | None) -> Any:
        if hasattr(snapshot, "__enter__"):
            with snapshot:
                if error is not None:
                    raise error
            return None

        async def enter() -> None:
            async with snapshot:
                if error is not None:
                    raise error

        return enter()

    with pytest.raises(KeyError):
        driven.do(use(KeyError()))
    with pytest.raises(Unavailable):
        driven.do(use(None))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"snapshot": b""}, ValueError, "snapshot: expected an id of 16 bytes, got 0"),
        ({"snapshot": "00"}, TypeError, "snapshot: expected a snapshot or its id, got str"),
        ({"snapshot": bytes(16), "adapter": "a"}, ValueError, "adapter: expected none beside a snapshot"),
    ],
)
def test_what_is_no_snapshot_opens_nothing(
    driven: Any, server: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        driven.do(driven.client.open(**arguments))
    assert not server.requests["OpenSequences"]


def test_an_older_server_is_not_asked_to_begin_with_a_snapshot(driven: Any, server: Any) -> None:
    """It would not know the field, and open with zero state."""
    server.info.serves_state = False
    with pytest.raises(SnapshotUnknown, match="the server keeps none"):
        driven.do(driven.client.open(snapshot=bytes(16)))
    assert not server.requests["OpenSequences"]


def test_sequences_of_nobody_or_of_two_servers_have_no_snapshot(driven: Any, server: Any) -> None:
    one = driven.do(driven.client.open())
    server.info.server_epoch = 78
    other = driven.do(driven.client.open())
    for sequences, told in (([], "got 0 of 0"), ([one, other], "got 2 of 2")):
        with pytest.raises(ValueError, match=f"sequences: expected some of one server process, {told}"):
            driven.do(driven.client.snapshots.create(sequences))


def test_answers_that_contradict_the_request(driven: Any, server: Any) -> None:
    parent = prompted(driven)
    [snapshot] = driven.do(driven.client.snapshots.create([parent]))
    server.states.empty_answers = {"ForkSequences", "CreateSnapshots", "RestoreSequences", "RenewSnapshots"}
    calls: Any = (
        parent.fork,
        snapshot.restore,
        lambda: driven.client.snapshots.create([parent]),
        lambda: driven.client.snapshots.renew([snapshot]),
    )
    for call in calls:
        with pytest.raises(ProtocolError):
            driven.do(call())
    server.states.empty_answers = set()
    server.states.kept[snapshot.id].message.tier = 9
    with pytest.raises(ProtocolError, match="tier"):
        driven.do(driven.client.snapshots.list())


def test_what_was_opened_is_not_lost_where_another_process_answers_and_tells_no_more(driven: Any, server: Any) -> None:
    parent = prompted(driven)
    [snapshot] = driven.do(driven.client.snapshots.create([parent]))
    client = driven.make(server.address, retry=Retry(max_attempts=1))
    opens: Any = (lambda: snapshot.restore(2), lambda: client.open_many(2, snapshot=snapshot.id))
    driven.do(client.info())
    for epoch, call in enumerate(opens, 78):
        server.info.server_epoch = epoch
        server.refuse("GetServerInfo", Reason.ROLE_MISSING)
        made = driven.do(call())
        server.faults["GetServerInfo"].clear()
        assert [one.progress(span).position for one in made for span in (0, 1, 0)] == [5] * 6
        assert {one.server_epoch for one in made} == {epoch} and follows(driven, made[0])
    driven.do(client.disconnect())
