"""Prompts' keys through both clients: made of tokens, found, stored under, and begun from."""

from __future__ import annotations

import hashlib
from typing import Any

import grpc
import numpy as np
import pytest
from rigs.running_sum import tokens

from deltaline.v1 import prefix_pb2
from deltaline_client import Prefix, PrefixMiss, ProtocolError, SnapshotUnknown, Tier, Waypoints
from deltaline_server.errors import Reason

IDS = [int(one) for one in np.random.default_rng(3).integers(0, 1000, 10)]
PREFIX = Prefix.of_tokens(IDS, every=4)
HIDDEN = tokens(10)


def stored(driven: Any, length: int, prefix: Prefix = PREFIX) -> Any:
    """A snapshot of a prompt's first tokens, under their key."""
    sequence = driven.do(driven.client.open())
    for span in (0, 1):
        driven.do(sequence.prefill(HIDDEN[:length], span=span))
    return driven.do(sequence.snapshot(key=prefix.keys[prefix.positions.index(length)]))


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_is_the_hash_of_all_tokens_before_its_position() -> None:
    assert PREFIX.positions == (4, 8, 10) and PREFIX.prompt_tokens == 10
    for key, position in zip(PREFIX.keys, PREFIX.positions, strict=True):
        body = b"".join(one.to_bytes(8, "little") for one in IDS[:position])
        assert key == hashlib.blake2b(body, digest_size=16).digest()
    assert Prefix.of_tokens([1], every=9).keys[0].hex() == "9ea2d098b5f70192f96c06f38d3fbc97"  # b2sum -l 128


def test_keys_depend_on_no_places_and_on_nothing_behind() -> None:
    longer = Prefix.of_tokens(np.array([*IDS, 5, 6], np.int32), every=3, at=(8, 10, 8))
    assert longer.positions == (3, 6, 8, 9, 10, 12)
    known = dict(zip(longer.positions, longer.keys, strict=True))
    assert (known[8], known[10]) == PREFIX.keys[1:]
    assert Prefix.of_tokens([*IDS[:7], 0, *IDS[8:]], every=4).keys[1] != PREFIX.keys[1]


def test_places_may_come_from_an_iterator() -> None:
    assert Prefix.of_tokens(IDS, every=9, at=iter([4, 7])).positions == (4, 7, 9, 10)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "ids: expected one or more whole numbers"),
        ([[1, 2]], {}, "ids: "),
        ([1.5], {}, "ids: .* got float64"),
        ([1, 2], {"every": 0}, "every: expected 1 or more, got 0"),
        ([1, 2], {"at": [3]}, "at: expected places in 1 .. 2, got 3"),
        ([1, 2], {"at": [0]}, "at: .* got 0"),
        (range(5000), {"every": 1}, "4096 at most; got 5000 keys"),
    ],
)
def test_tokens_that_make_no_keys(ids: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prefix.of_tokens(ids, **options)


def test_a_number_of_tokens_is_whole() -> None:
    wrong: Any = 1.5
    with pytest.raises(TypeError, match=r"^every: expected a whole number, got 1\.5"):
        Prefix.of_tokens(IDS, every=wrong)
    with pytest.raises(TypeError, match=r"^prompt_tokens: expected a whole number, got 1\.5"):
        Prefix((), (), wrong)


@pytest.mark.parametrize(
    ("keys", "positions", "prompt_tokens", "message"),
    [
        ((b"k" * 15,), (1,), 2, "keys: expected 16 .. 64 bytes each"),
        ((b"k" * 65,), (1,), 2, "keys: "),
        ((b"k" * 16,), (), 2, "keys: expected one for each position"),
        ((b"k" * 16,), (0,), 2, "positions: "),
        ((b"k" * 16,), (3,), 2, "positions: "),
        ((b"k" * 16, b"l" * 16), (2, 2), 2, "positions: "),
        ((), (), 0, "prompt_tokens: expected 1 or more, got 0"),
    ],
)
def test_keys_that_are_wrong(keys: Any, positions: Any, prompt_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Prefix(keys, positions, prompt_tokens)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": [64.0]}, r"tokens, every: expected whole numbers, got \[64.0\]"),
        ({"tokens": ["a"]}, "tokens, every: expected whole numbers"),
        ({"tokens": 64}, "tokens, every: expected whole numbers, got 64"),
        ({"every": 1.5}, "expected whole numbers, got .*, 1.5"),
        ({"pinned": "no"}, "pinned: expected True or False, got 'no'"),
        ({"at_end": 1}, "at_end: expected True or False, got 1"),
        ({"prefix": [b"k" * 16]}, "prefix: expected a Prefix, or None for none, got list"),
    ],
)
def test_waypoints_of_wrong_types_are_none(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Waypoints(**wrong)


def test_waypoints_take_whole_numbers_of_any_type() -> None:
    tokens: Any = np.array([64, 128])
    asked = Waypoints(tokens=tokens)
    assert Waypoints(every=tokens[0]) == Waypoints(every=64)
    assert asked == Waypoints(tokens=(64, 128)) and {type(one) for one in asked.tokens} == {int}


# -- finds and opens -------------------------------------------------------------------------------------------------


def test_what_is_stored_under_a_key_is_found_and_begun_from(driven: Any, server: Any) -> None:
    missed = driven.do(driven.client.snapshots.find(PREFIX))
    assert (missed.snapshot_id, missed.position, missed.tier, missed.compute_s) == (None, 0, None, None)
    assert missed.miss is PrefixMiss.NEVER_STORED
    stored(driven, 4)
    deep = stored(driven, 8)
    found = driven.do(driven.client.snapshots.find(PREFIX))
    assert (found.snapshot_id, found.position, found.tier, found.miss) == (deep.id, 8, Tier.DEVICE, None)
    assert (found.restore_s, found.compute_s) == (0, 2e-6)
    sequence = driven.do(driven.client.open(prefix=PREFIX))
    assert (sequence.match, sequence.position) == (found, 8)
    both = driven.do(driven.client.open_many(2, prefix=PREFIX, reuse="if_cheaper"))
    asked = [request.reuse for request in server.requests["OpenSequences"][-2:]]
    assert asked == [prefix_pb2.REUSE_POLICY_ALWAYS, prefix_pb2.REUSE_POLICY_IF_CHEAPER]
    for one in (sequence, *both):
        for span in (0, 1):
            rest = driven.do(one.prefill(HIDDEN[8:], span=span))
            assert np.array_equal(rest, HIDDEN.cumsum(axis=0)[8:])
    other = driven.do(driven.client.open(prefix=Prefix.of_tokens([*IDS[:3], 0, 0])))
    assert (other.position, other.match) == (0, missed)
    assert driven.do(driven.client.open()).match is None


def test_an_open_whose_answer_is_lost_is_made_once(driven: Any, server: Any) -> None:
    stored(driven, 8)
    before = len(server.streams)
    server.lose("OpenSequences", grpc.StatusCode.UNAVAILABLE)
    server.lose("FindSnapshots", grpc.StatusCode.UNAVAILABLE)
    sequence = driven.do(driven.client.open(prefix=PREFIX))
    assert sequence.match == driven.do(driven.client.snapshots.find(PREFIX))
    assert len(server.streams) == before + 1
    assert len({request.open_token for request in server.requests["OpenSequences"][-2:]}) == 1


def test_an_adapter_s_state_is_asked_for_by_its_name(driven: Any, server: Any) -> None:
    driven.do(driven.client.snapshots.find(PREFIX, adapter="french"))
    assert server.requests["FindSnapshots"][0].adapter == "french"
    server.refuse("FindSnapshots", Reason.SNAPSHOT_UNKNOWN)
    with pytest.raises(SnapshotUnknown):
        driven.do(driven.client.snapshots.find(PREFIX))


def test_what_does_not_go_together(driven: Any, server: Any) -> None:
    wrong: Any = (
        ({"prefix": PREFIX, "snapshot": bytes(16)}, "prefix: expected none beside a snapshot"),
        ({"prefix": PREFIX, "reuse": "never"}, "reuse: expected one of always, if_cheaper, got 'never'"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            driven.do(driven.client.open(**options))
    sequence = driven.do(driven.client.open())
    with pytest.raises(ValueError, match="keys: expected 1, one per sequence, got 2"):
        driven.do(driven.client.snapshots.create([sequence], keys=[None, None]))
    assert len(server.requests["OpenSequences"]) == 1 and not server.requests["CreateSnapshots"]


def test_answers_that_this_client_does_not_know(driven: Any, server: Any) -> None:
    unknown: Any = 99
    server.states.match = lambda prefix: prefix_pb2.PrefixMatch(miss=unknown)
    with pytest.raises(ProtocolError, match="why nothing is stored"):
        driven.do(driven.client.snapshots.find(PREFIX))
    server.states.match = lambda prefix: prefix_pb2.PrefixMatch(snapshot_id=bytes(16), tier=unknown)
    with pytest.raises(ProtocolError, match="tier"):
        driven.do(driven.client.snapshots.find(PREFIX))


def test_keys_that_are_no_prefix_are_asked_for_nowhere(driven: Any, server: Any) -> None:
    keys: Any = [b"k" * 16]
    with pytest.raises(TypeError, match="prefix: expected a Prefix, or None for none, got list"):
        driven.do(driven.client.open(prefix=keys))
    with pytest.raises(TypeError, match="prefix: expected a Prefix, got list"):
        driven.do(driven.client.snapshots.find(keys))
