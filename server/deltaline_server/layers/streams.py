"""Residual streams: what a config says of hyper-connections, and which spans begin or end with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from deltaline_kernels import MAX_STREAMS
from deltaline_server.checkpoints.config_reader import ConfigReader, ModelError
from deltaline_server.step import SpanShapes

MAX_SINKHORN_ITERS = 1000


@dataclass(frozen=True)
class StreamConfig:
    """Hyper-connections of a checkpoint, as transformers' deepseek_v4 names and computes them.

    count: residual streams. sinkhorn_iters: normalisations of the matrix that mixes them. eps: what is added to its
    entries, to its sums and to the gates. averages: whether behind the last layer their mean joins them, and no gates.
    """

    count: int
    sinkhorn_iters: int
    eps: float
    averages: bool = False


class StreamEnds(StrEnum):
    """Which ends of the model are the server's, and not the orchestrator's."""

    NONE = "none"
    """Steps carry `[T, streams, hidden]` everywhere."""
    EXPAND = "expand"
    """A span that begins with the first layer takes `[T, hidden]`, and begins every stream with it."""
    HEAD = "head"
    """A span that ends with the last layer joins the streams by the checkpoint's head, and gives `[T, hidden]`."""
    BOTH = "both"

    @property
    def expands(self) -> bool:
        return self in (StreamEnds.EXPAND, StreamEnds.BOTH)

    @property
    def has_head(self) -> bool:
        return self in (StreamEnds.HEAD, StreamEnds.BOTH)


def stream_config(config: ConfigReader, usual: int | None = None, *, averages: bool = False) -> StreamConfig | None:
    """Read what a config says of residual streams; None where it says nothing. Raises ModelError naming the key.

    usual: how many there are where it says nothing, None for none. averages: as StreamConfig has it.
    """
    if config.get("hc_mult") is None and usual is None:
        return None
    return StreamConfig(
        count=config.integer("hc_mult", 1, MAX_STREAMS, default=usual),
        sinkhorn_iters=config.integer("hc_sinkhorn_iters", 1, MAX_SINKHORN_ITERS, default=20),
        eps=config.positive("hc_eps", default=1e-6),
        averages=averages,
    )


def span_ends(
    spans: Sequence[range], num_layers: int, token: SpanShapes, streams: StreamConfig | None, asked: StreamEnds
) -> tuple[SpanShapes, ...]:
    """Return what a token is at the ends of each span of whole layers.

    num_layers: of the checkpoint. token: one without streams. streams: None where layers pass on `[hidden]`. asked:
    which ends of the model the spans have.
    Raises ModelError if no span has an end that is asked for.
    """
    if streams is None:
        if asked is not StreamEnds.NONE:
            why = "without hc_mult in config.json, or in mixer scope, there are no residual streams"
            raise ModelError(f"--stream-ends: expected none, as {why}, got {asked}")
        return (token,) * len(spans)
    if asked.expands and all(span.start != 0 for span in spans):
        raise ModelError(f"--stream-ends: expected a span that begins with layer 0 to expand, got {_starts(spans)}")
    if asked.has_head and all(span.stop != num_layers for span in spans):
        raise ModelError(
            f"--stream-ends: expected a span that ends with layer {num_layers - 1} for the head, got {_lasts(spans)}"
        )
    return tuple(
        SpanShapes(
            token.hidden_size,
            token.itemsize,
            0 if asked.expands and span.start == 0 else streams.count,
            0 if asked.has_head and span.stop == num_layers else streams.count,
        )
        for span in spans
    )


def _starts(spans: Sequence[range]) -> str:
    return f"spans that begin with {', '.join(str(span.start) for span in spans)}"


def _lasts(spans: Sequence[range]) -> str:
    return f"spans that end with {', '.join(str(span.stop - 1) for span in spans)}"
