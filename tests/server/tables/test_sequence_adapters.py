"""The adapter of a sequence: bound when it opens, told, and let go of when it ends."""

from __future__ import annotations

import numpy as np
import pytest
from rigs.adapter_rig import FakeContent
from rigs.scheduler_rig import Rig, refuses

from deltaline_server.errors import Reason
from deltaline_server.principal import ANONYMOUS
from deltaline_server.tables.sequence_adapters import BASE

TOKEN = b"0123456789abcdef"


def make_rig(*names: str, adapter_slots: int = 1, slots: int = 8) -> Rig:
    rig = Rig(slots=slots, adapter_slots=adapter_slots)
    rig.load(*names)
    return rig


def test_what_is_bound_is_told_and_ends_with_the_sequence() -> None:
    rig = make_rig("1", "2")
    one, base = rig.table.open(2, adapter="1"), rig.table.open(1)
    assert (one.adapter.name, one.adapter.content_hash, base.adapter) == ("1", b"1", BASE)
    handles = np.concatenate([one.handles, base.handles])
    described = rig.table.describe(rig.table.server_epoch, handles)
    assert [(d.adapter.name, d.adapter.content_hash) for d in described] == [("1", b"1")] * 2 + [("", b"")]
    assert rig.registry.bound() == {1: 2} and rig.table.adapters.num_bound == 2
    with refuses(Reason.ADAPTER_IN_USE):
        rig.registry.unload("1", drain=False)
    rig.table.close(rig.table.server_epoch, one.handles[:1])
    rig.now += 61
    rig.table.reap()  # comes late, so it waits for the next
    rig.table.reap()
    assert rig.table.num_open == 0 and rig.registry.bound() == {} and rig.table.adapters.num_bound == 0
    assert rig.table.describe(rig.table.server_epoch, one.handles)[0].adapter == BASE
    assert rig.registry.unload("1", drain=False) == 0
    rig.table.check_integrity()


@pytest.mark.parametrize(
    ("adapter_slots", "count", "name", "expected"),
    [(1, 2, "x", Reason.ADAPTER_UNKNOWN), (0, 2, "1", Reason.ADAPTERS_OFF), (1, 3, "1", Reason.NO_FREE_LINES)],
)
def test_what_is_not_opened_binds_nothing(adapter_slots: int, count: int, name: str, expected: Reason) -> None:
    rig = make_rig("1", slots=2, adapter_slots=adapter_slots)
    with refuses(expected):
        rig.open(count, name)
    assert rig.table.num_open == 0 and rig.registry.bound() == {}
    rig.table.check_integrity()


def test_a_name_is_looked_up_without_a_trace() -> None:
    rig = make_rig("1", "2")
    named = rig.table.adapters.content_hash
    assert [named(name, ANONYMOUS) for name in ("", "1", "2")] == [b"", b"1", b"2"]
    assert rig.registry.bound() == {} and [one.name for one in rig.registry.describe()] == ["1", "2"]
    with refuses(Reason.ADAPTER_UNKNOWN):
        named("x", ANONYMOUS)
    with refuses(Reason.ADAPTERS_OFF):
        make_rig(adapter_slots=0).table.adapters.content_hash("1", ANONYMOUS)


def test_an_open_token_is_for_one_adapter_and_for_one_content() -> None:
    rig = make_rig("1", "2")
    first = rig.table.open(2, token=TOKEN, adapter="1")
    for adapter in ("2", ""):
        with refuses(Reason.INVALID_REQUEST) as refused:
            rig.table.open(2, token=TOKEN, adapter=adapter)
        assert refused.value.refusal.field == "open_token"
    rig.registry.unload("1", drain=True)
    rig.registry.reserve(10)
    rig.registry.register("1", FakeContent(b"77"), False)
    again = rig.table.open(2, token=TOKEN, adapter="1")
    assert again is first and again.adapter.content_hash == b"1"
    assert rig.registry.bound() == {1: 2}
    assert rig.table.open(1, adapter="1").adapter.content_hash == b"77"
    rig.table.check_integrity()
