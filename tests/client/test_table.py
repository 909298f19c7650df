"""The table of sequences: slots are taken, kept and given back, and numbers stay with their sequence."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from deltaline_client import Client, SequenceBusy
from deltaline_client._steps.sequence import SequenceRecord
from deltaline_client._steps.sequences import begin
from deltaline_client._table import Column, Home, SequenceTable, Slots
from deltaline_client._transport.flow import Server

SEVEN = Server(7, "")


def record(client: Client, handle: int) -> SequenceRecord:
    (made,) = begin(client, SequenceRecord, SEVEN, [handle], 0, None, b"")
    return made


def test_a_sequence_begins_anew_in_the_slot_of_one_that_nobody_has() -> None:
    client = Client("unix:/nowhere")
    first = record(client, 1)
    first.progress().write({Column.STEP: 5, Column.POSITION: 9, Column.PENDING: 2, Column.COMMIT: 1})
    first.progress(1).write({Column.STEP: 3})
    assert (first.progress().step, first.position, first.progress(1).step) == (5, 9, 3)
    del first
    gc.collect()
    for handle in range(2, 200):  # every slot is taken, and more
        sequence = record(client, handle)
        for span in (0, 1):
            progress = sequence.progress(span)
            assert (progress.step, progress.position, progress.pending_tokens, progress.accepted) == (0, 0, 0, None)
            assert not progress.busy and not progress.commit_in_doubt and progress.unfinished is None


def test_numbers_stay_when_the_table_grows() -> None:
    table = SequenceTable()
    slots = np.array(table.take([11, 12, 13], SEVEN))
    ledger = table.ledger(0)
    numbers, is_plain = ledger.hold(slots[:2])
    assert is_plain and not numbers.any()
    ledger.write(slots, {Column.STEP: np.array([1, 2, 3]), Column.POSITION: 4})
    more = table.take(range(100, 1100), SEVEN)
    assert len({*slots.tolist(), *more}) == 1003
    assert [table.home(slot) for slot in slots.tolist()] == [Home(SEVEN, handle) for handle in (11, 12, 13)]
    assert [ledger.read(slot, Column.STEP) for slot in slots.tolist()] == [1, 2, 3]
    with pytest.raises(SequenceBusy):
        ledger.hold(slots[1:])
    ledger.let_go(slots[:2])
    numbers, is_plain = ledger.hold(slots[::-1])
    assert is_plain and numbers[: Column.PENDING].tolist() == [[3, 2, 1], [4, 4, 4]]


@pytest.mark.parametrize("column", [Column.PENDING, Column.COMMIT, Column.COMMIT_IN_DOUBT, Column.UNFINISHED])
def test_what_is_not_plain_is_told(column: Column) -> None:
    table = SequenceTable()
    slots = np.array(table.take([11, 12, 13], SEVEN))
    ledger = table.ledger(2)
    ledger.write(slots[1:2], {column: 1})
    numbers, is_plain = ledger.hold(slots)
    assert not is_plain and numbers[column].tolist() == [0, 1, 0]


def test_server_processes_are_told_apart() -> None:
    table = SequenceTable()
    slots = np.array(table.take([1, 2], SEVEN) + table.take([3], Server(8, "")))

    def have_one_epoch(slots: Slots) -> bool:
        return table.homes(slots)[2]

    assert have_one_epoch(slots[:2]) and have_one_epoch(slots[2:])
    assert not have_one_epoch(slots)


def test_a_move_counts_for_those_that_have_not_left_already() -> None:
    table = SequenceTable()
    slots = np.array(table.take([1, 2], SEVEN))
    first, second = slots.tolist()
    owner = Home(Server(8, "b:1"), 5)
    table.move(first, Home(Server(7, "known by a name"), 1), owner)
    assert (table.home(first), table.home(second)) == (owner, Home(SEVEN, 2))
    server, handles, has_one_epoch, moves = table.homes(slots)
    assert (server, handles.tolist(), has_one_epoch, moves) == (owner.at, [5, 2], False, 1)
    table.move(first, Home(SEVEN, 1), Home(Server(9, "c:1"), 6))
    assert (table.home(first), table.moves) == (owner, 1)


def test_what_is_written_while_the_table_grows_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    append, copied = np.append, threading.Event()

    def slow_append(*arguments: Any, **options: Any) -> Any:
        made = append(*arguments, **options)
        if made.ndim == 2:  # a ledger's
            copied.set()
            time.sleep(0.05)  # what is written to the former array now is lost
        return made

    table = SequenceTable()
    (slot,) = table.take([1], SEVEN)
    ledger = table.ledger(0)
    monkeypatch.setattr(np, "append", slow_append)
    grower = threading.Thread(target=lambda: table.take(range(2, 100), SEVEN))
    grower.start()
    assert copied.wait(60)
    ledger.write(slot, {Column.STEP: 5})
    grower.join()
    assert ledger.read(slot, Column.STEP) == 5
