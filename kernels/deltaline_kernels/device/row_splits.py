"""How long rows are cut into parts that run at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowSplits:
    """Every row in `num_parts` parts of `part_length` tokens; those behind its end are empty."""

    num_parts: int
    part_length: int


def count_long_rows(num_tokens: int, max_length: int) -> int:
    """Return how many rows of a batch run all along: those much shorter than the longest one are done before it."""
    return max(1, num_tokens // max(1, max_length))


def cut_rows(
    at_once: int, num_rows: int, num_tokens: int, max_length: int, *, fewest: int, shortest: int, chunk: int
) -> RowSplits:
    """Return the plan of rows of at most `max_length` tokens, of each of which `at_once` parts run at once.

    So many parts, if there are at least `fewest`, none of less than `shortest` tokens but the last; parts are whole
    chunks.
    """
    num_parts = min(at_once, max_length // shortest)
    # Several rows, of which one may have all tokens: nobody knows how long they are.
    is_unknown = num_rows > 1 and max_length >= num_tokens
    if is_unknown or num_parts < fewest:
        return RowSplits(1, max(1, max_length))
    part_length = -(-max_length // (num_parts * chunk)) * chunk
    return RowSplits(-(-max_length // part_length), part_length)
