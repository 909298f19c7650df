"""The registry: names, memory, and adapters that stay as long as somebody uses them."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from rigs.adapter_rig import Clock, FakeContent, FakeDevice

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import SHARED, Principal, Quotas
from deltaline_server.tables import adapter_registry
from deltaline_server.tables.adapter_places import AdapterPlaces
from deltaline_server.tables.adapter_registry import AdapterDescription, AdapterRegistry, AdapterState


class Rig:
    def __init__(self, limit_bytes: int = 30, num_slots: int = 2) -> None:
        self.device = FakeDevice(num_slots)
        self.places = AdapterPlaces(num_slots, self.device, Clock())
        self.registry = AdapterRegistry(limit_bytes, self.places)

    def load(self, name: str, content: bytes = b"", num_bytes: int = 10, is_pinned: bool = False) -> AdapterDescription:
        made = FakeContent(content or name.encode(), num_bytes)
        if self.registry.known_hash(name) is not None:
            return self.registry.confirm(name, made.content_hash, is_pinned)
        self.registry.reserve(num_bytes)
        return self.registry.register(name, made, is_pinned)

    @property
    def names(self) -> list[str]:
        self.registry.check_integrity()
        return [one.name for one in self.registry.describe()]


def reason_of(error: pytest.ExceptionInfo[RequestError]) -> Reason:
    return error.value.refusal.reason


def test_loading_again_is_loading_once() -> None:
    rig = Rig()
    first, again = rig.load("a"), rig.load("a")
    assert first == again == AdapterDescription("a", b"a", 4, 10, AdapterState.REGISTERED, False, 0, 0)
    assert (rig.registry.num_loaded, rig.registry.used_bytes) == (1, 10)
    assert rig.load("a", is_pinned=True).is_pinned


def test_another_content_under_a_name_is_refused() -> None:
    rig = Rig()
    rig.load("a")
    with pytest.raises(RequestError) as error:
        rig.load("a", b"other", is_pinned=True)
    assert str(error.value) == "the name has another content: unload it first, or choose another name"
    assert reason_of(error) is Reason.ADAPTER_EXISTS
    assert rig.registry.describe() == [AdapterDescription("a", b"a", 4, 10, AdapterState.REGISTERED, False, 0, 0)]


def test_the_least_recently_used_goes_when_memory_is_short() -> None:
    rig = Rig()
    for name in "abc":
        rig.load(name)
    rig.registry.release(rig.registry.bind("a"))
    rig.load("b")
    rig.load("d")
    assert (rig.names, rig.registry.num_evicted, rig.registry.used_bytes) == (["a", "b", "d"], 1, 30)
    rig.load("e", num_bytes=20)
    assert rig.names == ["d", "e"]


def test_what_is_bound_pinned_or_busy_does_not_go() -> None:
    rig = Rig(limit_bytes=40)
    rig.load("pinned", is_pinned=True)
    for name in ("bound", "busy", "idle"):
        rig.load(name)
    rig.registry.bind("bound")
    busy = rig.registry.bind("busy")
    rig.registry.places.request(busy, rig.registry.content(busy))
    rig.registry.release(busy)
    before = rig.registry.describe()
    with pytest.raises(RequestError) as error:
        rig.load("large", num_bytes=20)
    assert reason_of(error) is Reason.ADAPTER_BYTES_EXHAUSTED
    assert error.value.refusal.retry_after_s == 1.0
    assert str(error.value) == (
        "the adapter takes 20 bytes, and 10 bytes of 40 bytes can be had, as the rest is in use, pinned or being "
        "loaded: unload adapters, or start the server with more --adapter-bytes"
    )
    assert rig.registry.describe() == before
    rig.load("small")
    assert rig.names == ["bound", "busy", "pinned", "small"]


def test_what_never_fits_is_refused_without_a_hint_to_retry() -> None:
    rig = Rig()
    rig.load("a")
    with pytest.raises(RequestError) as error:
        rig.registry.reserve(31)
    assert (reason_of(error), error.value.refusal.retry_after_s) == (Reason.ADAPTER_BYTES_EXHAUSTED, None)
    assert str(error.value).startswith(
        "the adapter takes 31 bytes, more than the 30 bytes of the server: start it with"
    )
    assert rig.names == ["a"]


def test_reserved_memory_is_in_use_until_it_is_given_back() -> None:
    rig = Rig()
    rig.registry.reserve(25)
    with pytest.raises(RequestError):
        rig.load("a")
    rig.registry.unreserve(25)
    rig.load("a")
    assert (rig.names, rig.registry.used_bytes) == (["a"], 10)


def test_the_number_of_adapters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_registry, "MAX_ADAPTERS", 300)
    rig, names = Rig(limit_bytes=10_000), [f"{number:03}" for number in range(302)]
    for name in names[:301]:
        rig.load(name)
    assert rig.names == names[1:301]
    for name in names[1:301]:
        rig.registry.bind(name)
    with pytest.raises(RequestError) as error:
        rig.load(names[301])
    assert reason_of(error) is Reason.ADAPTER_BYTES_EXHAUSTED
    assert str(error.value).startswith("the server keeps 300 adapters at most, all in use")


def test_an_evicted_adapter_leaves_its_slot_cleared() -> None:
    rig = Rig()
    number = [rig.load("a"), rig.registry.bind("a")][1]
    assert isinstance(number, int)
    rig.registry.places.request(number, rig.registry.content(number))
    rig.device.finish()
    assert rig.registry.describe()[0].state is AdapterState.RESIDENT
    rig.registry.release(number)
    rig.load("b", num_bytes=30)
    assert rig.device.slots == [None, None]


def test_a_name_that_is_not_there_is_unknown() -> None:
    rig = Rig()
    unload = partial(rig.registry.unload, drain=True)
    for call, hint in ((rig.registry.bind, ": load it first"), (unload, "")):
        with pytest.raises(RequestError) as error:
            call("a")
        assert (reason_of(error), str(error.value)) == (Reason.ADAPTER_UNKNOWN, f"no adapter has the name 'a'{hint}")


def test_unloading_what_is_in_use_is_refused() -> None:
    rig = Rig()
    rig.load("a")
    number = rig.registry.bind("a", 3)
    with pytest.raises(RequestError) as error:
        rig.registry.unload("a", drain=False)
    assert (reason_of(error), error.value.refusal.metadata) == (Reason.ADAPTER_IN_USE, {"sequences": "3"})
    rig.registry.release(number, 3)
    assert rig.registry.unload("a", drain=False) == 0
    assert (rig.names, rig.registry.used_bytes) == ([], 0)


def test_draining_keeps_the_content_for_those_who_have_it_and_frees_the_name() -> None:
    rig = Rig()
    rig.load("a", b"old")
    number = rig.registry.bind("a", 2)
    assert rig.registry.unload("a", drain=True) == 2
    with pytest.raises(RequestError):
        rig.registry.bind("a")
    rig.load("a", b"new")
    assert [(one.content_hash, one.state) for one in rig.registry.describe()] == [
        (b"new", AdapterState.REGISTERED),
        (b"old", AdapterState.DRAINING),
    ]
    assert rig.registry.content(number).content_hash == b"old"
    assert rig.registry.content(rig.registry.bind("a")).content_hash == b"new"
    rig.registry.places.request(number, rig.registry.content(number))
    rig.device.finish()
    rig.registry.release(number)
    assert rig.device.slots.count(b"old") == 1
    rig.registry.release(number)
    assert (rig.names, rig.device.slots) == (["a"], [None, None])


def test_each_that_leaves_is_a_line_of_the_log_without_its_name(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for name in ("evicted", "unloaded", "drained"):
        rig.load(name, name[:1].encode() * 32)
    number = rig.registry.bind("drained", 2)
    with caplog.at_level(logging.INFO):
        rig.load("large", b"l" * 32, num_bytes=10)
        rig.registry.unload("unloaded", drain=True)
        rig.registry.unload("drained", drain=True)
        rig.registry.release(number)
        rig.registry.release(number)
    drained = {"content": "64" * 8, "rank": 4, "size_bytes": 10}
    assert [(record.getMessage(), vars(record)["fields"]) for record in caplog.records] == [
        ("adapter evicted", drained | {"content": "65" * 8}),
        ("adapter unloaded", drained | {"content": "75" * 8}),
        ("adapter drains", drained | {"sequences": 2}),
        ("adapter drained", drained),
    ]


def test_releasing_what_is_not_bound_is_a_bug() -> None:
    rig = Rig()
    rig.load("a")
    for number in (1, 99):
        with pytest.raises(ValueError, match="expected one that 1 sequences have bound"):
            rig.registry.release(number)


# -- owners ----------------------------------------------------------------------------------------------------------

ALICE, BOB = Principal(1, "alice"), Principal(2, "bob")


def load_for(rig: Rig, owner: Principal, name: str, content: bytes, num_bytes: int = 10) -> None:
    rig.registry.reserve(num_bytes, owner)
    rig.registry.register(name, FakeContent(content, num_bytes), False, owner)


def test_a_name_is_its_owners_and_anothers_is_as_if_it_never_was() -> None:
    rig = Rig()
    load_for(rig, ALICE, "a", b"alice's")
    with pytest.raises(RequestError) as never:
        rig.registry.bind("b", 1, BOB)
    for call in (partial(rig.registry.bind, "a", 1, BOB), partial(rig.registry.unload, "a", True, BOB)):
        with pytest.raises(RequestError) as anothers:
            call()
        assert reason_of(anothers) is reason_of(never) is Reason.ADAPTER_UNKNOWN
        assert str(anothers.value).removesuffix(": load it first") == "no adapter has the name 'a'"
    assert rig.registry.known_hash("a", BOB) is None and rig.registry.describe(BOB) == []
    load_for(rig, BOB, "a", b"bob's")
    assert [rig.registry.known_hash("a", owner) for owner in (ALICE, BOB)] == [b"alice's", b"bob's"]
    assert rig.registry.content(rig.registry.bind("a", 1, ALICE)).content_hash == b"alice's"
    assert rig.registry.unload("a", False, BOB) == 0
    assert [one.num_sequences for one in rig.registry.describe(ALICE)] == [1]
    rig.registry.check_integrity()


def test_a_shared_one_is_everybodys_behind_their_own() -> None:
    rig = Rig()
    load_for(rig, SHARED, "a", b"shared")
    load_for(rig, ALICE, "a", b"alice's")
    bound = [rig.registry.content(rig.registry.bind("a", 1, owner)).content_hash for owner in (ALICE, BOB)]
    assert bound == [b"alice's", b"shared"]
    assert [(one.content_hash, one.is_shared) for one in rig.registry.describe(ALICE)] == [
        (b"alice's", False),
        (b"shared", True),
    ]
    with pytest.raises(RequestError):
        rig.registry.unload("a", True, BOB)


def test_nobody_evicts_what_is_anothers() -> None:
    rig = Rig(limit_bytes=30)
    load_for(rig, ALICE, "a", b"1")
    for name in "bc":
        load_for(rig, BOB, name, name.encode())
    load_for(rig, BOB, "d", b"d")
    assert [[one.name for one in rig.registry.describe(owner)] for owner in (ALICE, BOB)] == [["a"], ["c", "d"]]
    with pytest.raises(RequestError) as full:
        rig.registry.reserve(21, BOB)
    assert reason_of(full) is Reason.ADAPTER_BYTES_EXHAUSTED


def test_a_quota_makes_only_ones_own_go() -> None:
    rig, held = Rig(limit_bytes=100), Principal(3, "held", quotas=Quotas(adapter_bytes=25))
    load_for(rig, ALICE, "a", b"a")
    for name in "bcd":
        load_for(rig, held, name, name.encode())
    assert [one.name for one in rig.registry.describe(held)] == ["c", "d"]
    rig.registry.bind("c", 1, held)
    with pytest.raises(RequestError) as exceeded:
        rig.registry.reserve(16, held)
    refusal = exceeded.value.refusal
    assert refusal.metadata == {"quota": "adapter_bytes", "limit": "25", "used": "10", "asked": "16"}
    assert reason_of(exceeded) is Reason.QUOTA_EXCEEDED
    assert [one.name for one in rig.registry.describe(held)] == ["c", "d"], "nothing went in vain"
    rig.registry.check_integrity()


def test_a_quota_counts_what_was_loaded_before_principals_were_read_anew() -> None:
    rig = Rig(limit_bytes=100)
    for name in "abc":
        load_for(rig, Principal(int("1000"), "held", quotas=Quotas(adapter_bytes=25)), name, name.encode())
    assert [one.name for one in rig.registry.describe(Principal(1000, "held"))] == ["b", "c"]
