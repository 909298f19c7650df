"""Mamba2 layers against transformers where checkpoints differ: biases, limits of time steps, residuals, hybrids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_weights import dense
from server.layers.test_layers import HIDDEN, MAX_DRAFT, Oracle, assert_close, assert_same_state, serve

from deltaline_server.checkpoints.checkpoint import Checkpoint
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.modules import Placement
from deltaline_server.layers.mamba2 import Mamba2
from deltaline_server.models.config import ModelConfig, Scope
from deltaline_server.models.model import load_model
from deltaline_server.models.weights import LayerLoader

HYBRID = ["linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention"]
SPANS = [range(0, 1), range(3, 5)]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def make_oracle(tmp_path: Path, write_checkpoint: Callable[..., Any]) -> Callable[..., Oracle]:
    """A function that makes transformers write a small checkpoint of two layers, or as its arguments say."""

    def make(model_type: str, **changes: Any) -> Oracle:
        options = {"hidden": HIDDEN, "layers": 2} | changes
        return Oracle(write_checkpoint(tmp_path, model_type, **options), tmp_path)

    return make


@pytest.mark.parametrize("model_type", ["mamba2", "nemotron_h"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
def test_biases_of_projections_and_convolution(
    make_oracle: Callable[..., Oracle], device: str, model_type: str, has_bias: bool
) -> None:
    oracle = make_oracle(model_type, use_bias=has_bias, use_conv_bias=not has_bias)
    served, cache, hidden = serve(oracle.options(device)), oracle.cache(), torch.randn(41, HIDDEN)
    ours = [served.step(hidden[:40], [1], [40], read_line=[0]), served.step(hidden[40:], [1], [1])]
    theirs = [oracle.run(range(2), Scope.BLOCK, part, cache) for part in hidden.split([40, 1])]
    assert_close(torch.cat(ours), torch.cat(theirs))
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
    ours = [served.step(hidden[:12], [1], [12], read_line=[0]), served.step(hidden[12:13], [1], [1])]
    ours.append(served.step(hidden[13:17], [1], [MAX_DRAFT], num_committed=[0]))
    ours.append(served.step(hidden[17:], [1], [3], num_replayed=[MAX_DRAFT], draft_half=[1]))
    assert_close(torch.cat(ours), oracle.run(range(2), Scope.BLOCK, hidden, cache))
    assert_same_state(served, 1, cache, range(2))


@pytest.mark.parametrize("in_fp32", [False, True], ids=["own-dtype", "fp32"])
def test_residuals_have_the_dtype_that_the_config_asks_for(
    make_oracle: Callable[..., Oracle], device: str, in_fp32: bool
) -> None:
    oracle = make_oracle("mamba2", layers=1, dtype="bfloat16", residual_in_fp32=in_fp32)
    served, hidden = serve(oracle.options(device)), 64 * torch.randn(40, HIDDEN).bfloat16()
    stack: Any = served.model._stacks[0]
    block = stack._layers[0]
    dtypes: list[torch.dtype] = []
    forward = block.forward

    def spy(*inputs: Any) -> torch.Tensor:
        made: torch.Tensor = forward(*inputs)
        dtypes.append(made.dtype)
        return made

    block.forward = spy
    ours = served.step(hidden, [1], [40], read_line=[0])
    assert dtypes == [torch.float32 if in_fp32 else torch.bfloat16]
    assert ours.dtype is torch.bfloat16
    assert_close(ours, oracle.run(range(1), Scope.BLOCK, hidden, None), tolerance=2e-2)


@pytest.mark.parametrize("scope", list(Scope))
def test_the_mamba_layers_of_a_hybrid(make_oracle: Callable[..., Oracle], device: str, scope: Scope) -> None:
    oracle = make_oracle("nemotron_h", layers_block_type=HYBRID)
    spans = SPANS if scope is Scope.BLOCK else [range(3, 4)]
    served = serve(oracle.options(device, scope=scope, spans=spans[-1:]))
    cache, hidden = oracle.cache(), torch.randn(70, HIDDEN)
    ours = served.step(hidden, [1], [70], read_line=[0])
    assert_close(ours, oracle.run(spans[-1], scope, hidden, cache))
    assert_same_state(served, 1, cache, spans[-1])


def test_several_spans_of_a_hybrid(make_oracle: Callable[..., Oracle]) -> None:
    oracle = make_oracle("nemotron_h", layers_block_type=HYBRID)
    model = load_model(oracle.options("cpu", spans=SPANS))
    assert (model.spans, model.num_layers) == (tuple(SPANS), 3)


@pytest.mark.parametrize(("layer", "got"), [(1, "an MLP alone"), (2, "attention")])
def test_other_layers_of_a_hybrid_are_refused_by_name(make_oracle: Callable[..., Oracle], layer: int, got: str) -> None:
    oracle = make_oracle("nemotron_h", layers_block_type=HYBRID)
    with pytest.raises(ModelError, match=rf"^layer {layer}: expected mamba2, got {got}"):
        load_model(oracle.options("cpu", layers=range(layer, layer + 1)))


def mixer_of(oracle: Oracle, rank: int, world_size: int) -> Mamba2:
    config = ModelConfig.from_directory(oracle.directory)
    placement = Placement(torch.device("cpu"), torch.float32, rank, world_size)
    with Checkpoint(oracle.directory) as checkpoint:
        mixer = LayerLoader(checkpoint, config, [1], Scope.BLOCK, placement).mixer(1, {})
    assert isinstance(mixer, Mamba2)
    return mixer


def test_the_shares_of_two_ranks_make_the_whole(make_oracle: Callable[..., Oracle]) -> None:
    oracle = make_oracle("nemotron_h", use_bias=True)
    whole, *ranks = mixer_of(oracle, 0, 1), mixer_of(oracle, 0, 2), mixer_of(oracle, 1, 2)
    heads, values, keys = 4, 4 * 64, 2 * 64
    for tensor, dim, sizes in (
        (lambda mixer: dense(mixer.in_proj), 0, (values, values, keys, keys, heads)),
        (lambda mixer: mixer.in_proj.bias, 0, (values, values, keys, keys, heads)),
        (lambda mixer: mixer.conv, 1, (values, keys, keys)),
        (lambda mixer: mixer.conv_bias, 0, (values, keys, keys)),
    ):
        parts = [tensor(rank).split([size // 2 for size in sizes], dim=dim) for rank in ranks]
        joined = torch.cat([torch.cat(pair, dim=dim) for pair in zip(*parts, strict=True)], dim=dim)
        assert torch.equal(joined, tensor(whole))
    for name in ("A_log", "D", "dt_bias", "norm"):
        assert torch.equal(torch.cat([getattr(rank, name) for rank in ranks]), getattr(whole, name))
    assert torch.equal(torch.cat([dense(rank.out_proj) for rank in ranks], dim=1), dense(whole.out_proj))
    assert whole.out_proj.bias is not None and ranks[0].out_proj.bias is not None
    assert torch.equal(ranks[0].out_proj.bias, whole.out_proj.bias)
    assert ranks[1].out_proj.bias is None
    assert whole.norm.shape == (2, values // 2)


def test_two_ranks_with_biases_sum_to_the_whole(make_oracle: Callable[..., Oracle], device: str) -> None:
    oracle = make_oracle("nemotron_h", use_bias=True)
    hidden = torch.randn(20, HIDDEN)
    whole, *ranks = (
        serve(oracle.options(device, scope=Scope.MIXER, layers=range(1, 2), rank=rank, world_size=world_size)).step(
            hidden, [1], [20], read_line=[0]
        )
        for rank, world_size in ((0, 1), (0, 2), (1, 2))
    )
    assert_close(ranks[0] + ranks[1], whole, tolerance=1e-5)


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone(make_oracle: Callable[..., Oracle], device: str) -> None:
    served, again = (serve(make_oracle("mamba2").options(device)) for _ in range(2))
    lengths, tokens = [1, MAX_DRAFT, 40], 1 + MAX_DRAFT + 40
    hidden = torch.randn(tokens, HIDDEN)
    bad = hidden.clone()
    bad[1 : 1 + MAX_DRAFT] = torch.nan
    fields = {"read_line": [0, 0, 0], "num_committed": [1, 0, 40]}
    clean, poisoned = served.step(hidden, [1, 2, 3], lengths, **fields), again.step(bad, [1, 2, 3], lengths, **fields)
    assert poisoned[1 : 1 + MAX_DRAFT].isnan().all()
    for rows in (slice(0, 1), slice(1 + MAX_DRAFT, tokens)):
        assert torch.equal(poisoned[rows], clean[rows])
    for ours, theirs in zip(served.pool.layers, again.pool.layers, strict=True):
        for line in (1, 3):
            assert torch.equal(ours.recurrent[line], theirs.recurrent[line])
            assert torch.equal(ours.conv[line], theirs.conv[line])
