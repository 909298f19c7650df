"""Keys of a prompt's prefixes, as an orchestrator sends them: opaque bytes, each for the tokens before a position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltaline_server.errors import Reason, RequestError

MIN_KEY_BYTES, MAX_KEY_BYTES, MAX_KEYS = 16, 64, 4096
# Of a prompt, and so of a position.
MAX_TOKENS = 2**40
# A key as words: its length, its position in two, its bytes, with zeros behind.
_KEY_WORDS = MAX_KEY_BYTES // 4
_WORDS = 3 + _KEY_WORDS


@dataclass(frozen=True, eq=False)
class PrefixKeys:
    """Keys of one prompt of `prompt_tokens`, in ascending order of their positions.

    positions int64 [N]: tokens that each key stands for, 1 .. prompt_tokens. words uint32 [N, 19]: all that a key says,
    equal for equal keys at equal positions only.
    """

    positions: NDArray[np.int64]
    words: NDArray[np.uint32]
    prompt_tokens: int

    @classmethod
    def of(cls, keys: Sequence[bytes], positions: Sequence[int], prompt_tokens: int) -> PrefixKeys:
        """Check and pack keys as they came. Raises RequestError INVALID_REQUEST."""
        if not 1 <= prompt_tokens <= MAX_TOKENS:
            raise _invalid("prompt_tokens", f"expected 1 .. {MAX_TOKENS}, got {prompt_tokens}")
        if not len(keys) == len(positions) <= MAX_KEYS:
            expected = f"expected one for each position, {MAX_KEYS} at most"
            raise _invalid("key", f"{expected}; got {len(keys)} keys, {len(positions)} positions")
        lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
        for i in np.flatnonzero((lengths < MIN_KEY_BYTES) | (lengths > MAX_KEY_BYTES)).tolist():
            expected = f"expected {MIN_KEY_BYTES} .. {MAX_KEY_BYTES} bytes each"
            raise _invalid("key", f"{expected}, got {lengths[i]} in key {i}")
        before = 0
        for i, position in enumerate(positions):
            if not before < position <= prompt_tokens:
                expected = f"expected {before + 1} .. {prompt_tokens}, behind the one before and within the prompt"
                raise _invalid("position", f"{expected}; got {position} of key {i}")
            before = position
        words = np.empty((len(keys), _WORDS), dtype=np.uint32)
        at = np.array(positions, dtype=np.int64)
        words[:, 0] = lengths
        words[:, 1], words[:, 2] = at & 0xFFFFFFFF, at >> 32
        padded = b"".join([key.ljust(MAX_KEY_BYTES, b"\0") for key in keys])
        words[:, 3:] = np.frombuffer(padded, dtype="<u4").reshape(-1, _KEY_WORDS)
        return cls(at, words, prompt_tokens)

    @classmethod
    def one(cls, key: bytes, position: int) -> PrefixKeys | None:
        """The key of a state at a position; None where it is empty, or before the first token. Raises as `of` does."""
        return cls.of([key], [position], position) if key and position else None

    @property
    def num_usable(self) -> int:
        """Keys strictly before the prompt's end: a state at the end would leave no token to compute an output from."""
        return int(np.searchsorted(self.positions, self.prompt_tokens))

    def key_at(self, position: int) -> bytes:
        """The key of a position, empty where none has it."""
        i = self.index_of(position)
        return b"" if i is None else self.words[i, 3:].tobytes()[: int(self.words[i, 0])]

    def index_of(self, position: int) -> int | None:
        """Which key has a position; None where none has."""
        i = int(np.searchsorted(self.positions, position))
        return i if i < len(self.positions) and self.positions[i] == position else None


class KeyHash:
    """A hash of keys, drawn from a secret: 64 bits that nobody without it can aim at.

    Multilinear (words times random 64-bit numbers): two keys that differ have the same hash for at most one secret in
    2^32, whoever chose them, and as good as never when they are hashes themselves. Nothing is right because of it: who
    finds by it compares the keys.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        drawn = hashlib.shake_256(secret).digest(8 * _WORDS)
        self._factors = np.frombuffer(drawn, dtype="<u8")

    def of(self, words: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """Hashes of keys' words, uint64 [N]."""
        hashes: NDArray[np.uint64] = words.astype(np.uint64) @ self._factors
        return hashes

    def of_scope(self, *parts: bytes) -> np.uint64:
        """What to add to hashes of keys of one owner and origin so that they differ from those of others."""
        digest = hashlib.blake2b(key=self._secret[:64], digest_size=8)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return np.uint64(int.from_bytes(digest.digest(), "little"))


class KeyMemory:
    """Hashes that were added, until others take their places: bounded, allocated at start, and only for advice.

    Each hash has one place of `num_places` (a power of two), and 8 bytes there.
    """

    def __init__(self, num_places: int) -> None:
        if num_places < 2 or num_places & (num_places - 1):
            raise ValueError(f"num_places: expected a power of two, 2 or more, got {num_places}")
        self._shift = np.uint64(64 - num_places.bit_length() + 1)
        self._hashes = np.zeros(num_places, dtype=np.uint64)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Remember hashes, uint64 [N]; 0 is none."""
        self._hashes[hashes >> self._shift] = hashes

    def holds(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which hashes (uint64 [N]) are remembered, bool [N]."""
        is_held: NDArray[np.bool_] = (self._hashes[hashes >> self._shift] == hashes) & (hashes != 0)
        return is_held


def _invalid(name: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_REQUEST, f"prefix.{name}: {message}", field=f"prefix.{name}")
