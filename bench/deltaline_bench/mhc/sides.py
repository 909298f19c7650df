"""Our sides of a case of hyper-connections, and the field's. Knows no figures and no bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deltaline_bench.case import NotApplicable, Side, SideMaker
from deltaline_bench.mhc.batch import EPS, FUSED, HEAD, MULTIPLIER, POST, PRE, REPEAT, Batch
from deltaline_bench.peers import Function, Peers
from deltaline_kernels import Gates, compat, mhc_head, mhc_post, mhc_post_pre, mhc_pre, prepare_gates

FLAG_GEMS = "flag_gems.fused.mhc"
NAMES = {
    POST: ("residual",),
    PRE: ("y", "post", "comb"),
    FUSED: ("residual", "y", "post", "comb"),
    HEAD: ("y",),
}


def ours(batch: Batch) -> dict[str, SideMaker]:
    """Our sides: the operation, and where the field has one the same with its signature."""
    sides: dict[str, SideMaker] = {"deltaline": lambda: native(batch)}
    if batch.shape.work in (POST, PRE):
        sides["deltaline compat"] = lambda: field_side(batch, compat.mhc_post, compat.mhc_pre)
    if batch.shape.work == FUSED:
        sides["deltaline, two operations"] = lambda: native(batch, fused=False)
    return sides


def peers(batch: Batch, found: Peers) -> dict[str, SideMaker]:
    """The field's kernels for what the batch does."""
    return {"FlagGems": lambda: field_side(batch, found.load(f"{FLAG_GEMS}.mhc_post", "mhc_post"), _pre(found))}


def _pre(found: Peers) -> Function:
    """FlagGems' mhc_pre, able to find the weight that it has cast before: its own cache, whose weak keys are tensors,
    compares them by value and raises without gradients."""
    pre: Function = found.load(f"{FLAG_GEMS}.mhc_pre", "mhc_pre")
    getattr(pre, "__globals__", {})["_FN_BF16_CACHE"] = {}
    return pre


def native(batch: Batch, *, fused: bool = True) -> Side:
    """Make our side; `fused`: in one operation what has one."""
    work = batch.shape.work
    gates = _gates(batch) if work in (PRE, FUSED) else None
    x, residual, post, comb = batch.x, batch.residual, batch.post, batch.comb

    def call() -> Any:
        if work == POST:
            return (mhc_post(x, residual, post, comb),)
        if work == HEAD:
            return (mhc_head(residual, batch.weight, batch.scale, batch.base, EPS, EPS),)
        assert gates is not None
        if work == PRE:
            return mhc_pre(residual, gates)
        if fused:
            return mhc_post_pre(x, residual, post, comb, gates, norm_weight=batch.norm, norm_eps=EPS)
        mixed = mhc_post(x, residual, post, comb)
        return mixed, *mhc_pre(mixed, gates, norm_weight=batch.norm, norm_eps=EPS)

    return Side(call, lambda done: _named(NAMES[work], done), lambda: None)


def _gates(batch: Batch) -> Gates:
    return prepare_gates(
        batch.weight,
        batch.scale,
        batch.base,
        rms_eps=EPS,
        pre_eps=EPS,
        sinkhorn_eps=EPS,
        post_multiplier=MULTIPLIER,
        sinkhorn_repeat=REPEAT,
    )


def field_side(batch: Batch, post: Function, pre: Function) -> Side:
    """Make a side of functions with FlagGems' signatures.

    Raises:
        NotApplicable: there is none for this work.
    """
    work = batch.shape.work
    if work == POST:
        mix = batch.post[:, :, None]
        return Side(
            lambda: post(batch.x, batch.residual, mix, batch.comb), lambda done: {"residual": done}, lambda: None
        )
    if work != PRE:
        raise NotApplicable("has no such function")
    weights = batch.weight, batch.scale, batch.base

    def outputs(done: Any) -> Mapping[str, Tensor]:
        post_mix, comb, y = done
        return {"y": y, "post": post_mix.reshape(batch.post.shape), "comb": comb.reshape(batch.comb.shape)}

    return Side(lambda: pre(batch.residual, *weights, EPS, EPS, EPS, MULTIPLIER, REPEAT), outputs, lambda: None)


def _named(names: tuple[str, ...], done: Any) -> Mapping[str, Tensor]:
    return dict(zip(names, done, strict=True))
