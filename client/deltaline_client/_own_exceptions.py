"""The errors that the client raises by itself, before it sends anything; no server has a reason for them."""

from __future__ import annotations

from deltaline_client._exceptions import ConflictError, DeltalineError


class StepUnfinished(ConflictError):
    """An earlier step of the sequence has an unknown outcome: resume it, or make the identical call again."""


class SequenceBusy(ConflictError):
    """Another call is stepping the same span of the sequence right now."""


class Disconnected(DeltalineError):
    """The client was disconnected and sends nothing more; a call that was under way may have taken effect."""

    def __init__(self) -> None:
        super().__init__("the client was disconnected")
