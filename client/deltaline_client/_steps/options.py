"""The keywords that every stepping method takes, as a caller gave them."""

from __future__ import annotations

from deltaline_client._seconds import check_seconds
from deltaline_client._types import StepOptions


def check_options(options: StepOptions) -> None:
    """Raise TypeError for a keyword that is no option of a step; ValueError, naming it, for one whose value can't be.

    A caller without types may pass anything: what is not known must not be passed over.
    """
    for name in options.keys() - StepOptions.__optional_keys__:
        known = ", ".join(StepOptions.__annotations__)
        raise TypeError(f"got an unexpected keyword argument {name!r}; the options of a step are {known}")
    if options.get("queue_timeout_s") is not None:
        check_seconds("queue_timeout_s", options["queue_timeout_s"])
