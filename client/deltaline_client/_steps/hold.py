"""One call at a time on a span of a sequence: a call holds what it steps or commits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from deltaline_client._exceptions import DuplicateSequence, SequenceBusy
from deltaline_client._steps.sequence import Progress, SequenceRecord


class Hold:
    """Keeps other calls away from one span of sequences while this one reads and changes their progress.

    A context manager that gives the progress of each, in order. All are held or none: entering raises SequenceBusy when
    another call holds one of them, DuplicateSequence when one is there twice.
    """

    def __init__(self, sequences: Sequence[SequenceRecord], span: int) -> None:
        self._progress = [one._progress.get(span) or one.progress(span) for one in sequences]
        # One lock for all sequences of a client: it is held for microseconds, and costs less than one for each.
        self._lock = sequences[0]._client._holding if sequences else nullcontext()

    def __enter__(self) -> list[Progress]:
        with self._lock:
            for index, one in enumerate(self._progress):
                if one.busy:
                    before = self._progress[:index]
                    for held in before:
                        held.busy = False
                    if one in before:
                        raise DuplicateSequence("a sequence is in the batch twice")
                    raise SequenceBusy("another call is stepping this span of the sequence")
                one.busy = True
        return self._progress

    def __exit__(self, *exception: object) -> None:
        for one in self._progress:
            one.busy = False
