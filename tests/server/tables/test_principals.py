"""A principal's sequences are its own: to others a handle of theirs is one that never was."""

from __future__ import annotations

import numpy as np
import pytest
from rigs.scheduler_rig import DECODE, PREFILL, Rig, outputs, reason

from deltaline_server.errors import Reason
from deltaline_server.principal import Principal
from deltaline_server.tables.sequence import SequenceState

ALICE, BOB = Principal(1, "alice"), Principal(2, "bob")


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_another_principals_handle_is_unknown(is_closed: bool) -> None:
    rig = Rig()
    epoch = rig.table.server_epoch
    handles = rig.table.open(2, principal=ALICE).handles
    if is_closed:
        rig.table.close(epoch, handles, ALICE)
    own = SequenceState.CLOSED if is_closed else SequenceState.OPEN
    for principal, state in ((BOB, SequenceState.UNKNOWN), (ALICE, own)):
        assert rig.table.lookup(epoch, handles, principal)[1].tolist() == [state, state]
        assert rig.table.renew(epoch, handles, None, principal) == [state, state]
        assert [told.state for told in rig.table.describe(epoch, handles, principal)] == [state, state]
        if principal is BOB:
            assert rig.table.close(epoch, handles, principal) == [state, state]
    ones = np.ones(2, np.int64)
    positions, refusals = rig.table.commit(epoch, 0, handles, ones, ones.astype(np.int32), BOB)
    assert positions.tolist() == [0, 0]
    assert {refusal.reason for refusal in refusals.values()} == {Reason.SEQUENCE_UNKNOWN}
    rig.table.check_integrity()


def test_a_slot_is_its_next_owners_alone() -> None:
    rig = Rig(slots=1)
    epoch = rig.table.server_epoch
    first = rig.table.open(1, principal=ALICE).handles
    rig.table.close(epoch, first, ALICE)
    second = rig.table.open(1, principal=BOB).handles
    assert rig.table.lookup(epoch, second, BOB)[1].tolist() == [SequenceState.OPEN]
    assert rig.table.lookup(epoch, second, ALICE)[1].tolist() == [SequenceState.UNKNOWN]
    assert rig.table.lookup(epoch, first, ALICE)[1].tolist() == [SequenceState.CLOSED]
    assert rig.table.lookup(epoch, first, BOB)[1].tolist() == [SequenceState.UNKNOWN]


async def test_a_step_on_anothers_sequence_is_refused_and_its_neighbour_runs() -> None:
    rig = Rig()
    (mine,), (theirs,) = rig.table.open(1, principal=ALICE).handles, rig.table.open(1, principal=BOB).handles
    rows = (int(mine), PREFILL, 1, 0, -1, [3.0]), (int(theirs), PREFILL, 1, 0, -1, [5.0])
    result = await rig.step(*rows, principal=ALICE)
    assert (reason(result, 0), reason(result, 1)) == (None, Reason.SEQUENCE_UNKNOWN)
    assert outputs(result, 0) == [3.0]
    result = await rig.step((int(theirs), DECODE, 1, 0, -1, [5.0]), principal=BOB)
    assert reason(result) is None and outputs(result) == [5.0]
