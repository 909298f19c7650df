"""The state of a batch as transformers passes it around: sequences on servers, and how far they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache

from deltaline_client import Output, Row, Sequence
from deltaline_transformers._servers import Sequences, Servers


class DeltalineCache(Cache):
    """One sequence on each server for every row of a batch, opened by the first step.

    It is what `generate` returns as `past_key_values`, and takes to go on. The sequences are closed when it goes: by
    `close`, at the end of `with`, when the model is closed, or once nobody has it any more; those of a process that was
    killed live until their lease ends. A deep copy forks them. Columns are those of `input_ids`, padding included; of a
    row only real tokens are sent. A step that failed closes it, since what became of its rows is not known here.
    """

    def __init__(self, servers: Servers) -> None:
        super().__init__(layers=[])
        self.servers = servers
        self._sequences: Sequences = []
        self._is_closed = False
        self._num_columns = 0
        # Columns of the last step that wait for `crop`, 0 for none; and whether those of the next one may.
        self._num_drafts, self._drafts = 0, False
        # Rows whose end was generated since `begin`: nobody asks for what comes behind it.
        self._end_tokens, self._prompt_columns, self._ended = set[int](), 0, set[int]()
        servers.caches.add(self)
        weakref.finalize(self, servers.drop, self._sequences)

    def begin(self, end_tokens: set[int], prompt_columns: int) -> None:
        """A generation begins that ends a row at one of these tokens, if it comes behind so many columns."""
        self._end_tokens, self._prompt_columns, self._ended, self._drafts = end_tokens, prompt_columns, set(), False

    def step(self, hidden: Tensor, real: Tensor, keep: int) -> Tensor:
        """Compute the layers of new columns [batch, n, hidden], of which real [batch, n] are no padding; on the CPU.

        Returns the last `keep` columns of the output, all for 0; zero where nothing was computed. While past recording
        is active these columns are drafts until `crop` says how many stay, if there are several. Raises ValueError for
        a closed cache or another batch; DeltalineError.
        """
        if self._is_closed:
            raise ValueError("past_key_values: this cache is closed, its sequences are gone: begin with another one")
        num_rows, num_columns, width = hidden.shape
        if num_columns == 0:
            raise ValueError(f"input_ids: expected a token behind the {self._num_columns} of the cache, got none")
        if self._sequences and len(self._sequences[0]) != num_rows:
            raise ValueError(f"input_ids: expected {len(self._sequences[0])} rows, as the cache has, got {num_rows}")
        self.crop(0)
        real = real.clone()
        for row in self._ended:
            real[row] = False
        made = hidden.new_zeros(num_rows, keep or num_columns, width)
        with self._closed_by_an_error():
            if not self._sequences:
                self._sequences += self.servers.open(num_rows)
            if self._drafts and keep > 1:
                self._compute(hidden[:, :-keep], real[:, :-keep], made[:, :0], "none", _join)
                self._compute(hidden[:, -keep:], real[:, -keep:], made, "all", Row.verify)
                self._num_drafts = keep
            else:
                self._compute(hidden, real, made, "last" if keep == 1 else "all", _join)
        self._num_columns += num_columns
        return made

    def _compute(
        self, hidden: Tensor, real: Tensor, made: Tensor, output: Output, make: Callable[[Sequence, Any], Row]
    ) -> None:
        """Step the rows that have tokens. Writes outputs to `made`, which is of the last columns."""
        rows = real.any(dim=1).nonzero().flatten().tolist()
        if not rows:
            return
        tokens = [hidden[row, real[row]] for row in rows]
        outputs = self.servers.step(self._sequences, rows, tokens, make, output)
        for row, own in zip(rows, outputs, strict=True):
            columns = real[row].nonzero().flatten()
            columns = columns[len(columns) - len(own) :] - (real.shape[1] - made.shape[1])
            is_kept = columns >= 0
            made[row, columns[is_kept]] = torch.from_numpy(own.astype("f4"))[is_kept].to(made.dtype)

    @contextmanager
    def _closed_by_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def end_rows(self, tokens: Tensor) -> None:
        """Note which rows the last step has ended, by their last tokens [batch]."""
        if self._num_columns > self._prompt_columns and not self._num_drafts:
            self._ended |= {row for row, token in enumerate(tokens.tolist()) if token in self._end_tokens}

    def activate_past_recording(self) -> None:
        """From now on a step that returns more than one column has drafts."""
        self._drafts = True

    def crop(self, tokens_to_remove: int) -> None:
        """Keep the drafts of the last step but the last -tokens_to_remove. Raises ValueError for more of them."""
        tokens_to_remove = int(tokens_to_remove)  # generate gives a tensor
        if not 0 <= -tokens_to_remove <= self._num_drafts:
            raise ValueError(
                f"tokens_to_remove: expected {-self._num_drafts} .. 0, as there are drafts, got {tokens_to_remove};"
                " what has joined a sequence can't be taken back, so that the model can't assist another one"
            )
        if self._num_drafts and not self._is_closed:
            self.servers.commit(self._sequences, self._num_drafts + tokens_to_remove)
            self._num_columns += tokens_to_remove
            self._num_drafts = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The columns that are computed."""
        return self._num_columns

    @property
    def is_croppable(self) -> bool:
        """Whether any step may be taken back: only drafts may."""
        return False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i go on from the state of row beam_idx[i]: a fork for each row that is named again."""
        with self._closed_by_an_error():
            self.servers.select(self._sequences, beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row so many times."""
        self.reorder_cache(torch.arange(len(self._sequences[0])).repeat_interleave(repeats))

    def reset(self) -> None:
        """Close all sequences and begin at column 0."""
        self.close()
        self._is_closed, self._num_columns, self._num_drafts = False, 0, 0

    def close(self) -> None:
        """Close the sequences on the servers. Idempotent; a step that comes behind it is refused."""
        self._is_closed = True
        self.servers.close_all(self._sequences)

    def drop(self) -> None:
        """Close the sequences as `close` does, without waiting for it."""
        self._is_closed = True
        self.servers.drop(self._sequences)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.crop(0)
        copied = type(self)(self.servers)
        copied._sequences += self.servers.fork(self._sequences)
        copied._is_closed, copied._num_columns = self._is_closed, self._num_columns
        return copied

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _join(sequence: Sequence, tokens: Any) -> Row:
    return Row.decode(sequence, tokens) if len(tokens) == 1 else Row.prefill(sequence, tokens)
