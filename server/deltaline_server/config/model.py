"""Options about the model: which, which of its layers, and where they are computed."""

from __future__ import annotations

from dataclasses import dataclass

from deltaline_server import errors
from deltaline_server.config.option import ConfigError, Options, setting

_LAYER_DIGITS = 10
AUTO = "auto"


@dataclass(frozen=True)
class ModelOptions(Options):
    """The model that is served."""

    model: str | None = setting(
        None,
        "model",
        "model directory (config.json and *.safetensors), or org/name of a model in the Hugging Face cache or hub",
        metavar="DIR|ORG/NAME",
    )
    random_init: str | None = setting(
        None, "model", "config.json of a model whose weights are drawn at random", metavar="PATH"
    )
    seed: int = setting(0, "model", "seed of the random weights", low=0, high=2**63 - 1)
    layers: str | None = setting(None, "model", "layers that may be served, FIRST:END (END not included); default all")
    spans: str | None = setting(
        None,
        "model",
        "what a step addresses, FIRST:END,FIRST:END,...; auto: all layers that can be served; default one span of all "
        "(block), one per layer (mixer)",
    )
    scope: str = setting(
        "block", "model", "what a layer computes: the whole block, or its mixer", choices=("block", "mixer")
    )
    device: str = setting(
        "auto", "model", "where it computes; auto takes a GPU if there is one", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "model",
        "weights and hidden states; auto is the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    stream_ends: str = setting(
        "none",
        "model",
        "with residual streams, what is served beside layers: expand, before the first; head, behind the last",
        choices=("none", "expand", "head", "both"),
    )

    tensor_parallel: int = setting(
        1, "model", "GPUs of this host, or processes where it computes on the CPU, that share the model", low=1, high=64
    )

    def __post_init__(self) -> None:
        """Check which model, and the form of ranges."""
        super().__post_init__()
        if (self.model is None) == (self.random_init is None):
            got = "neither" if self.model is None else "both"
            raise ConfigError(f"--model, --random-init: expected one of them, got {got}")
        if self.layers is not None:
            _range(self.layers, "--layers")
        if self.spans not in (None, AUTO):
            _spans(self.spans)

    @property
    def layer_range(self) -> range | None:
        """The layers that may be served, None for all."""
        return None if self.layers is None else _range(self.layers, "--layers")

    @property
    def span_ranges(self) -> tuple[range, ...] | None:
        """The declared spans, None for the default ones or where they are found by themselves."""
        return None if self.spans in (None, AUTO) else _spans(self.spans)

    @property
    def finds_spans(self) -> bool:
        """Whether the spans are those that can be served."""
        return self.spans == AUTO


def _spans(text: str) -> tuple[range, ...]:
    """FIRST:END,FIRST:END,... as ranges."""
    return tuple(_range(part, "--spans") for part in text.split(","))


def _range(text: str, flag: str) -> range:
    """FIRST:END as a range."""
    first, _, end = text.partition(":")
    are_numbers = all(part.isdecimal() and len(part) <= _LAYER_DIGITS for part in (first, end))
    if not (are_numbers and int(first) < int(end) <= 2**31):
        raise ConfigError(f"{flag}: expected FIRST:END with FIRST < END, got {errors.shown(text)}")
    return range(int(first), int(end))
