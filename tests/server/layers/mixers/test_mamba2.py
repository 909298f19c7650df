"""Mamba2 layers against transformers where checkpoints differ: biases, limits of time steps, residuals, hybrids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import MAX_DRAFT, Oracle, assert_close, assert_same_state, serve
from torch import Tensor

from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.block import Residual
from deltaline_server.layers.stack import BlockStack
from deltaline_server.models.config import Scope
from deltaline_server.models.model import load_model

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN = 256
HYBRID = ["linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention"]


@pytest.fixture
def make_oracle(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> Callable[..., Oracle]:
    """A function that makes transformers write a small checkpoint of two layers, or as its arguments say."""

    def make(model_type: str, **changes: Any) -> Oracle:
        options = {"hidden": HIDDEN, "layers": 2} | changes
        return Oracle(write_checkpoint(tmp_path, model_type, **options), tmp_path)

    return make


def test_a_bias_of_projections_alone(make_oracle: Callable[..., Oracle], device: str) -> None:
    oracle = make_oracle("mamba2", use_bias=True, use_conv_bias=False)
    served, cache, hidden = serve(oracle.options(device)), oracle.cache(), torch.randn(41, HIDDEN)
    ours = [served.step(part, [1], [len(part)]) for part in hidden.split([40, 1])]
    assert_close(torch.cat(ours), oracle.run(range(2), hidden, cache))
    assert_same_state(served, 1, cache, range(2))


@pytest.mark.parametrize(
    ("model_type", "limits"),
    [("mamba2", {"time_step_limit": (0.1, 0.9)}), ("nemotron_h", {"time_step_min": 0.4})],
)
def test_time_steps_are_clamped_in_every_kind_of_row(
    make_oracle: Callable[..., Oracle], device: str, model_type: str, limits: dict[str, Any]
) -> None:
    """The checkpoint's model clamps them in a prefill alone: so that is what a whole sequence is compared with."""
    oracle = make_oracle(model_type, **limits)
    served, cache, hidden = serve(oracle.options(device)), oracle.cache(), torch.randn(20, HIDDEN)
    ours = [served.step(hidden[:12], [1], [12]), served.step(hidden[12:13], [1], [1])]
    ours.append(served.step(hidden[13:17], [1], [MAX_DRAFT], verify=True))
    ours.append(served.step(hidden[17:], [1], [3], accepted=MAX_DRAFT))
    assert_close(torch.cat(ours), oracle.run(range(2), hidden, cache))
    assert_same_state(served, 1, cache, range(2))


@pytest.mark.parametrize("in_fp32", [False, True], ids=["own-dtype", "fp32"])
def test_residuals_have_the_dtype_that_the_config_asks_for(
    make_oracle: Callable[..., Oracle], device: str, monkeypatch: pytest.MonkeyPatch, in_fp32: bool
) -> None:
    oracle = make_oracle("mamba2", dtype="bfloat16", residual_in_fp32=in_fp32)
    served, hidden, dtypes = serve(oracle.options(device)), 64 * torch.randn(40, HIDDEN).bfloat16(), []
    forward, enter_behind = BlockStack.forward, Residual.enter_behind

    def spy(self: BlockStack, *inputs: Any) -> Tensor:
        made = forward(self, *inputs)
        dtypes.append(made.dtype)
        return made

    def spy_between(self: Residual, *inputs: Any) -> tuple[Tensor, Tensor]:
        residual, entering = enter_behind(self, *inputs)
        dtypes.append(residual.dtype)
        assert entering.dtype == torch.bfloat16
        return residual, entering

    monkeypatch.setattr(BlockStack, "forward", spy)
    monkeypatch.setattr(Residual, "enter_behind", spy_between)
    ours = served.step(hidden, [1], [40])
    assert dtypes == 2 * [torch.float32 if in_fp32 else torch.bfloat16]
    assert_close(ours, oracle.run(range(2), hidden), tolerance=2e-2)


@pytest.mark.parametrize("scope", list(Scope))
def test_the_mamba_layers_of_a_hybrid(make_oracle: Callable[..., Oracle], device: str, scope: Scope) -> None:
    oracle, hidden = make_oracle("nemotron_h", layers_block_type=HYBRID), torch.randn(70, HIDDEN)
    spans = [range(0, 1), range(3, 5) if scope is Scope.BLOCK else range(3, 4)]
    served = serve(oracle.options(device, scope=scope, spans=spans))
    for number, span in enumerate(spans):
        assert_close(served.step(hidden, [1], [70], span=number), oracle.run(span, hidden, scope=scope))


def test_a_layer_without_a_mixer_is_refused_by_name_in_mixer_scope(make_oracle: Callable[..., Oracle]) -> None:
    oracle = make_oracle("nemotron_h", layers_block_type=HYBRID)
    with pytest.raises(
        ModelError, match=r"^layer 1: expected mamba2 or attention, got an MLP alone \(it has no mixer\)"
    ):
        load_model(oracle.options(layers=range(1, 2), scope=Scope.MIXER))


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(make_oracle: Callable[..., Oracle], device: str) -> None:
    served, again = (serve(make_oracle("mamba2").options(device)) for _ in range(2))
    lengths, tokens = [1, MAX_DRAFT, 40], 1 + MAX_DRAFT + 40
    hidden = torch.randn(tokens, HIDDEN)
    bad = hidden.clone()
    bad[1 : 1 + MAX_DRAFT] = torch.nan
    clean, poisoned = (
        one.step(rows, [1, 2, 3], lengths, verify=[False, True, False])
        for one, rows in ((served, hidden), (again, bad))
    )
    assert poisoned[1 : 1 + MAX_DRAFT].isnan().all()
    for rows in (slice(0, 1), slice(1 + MAX_DRAFT, tokens)):
        assert torch.equal(poisoned[rows], clean[rows])
    for ours, theirs in zip(served.pool.layers, again.pool.layers, strict=True):
        for line in (1, 3):
            assert torch.equal(ours.recurrent[line], theirs.recurrent[line])
            assert torch.equal(ours.conv[line], theirs.conv[line])
