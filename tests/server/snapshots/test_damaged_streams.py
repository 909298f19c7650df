"""Streams that are no state, or a damaged one: each is refused by name with its reason, and nothing of it is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from rigs.damaged_states import HEADER_BYTES, MEMORY, SECTIONS, SPOILS, Content, whole_file
from rigs.exchanged_states import file_of, imported_by
from rigs.scheduler_rig import refuses
from rigs.states import FINGERPRINT, LAYOUT, MOVED, SNAPSHOT, make_header, make_memory
from rigs.stored_states import make_rig

from deltaline_server.errors import Reason, RequestError
from deltaline_server.principal import ANONYMOUS
from deltaline_server.snapshots.exchange import Exchange
from deltaline_server.snapshots.header import Flaw
from deltaline_server.snapshots.host import HostTier
from deltaline_server.snapshots.layout import Bytes, Part, SpanProgress
from deltaline_server.tables.captured.state import StoredState
from deltaline_server.tables.prefixes.cost import Tier, Way
from deltaline_server.tables.sequence_adapters import BASE

REASONS = {
    **dict.fromkeys((Flaw.TRUNCATED, Flaw.HEADER, Flaw.DIGEST), Reason.STATE_DAMAGED),
    **dict.fromkeys((Flaw.FOREIGN, Flaw.LENGTH, Flaw.SECTIONS), Reason.INVALID_REQUEST),
    **dict.fromkeys((Flaw.VERSION, Flaw.FINGERPRINT, Flaw.ROOM), Reason.STATE_MISMATCH),
}


class Place:
    """Where streams come to: host memory of the small layout, whose states nobody brings anywhere else."""

    def __init__(self, folder: Path) -> None:
        self.rig = make_rig(folder)
        self.host = HostTier(LAYOUT, 1 << 20, None)
        self.rig.snapshots.lower = self
        self.exchange = Exchange(
            layout=LAYOUT,
            fingerprint=FINGERPRINT,
            types={},
            host=self.host,
            moves=self,
            snapshots=self.rig.snapshots,
            adapters=self,  # type: ignore[arg-type]
        )

    ways: Mapping[Tier, Way] = MappingProxyType({})

    def content_hash(self, name: str, _: object) -> bytes:
        if name not in ("", "ö-lora"):
            raise RequestError(Reason.ADAPTER_UNKNOWN, "no adapter has this name")
        return bytes(range(1, 33)) if name else b""

    def added(self, id: bytes) -> None: ...

    def write(self, id: bytes) -> None: ...

    async def bring_to_host(self, id: bytes) -> None: ...

    def find(self, id: bytes) -> StoredState | None:
        header = self.host.find(id)
        return None if header is None else StoredState(Tier.HOST, header.spans[0].position, BASE, self.host.size_of(id))

    def forget(self, id: bytes) -> None:
        self.host.release(id)

    async def take(self, content: bytes, seed: int = 0) -> None:
        """Import a file that comes in pieces of any size."""
        rng = np.random.default_rng(seed)

        async def pieces() -> Any:
            at = 0
            while at < len(content):
                size = int(rng.choice([1, 40, 100, 4096, 50_000]))
                yield content[at : at + size]
                at += size

        await imported_by(self.exchange, pieces())

    def check_empty(self) -> None:
        assert self.host.used_bytes == 0 and self.rig.snapshots.num_held == 0
        self.host.check_integrity()
        self.rig.snapshots.check_integrity()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_a_whole_file_is_taken_whole(place: Place) -> None:
    await place.take(bytes(whole_file(0)))
    [one] = place.rig.snapshots.describe(ANONYMOUS)[0]
    with place.host.use(one.id) as memory:
        np.testing.assert_array_equal(memory, MEMORY)
    place.rig.snapshots.check_integrity()


def swapped(content: Content, rng: np.random.Generator) -> Content:
    """Two sections in each other's places, or one twice."""
    first, second = rng.choice(len(SECTIONS), 2, replace=False)
    one, other = SECTIONS[first], SECTIONS[second]
    size = min(one.num_bytes, other.num_bytes)
    a, b = HEADER_BYTES + one.offset, HEADER_BYTES + other.offset
    before = bytes(content[a : a + size])
    content[a : a + size] = content[b : b + size]
    if rng.random() < 0.5:
        content[b : b + size] = before
    return content


STREAM_SPOILS = (*SPOILS, (swapped, {Flaw.DIGEST}))


async def check_damaged(place: Place, numbers: range) -> Counter[Reason]:
    """Import damaged streams; return the reasons that they were refused for."""
    reasons = Counter[Reason]()
    for number in numbers:
        spoil, flaws = STREAM_SPOILS[number % len(STREAM_SPOILS)]
        content = bytes(spoil(whole_file(number), np.random.default_rng(number)))
        if flaws == {Flaw.NAME}:  # it has another id, and gets one of its own in any case
            continue
        flaws = flaws | {Flaw.TRUNCATED} if len(content) < 40 else flaws
        with pytest.raises(RequestError) as caught:
            await place.take(content, number)
        refusal = caught.value.refusal
        assert refusal.reason in {REASONS[flaw] for flaw in flaws}, (number, flaws, refusal)
        assert refusal.message.startswith("chunk: expected ") or ": expected " in refusal.message, refusal
        place.check_empty()
        reasons[refusal.reason] += 1
    return reasons


async def test_damaged_streams_are_named_and_leave_nothing(place: Place) -> None:
    reasons = await check_damaged(place, range(325))
    assert reasons.total() >= 300 and reasons.keys() == set(REASONS.values())
    await place.take(bytes(whole_file(1)))


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(10))
async def test_10000_damaged_streams(place: Place, part: int) -> None:
    await check_damaged(place, range(part * 1050, part * 1050 + 1050))


# -- what can't be ---------------------------------------------------------------------------------------------------


def whole_of(spans: tuple[SpanProgress, ...], change: Any = None, **changes: Any) -> bytes:
    """A file of this progress whose digests fit."""
    sections, memory = LAYOUT.sections(spans), make_memory(LAYOUT, spans)
    for section in sections:
        if section.part is Part.COMMITS:
            section.view(memory).view(np.int64)[...] = [[70 - i, i, 1] for i in range(section.shape[0])]
    if change is not None:
        change(sections, memory)
    return file_of(replace(make_header(spans=spans), **changes), sections, memory)


ONE, OTHER = SNAPSHOT
WITH_COMMITS = (replace(ONE, num_commits=3), OTHER)
BAD_PROGRESS = {
    "moved": (MOVED, "spans[0].pending"),
    "uneven": ((ONE, replace(OTHER, position=71)), "spans[1].position"),
    "reply": ((replace(ONE, reply_bytes=8), OTHER), "spans[0].reply_bytes"),
    "committed step": ((replace(ONE, committed_step=2), OTHER), "spans[0].committed_step"),
    "more records": ((replace(ONE, records_1=3), OTHER), "spans[0].records_1"),
    "records of both halves": ((replace(ONE, records_0=1), OTHER), "spans[0].records_0"),
    "replay of more than there is": (
        (replace(ONE, position=1), replace(OTHER, position=1)),
        "spans[0].replay",
    ),
    "nothing begun": ((ONE, SpanProgress(position=70)), "spans[1].step"),
    "commits of another span": ((ONE, replace(OTHER, num_commits=1)), "spans[1].num_commits"),
}


@pytest.mark.parametrize("what", BAD_PROGRESS)
async def test_a_progress_that_no_snapshot_has_is_refused_by_its_field(place: Place, what: str) -> None:
    spans, field = BAD_PROGRESS[what]
    with refuses(Reason.INVALID_REQUEST) as caught:
        await place.take(whole_of(spans))
    assert field in caught.value.refusal.message
    place.check_empty()


@pytest.mark.parametrize("field", ["position", "replay"])
async def test_a_state_that_is_too_large_for_this_server_is_told_so(place: Place, field: str) -> None:
    roomy = replace(LAYOUT, max_draft=8, max_tokens=1000)
    spans = {
        "position": tuple(replace(one, position=501) for one in SNAPSHOT),
        "replay": (replace(ONE, replay=5, records_1=5), OTHER),
    }[field]
    header = make_header(spans=spans)
    content = file_of(header, roomy.sections(spans), make_memory(roomy, spans))
    with refuses(Reason.STATE_MISMATCH) as caught:
        await place.take(content)
    assert f"spans[0].{field}: expected 0 .. " in caught.value.refusal.message
    place.check_empty()


@pytest.mark.parametrize(
    "row", [[71, 0, 1], [-1, 0, 1], [3, -1, 1], [3, 0, 5], [3, 0, -1], [70, 0, 1]], ids=lambda row: str(row)
)
async def test_fixed_commits_that_cannot_be_are_refused(place: Place, row: list[int]) -> None:
    def change(sections: Any, memory: Bytes) -> None:
        sections[0].view(memory).view(np.int64)[2] = row

    await place.take(whole_of(WITH_COMMITS))
    [one] = place.rig.snapshots.describe(ANONYMOUS)[0]
    place.rig.snapshots.release([one.id], ANONYMOUS)
    with refuses(Reason.INVALID_REQUEST) as caught:
        await place.take(whole_of(WITH_COMMITS, change))
    assert "commits of 0" in caught.value.refusal.message
    place.check_empty()


async def test_what_lies_between_sections_is_zero(place: Place) -> None:
    def change(sections: Any, memory: Bytes) -> None:
        section = next(one for one in sections if one.end > one.offset + one.num_bytes)
        memory[section.end - 1] = 1

    with refuses(Reason.INVALID_REQUEST):
        await place.take(whole_of(SNAPSHOT, change))
    place.check_empty()


@pytest.mark.parametrize(
    "changes",
    [{"adapter": "other"}, {"adapter_hash": bytes(32).replace(b"\0", b"\1")}, {"adapter": ""}, {"adapter_hash": b""}],
    ids=["another name", "another content", "no name", "no content"],
)
async def test_an_adapter_that_is_not_loaded_here_is_refused(place: Place, changes: dict[str, Any]) -> None:
    with refuses(Reason.STATE_MISMATCH) as caught:
        await place.take(whole_of(SNAPSHOT, **changes))
    assert "adapter" in caught.value.refusal.message
    place.check_empty()
    await place.take(whole_of(SNAPSHOT, adapter="", adapter_hash=b""))


async def test_a_model_with_more_layers_is_told_as_another_and_lengths_as_lies(place: Place) -> None:
    """Before so much memory is taken as the header asks for."""
    content = bytearray(whole_file(0))
    content[12:16] = (1 << 22).to_bytes(4, "little")
    content[16:24] = (1 << 40).to_bytes(8, "little")
    with refuses(Reason.INVALID_REQUEST):
        await place.take(bytes(content))
    content[40] ^= 1
    with refuses(Reason.STATE_MISMATCH) as caught:
        await place.take(bytes(content))
    assert "expected a state of this model and settings, got another" in caught.value.refusal.message
    place.check_empty()
