"""The keywords that every stepping method takes, as a caller gave them."""

from __future__ import annotations

from deltaline_client._integers import UINT32_MAX, check_integer
from deltaline_client._seconds import check_seconds
from deltaline_client._types import StepOptions

# The lowest and the highest, as StepRequest.priority has them.
PRIORITIES = -8, 7


def check_options(options: StepOptions) -> None:
    """Raise TypeError for a keyword that is no option of a step; TypeError and ValueError, naming it, for a value.

    A caller without types may pass anything: what is not known must not be passed over.
    """
    for name in options.keys() - StepOptions.__optional_keys__:
        known = ", ".join(StepOptions.__annotations__)
        raise TypeError(f"got an unexpected keyword argument {name!r}; the options of a step are {known}")
    check_integer("span", options.get("span", 0), 0, UINT32_MAX)  # which of these there are the server says
    check_integer("priority", options.get("priority", 0), *PRIORITIES)
    if options.get("queue_timeout_s") is not None:
        check_seconds("queue_timeout_s", options["queue_timeout_s"])
