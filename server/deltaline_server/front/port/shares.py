"""How much of a bounded amount each client has, so that no client takes what others need."""

from __future__ import annotations


class Shares:
    """An amount that is counted by client, `limit` in all.

    A client that has some may have more as long as it has less than what is left for all others, and less than `most`:
    one that takes what it gets ends with half, and who has nothing finds room as long as there is any. used: by all.
    """

    def __init__(self, limit: int, most: int | None = None) -> None:
        self.limit, self._most = limit, limit if most is None else most
        self.used = 0
        self._of: dict[str, int] = {}

    @property
    def num_clients(self) -> int:
        """How many clients have some."""
        return len(self._of)

    def has_any(self, client: str) -> bool:
        """Whether a client has some."""
        return client in self._of

    def has_room(self, client: str) -> bool:
        """Whether a client may have more."""
        return self._of.get(client, 0) < min(self._most, self.limit - self.used)

    def take(self, client: str, amount: int) -> None:
        """A client has so much more, whether there is room or not."""
        self.used += amount
        self._of[client] = self._of.get(client, 0) + amount

    def give_back(self, client: str, amount: int) -> None:
        """A client has so much less."""
        self.used -= amount
        left = self._of[client] - amount
        if left:
            self._of[client] = left
        else:
            del self._of[client]
