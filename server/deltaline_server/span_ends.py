"""What a token is where a span begins and where it ends: its shape and its size. Knows no model and no message."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SpanEnds:
    """The hidden state of one token: `[hidden]`, or `[streams, hidden]` where there are residual streams.

    Everything between the wire and the layers has one row of values per token, `width` of them.
    input_streams, output_streams: 0 where there is no such dimension. itemsize: bytes of a value.
    """

    hidden_size: int
    itemsize: int
    input_streams: int = 0
    output_streams: int = 0

    @cached_property
    def input_shape(self) -> Shape:
        """What enters the span."""
        return self._shape(self.input_streams)

    @cached_property
    def output_shape(self) -> Shape:
        """What leaves it."""
        return self._shape(self.output_streams)

    @cached_property
    def input_width(self) -> int:
        """Values of a token that enters the span."""
        return math.prod(self.input_shape)

    @cached_property
    def output_width(self) -> int:
        """Values of a token that leaves it."""
        return math.prod(self.output_shape)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of a token that enters the span."""
        return self.input_width * self.itemsize

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of a token that leaves it."""
        return self.output_width * self.itemsize

    @property
    def streams(self) -> dict[str, int]:
        """Streams of both ends, as deltaline.v1.LayerSpan names them."""
        return {"input_streams": self.input_streams, "output_streams": self.output_streams}

    def _shape(self, streams: int) -> Shape:
        return (streams, self.hidden_size) if streams else (self.hidden_size,)
