"""Which layers of a checkpoint can be served in a scope; of the others why not, and what would do instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from enum import Enum

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.parts import LayerConfig, LayerKind, MixerKind, MlpKind

# Spans that a message names.
SHOWN_SPANS = 8
_TAKES_EMBEDDINGS = "it takes the embeddings too, which are what a span of whole layers from layer 0 on is given"


class Auto(Enum):
    """Asks for the spans that can be served."""

    AUTO = "auto"


def check_spans(spans: Sequence[range] | None, layers: range, scope: Scope) -> tuple[range, ...]:
    """Return the spans to serve. Raises ModelError unless they are disjoint, inside `layers` and fit the scope."""
    if spans is None:
        return (layers,) if scope is Scope.BLOCK else tuple(range(i, i + 1) for i in layers)
    if not spans:
        raise ModelError("--spans: expected at least one, got none")
    for span in spans:
        if span.step != 1 or not layers.start <= span.start < span.stop <= layers.stop:
            raise ModelError(f"--spans: expected layers inside {spans_text(layers)}, got {spans_text(span)}")
        if scope is Scope.MIXER and len(span) > 1:
            raise ModelError(f"--spans: expected one layer each in mixer scope, got {spans_text(span)}")
    ordered = sorted(spans, key=lambda span: span.start)
    for before, after in itertools.pairwise(ordered):
        if after.start < before.stop:
            raise ModelError(f"--spans: expected disjoint spans, got {spans_text(before)} and {spans_text(after)}")
    return tuple(spans)


def layer_kinds(config: ModelConfig, layers: Iterable[int], scope: Scope, first: int = 0) -> dict[int, LayerKind]:
    """Return the kinds of these layers. first: where the span begins that they are in.

    Raises ModelError naming the first that can't be served in this scope, and what would do.
    """
    kinds = {}
    for i in layers:
        layer = config.layers[i]
        why = refusal(config, layer, scope, first)
        if why is not None:
            raise ModelError(f"layer {i}: {why}; {_instead(config, layer, scope)}")
        kinds[i] = LayerKind(layer.mixer, layer.mlp if scope is Scope.BLOCK else None)
    return kinds


def refusal(config: ModelConfig, layer: LayerConfig, scope: Scope, first: int = 0) -> str | None:
    """Why a layer can't be served in this scope, in a span that begins with layer `first`; None where it can."""
    missing = next((part for part in LayerKind(layer.mixer).mixers if part not in config.shapes), None)
    if missing is not None or (layer.mixer is None and scope is Scope.MIXER):
        why = "it has no mixer" if missing is None else config.unserved.get(missing, "not served yet")
        expected = " or ".join(config.shapes or config.family.mixers)
        return f"expected {expected}, got {layer.mixer or 'an MLP alone'} ({why})"
    if layer.mixer is MixerKind.MAMBA2_BEHIND_ATTENTION and (scope is Scope.MIXER or first > 0):
        return f"expected {MixerKind.MAMBA2}, got {layer.mixer} ({_TAKES_EMBEDDINGS})"
    if scope is Scope.MIXER or layer.mlp is None:
        return None
    if layer.mlp is MlpKind.DENSE:
        reason = config.unserved.get(MlpKind.DENSE)
        return reason and f"expected an MLP that is served, got another ({reason})"
    if config.experts is not None:
        return None
    why = config.unserved.get(MlpKind.MIXTURE_OF_EXPERTS, "not served yet")
    return f"expected a dense MLP in block scope, got a mixture of experts ({why})"


def auto_spans(config: ModelConfig, layers: range, scope: Scope) -> tuple[range, ...]:
    """Return spans of all layers that can be served: each run of them in block scope, each one in mixer scope."""
    served = [i for i in layers if refusal(config, config.layers[i], scope, layers.start) is None]
    return runs(served) if scope is Scope.BLOCK else tuple(range(i, i + 1) for i in served)


def left_out(config: ModelConfig, layers: range, scope: Scope) -> str:
    """What is left of these layers to the orchestrator, and why, in one line; empty where they can all be served."""
    reasons: dict[str, list[int]] = {}
    for i in layers:
        why = refusal(config, config.layers[i], scope, layers.start)
        if why is not None:
            reasons.setdefault(why, []).append(i)
    return "; ".join(f"{spans_text(*runs(left))}: {why}" for why, left in reasons.items())


def runs(layers: Sequence[int]) -> tuple[range, ...]:
    """Return the runs of consecutive layers among these, which are in their order."""
    grouped = itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    found = ([layer for _, layer in run] for _, run in grouped)
    return tuple(range(run[0], run[-1] + 1) for run in found)


def spans_text(*spans: range) -> str:
    """Spans as the command line spells them."""
    return ",".join(f"{span.start}:{span.stop}" for span in spans)


def _instead(config: ModelConfig, layer: LayerConfig, scope: Scope) -> str:
    """What can be served where a layer can't."""
    offers = []
    if scope is Scope.BLOCK and refusal(config, layer, Scope.MIXER) is None:
        offers.append("its mixer with --scope mixer")
    spans = auto_spans(config, range(len(config.layers)), scope)
    if spans:
        more = ",..." if len(spans) > SHOWN_SPANS else ""
        offers.append(f"--spans auto, which is {spans_text(*spans[:SHOWN_SPANS])}{more}")
    return f"what can be served: {' or '.join(offers) or 'no layer of it'}"
