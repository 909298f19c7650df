"""Keys of prefixes: what is refused, what is told apart, and what a memory of them keeps."""

from __future__ import annotations

import numpy as np
import pytest

from deltaline_server.errors import Reason, RequestError
from deltaline_server.tables.prefixes.keys import MAX_KEYS, MAX_TOKENS, KeyHash, KeyMemory, PrefixKeys

KEY = b"k" * 16


@pytest.mark.parametrize(
    ("keys", "positions", "prompt_tokens", "field", "message"),
    [
        ([b"k" * 15], [1], 2, "key", "expected 16 .. 64 bytes each, got 15 in key 0"),
        ([KEY, b"k" * 65], [1, 2], 2, "key", "expected 16 .. 64 bytes each, got 65 in key 1"),
        ([KEY], [], 2, "key", "got 1 keys, 0 positions"),
        ([KEY] * (MAX_KEYS + 1), range(1, MAX_KEYS + 2), MAX_TOKENS, "key", "4096 at most; got 4097 keys"),
        ([KEY, KEY], [5, 5], 9, "position", "expected 6 .. 9, behind the one before and within the prompt; got 5 of"),
        ([KEY, KEY], [5, 4], 9, "position", "got 4 of key 1"),
        ([KEY], [0], 9, "position", "expected 1 .. 9"),
        ([KEY], [10], 9, "position", "got 10 of key 0"),
        ([KEY], [2**70], 9, "position", f"got {2**70} of key 0"),
        ([KEY], [1], 0, "prompt_tokens", "got 0"),
        ([KEY], [1], MAX_TOKENS + 1, "prompt_tokens", f"got {MAX_TOKENS + 1}"),
    ],
)
def test_keys_that_are_wrong_are_refused_by_name(
    keys: list[bytes], positions: list[int], prompt_tokens: int, field: str, message: str
) -> None:
    with pytest.raises(RequestError) as raised:
        PrefixKeys.of(keys, positions, prompt_tokens)
    assert (raised.value.refusal.reason, raised.value.refusal.field) == (Reason.INVALID_REQUEST, f"prefix.{field}")
    assert message in raised.value.refusal.message


def test_the_most_and_the_longest_keys_are_taken() -> None:
    keys = PrefixKeys.of([b"k" * 64] * MAX_KEYS, range(1, MAX_KEYS + 1), MAX_TOKENS)
    assert keys.num_usable == MAX_KEYS
    assert PrefixKeys.of([KEY], [MAX_TOKENS], MAX_TOKENS).positions.tolist() == [MAX_TOKENS]


def test_a_key_at_the_prompt_s_end_is_not_usable() -> None:
    assert PrefixKeys.of([KEY, KEY], [4, 9], 9).num_usable == 1
    assert PrefixKeys.of([KEY, KEY], [4, 8], 9).num_usable == 2
    assert PrefixKeys.of([], [], 9).num_usable == 0


def test_a_position_names_its_key() -> None:
    keys = PrefixKeys.of([KEY, KEY], [4, 9], 9)
    assert [keys.index_of(position) for position in (3, 4, 5, 9, 10)] == [None, 0, None, 1, None]


def test_whatever_differs_in_a_key_or_its_position_is_told_apart() -> None:
    def said(key: bytes, position: int) -> bytes:
        return PrefixKeys.of([key], [position], MAX_TOKENS).words.tobytes()

    keys = [KEY, KEY + b"\0", KEY + b"\0\0", b"\0" + KEY, b"k" * 64, b"k" * 63 + b"\0"]
    keys += [bytes(int(i == j) for i in range(64)) for j in range(64)]
    told = {said(key, position) for key in keys for position in (1, 2, 2**32 + 1)}
    assert len(told) == 3 * len(keys)
    rows = np.concatenate([PrefixKeys.of([key], [1], 1).words for key in keys])
    assert len(set(KeyHash(bytes(16)).of(rows).tolist())) == len(keys)


def test_hashes_depend_on_the_secret_and_the_scope() -> None:
    words = PrefixKeys.of([KEY], [1], 1).words
    first, second = KeyHash(bytes(16)), KeyHash(b"s" * 16)
    assert first.of(words) == KeyHash(bytes(16)).of(words) != second.of(words)
    scopes = [hashed.of_scope(*parts) for hashed in (first, second) for parts in ((b"1", b"23"), (b"12", b"3"))]
    assert len({int(scope) for scope in scopes}) == 4


def test_a_memory_holds_what_was_added_last() -> None:
    memory = KeyMemory(4)
    first, same_place, other = np.uint64(1), np.uint64(2), np.uint64(1 << 62)
    asked = np.array([first, same_place, other, 0], dtype=np.uint64)
    assert not memory.holds(asked).any()
    memory.add(np.array([first, other], dtype=np.uint64))
    assert memory.holds(asked).tolist() == [True, False, True, False]
    memory.add(np.array([same_place], dtype=np.uint64))
    assert memory.holds(asked).tolist() == [False, True, True, False]


@pytest.mark.parametrize("num_places", [0, 1, 3, 6])
def test_a_memory_has_a_power_of_two_of_places(num_places: int) -> None:
    with pytest.raises(ValueError, match=f"expected a power of two, 2 or more, got {num_places}"):
        KeyMemory(num_places)
