"""Layers and spans against transformers on the same checkpoint: outputs, recurrent states and conv states.

Of the Qwen families every second layer is attention, with biases; Nemotron-H has biases too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.layer_oracle import MAX_DRAFT, Oracle, assert_close, assert_same_state, serve

from deltaline_kernels import add_rms_norm
from deltaline_server.checkpoints.checkpoint import Checkpoint
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.block import add_scaled
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.config import Scope
from deltaline_server.models.model import ModelOptions, check_model, load_model
from deltaline_server.models.servable import check_spans

pytestmark = pytest.mark.usefixtures("no_gradients")

HIDDEN = 128
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "attn_implementation": "eager",
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "mamba2": {},
    "nemotron_h": {"use_bias": True},
}
ALL = range(4)
ONE_KIND = pytest.mark.parametrize("oracle", ["qwen3_5_text"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]
) -> Oracle:
    directory = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden": HIDDEN, "intermediate": 96, "head_dim": 32}
    return Oracle(write_checkpoint(directory, request.param, **sizes, **KINDS[request.param]), directory)


@pytest.mark.parametrize(
    ("scope", "span", "length"),
    [
        (Scope.MIXER, range(2, 3), 64),
        (Scope.MIXER, range(1, 2), 70),
        (Scope.BLOCK, range(1, 2), 15),
        *((Scope.BLOCK, ALL, length) for length in (1, 3, 16, 131)),
    ],
)
def test_prefill_then_decode(oracle: Oracle, device: str, scope: Scope, span: range, length: int) -> None:
    served, cache = serve(oracle.options(device, scope=scope, spans=[span])), oracle.cache()
    hidden = torch.randn(length + 3, HIDDEN)
    ours = [served.step(hidden[:length], [2], [length])]
    theirs = [oracle.run(span, hidden[:length], cache, scope=scope)]
    assert_same_state(served, 2, cache, span)
    for t in range(length, length + 3):
        ours.append(served.step(hidden[t : t + 1], [2], [1]))
        theirs.append(oracle.run(span, hidden[t : t + 1], cache, t, scope))
    assert_close(torch.cat(ours), torch.cat(theirs))
    assert_same_state(served, 2, cache, span)


def test_rows_of_a_batch_are_their_sequences(oracle: Oracle, device: str) -> None:
    served, lines, lengths, more = serve(oracle.options(device)), [1, 2, 3, 4], [1, 4, 40, 131], [1, 2, 1, 20]
    hidden, later = torch.randn(sum(lengths), HIDDEN), torch.randn(sum(more), HIDDEN)
    first, second = served.step(hidden, lines, lengths), served.step(later, lines, more)
    sequences = zip(hidden.split(lengths), later.split(more), strict=True)
    for line, begun, ended, prompt in zip(lines, first.split(lengths), second.split(more), sequences, strict=True):
        cache = oracle.cache()
        assert_close(torch.cat((begun, ended)), oracle.run(ALL, torch.cat(prompt), cache))
        assert_same_state(served, line, cache, ALL)


@pytest.mark.parametrize(("length", "accepted"), [(9, 0), (9, MAX_DRAFT), (14, 1), (14, 3), (16, 2)])
def test_verify_then_replay_of_the_accepted(oracle: Oracle, device: str, length: int, accepted: int) -> None:
    served, cache = serve(oracle.options(device)), oracle.cache()
    prompt, drafts, last = torch.randn(length, HIDDEN), torch.randn(MAX_DRAFT, HIDDEN), torch.randn(3, HIDDEN)
    served.step(prompt, [1], [length])
    verified = served.step(drafts, [1], [MAX_DRAFT], verify=True)
    decoded = [served.step(last[:1], [1], [1], accepted=accepted)]
    decoded += [served.step(last[t : t + 1], [1], [1]) for t in (1, 2)]
    whole = oracle.run(ALL, torch.cat((prompt, drafts[:accepted], last)), cache)
    assert_close(torch.cat((verified[:accepted], *decoded)), whole[length:])
    assert_same_state(served, 1, cache, ALL)


@pytest.mark.parametrize("split", [2, 16, 63], ids=lambda n: f"by-{n}")
def test_a_split_prefill_is_a_whole_one(oracle: Oracle, device: str, split: int) -> None:
    served, hidden = serve(oracle.options(device)), torch.randn(90, HIDDEN)
    parts = [served.step(part, [2], [len(part)]) for part in hidden.split(split)]
    assert_close(torch.cat(parts), oracle.run(ALL, hidden))


# The ranks of mamba2 norm together: test_tensor_parallel has them.
@pytest.mark.parametrize("oracle", ["qwen3_next", "qwen3_5_text", "nemotron_h"], indirect=True)
@pytest.mark.parametrize("layer", [1, 2])
def test_the_mixer_outputs_of_two_ranks_sum_to_the_whole(oracle: Oracle, device: str, layer: int) -> None:
    span, hidden = range(layer, layer + 1), torch.randn(70, HIDDEN)
    options = oracle.options(device, scope=Scope.MIXER, layers=span)
    first, second = (serve(replace(options, rank=rank, world_size=2)).step(hidden, [1], [70]) for rank in (0, 1))
    assert_close(first + second, oracle.run(span, hidden, scope=Scope.MIXER))
    with pytest.raises(
        ModelError, match=r"--tensor-parallel: expected a divisor (of 4 heads|of 6 query heads|of 2 key heads), got 8"
    ):
        load_model(replace(options, world_size=8))


def test_bfloat16_follows_the_checkpoint_model(
    tmp_path: Path, write_checkpoint: Callable[..., Any], device: str
) -> None:
    oracle = Oracle(write_checkpoint(tmp_path, "qwen3_next", hidden=HIDDEN, dtype="bfloat16", **HYBRID), tmp_path)
    served, hidden = serve(oracle.options(device)), torch.randn(40, HIDDEN).bfloat16()
    # Both round at every layer; neither is nearer to the exact result.
    assert_close(served.step(hidden, [1], [40]), oracle.run(ALL, hidden), tolerance=3e-2)


@ONE_KIND
def test_between_two_branches_there_is_one_call(oracle: Oracle, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a layer to the next: four layers of two branches have seven places between them."""
    called: list[str] = []
    block, mlp = (import_module(f"deltaline_server.layers.{name}") for name in ("block", "mlp"))

    def spy(kernel: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        called.append(kernel.__name__)
        return kernel(*arguments, **options)

    for module, name in ((block, "rms_norm"), (block, "add_rms_norm"), (mlp, "silu_and_mul")):
        monkeypatch.setattr(module, name, partial(spy, getattr(module, name)))
    serve(oracle.options(device)).step(torch.randn(2, HIDDEN), [1], [2])
    assert called == ["rms_norm", *["add_rms_norm", "silu_and_mul", "add_rms_norm"] * 3, "add_rms_norm", "silu_and_mul"]


@pytest.mark.parametrize("in_fp32", [False, True], ids=["own-dtype", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_span_ends_with_the_sum_that_is_made_inside_it(dtype: torch.dtype, in_fp32: bool, device: str) -> None:
    made, hidden = (torch.randn(20, HIDDEN, device=device).to(dtype) for _ in range(2))
    made[0, 0], hidden[0, 0] = -40000.0, 60000.0
    hidden = hidden.float() if in_fp32 else hidden
    for scale in (1.0, 0.22, 2.0):
        inside, _ = add_rms_norm(made, hidden, torch.ones(HIDDEN, device=device), 1e-6, scale=scale)
        assert torch.equal(add_scaled(hidden, made, scale), inside) and inside.isfinite().all()


@ONE_KIND
def test_the_self_test_is_told_of_mlps_where_they_are_served(oracle: Oracle) -> None:
    assert load_model(oracle.options()).block_sizes == {"streams": 0, "hidden": HIDDEN, "mlp_dim": 96}
    assert load_model(replace(oracle.options(), world_size=2)).block_sizes["mlp_dim"] == 48
    assert load_model(oracle.options(scope=Scope.MIXER)).block_sizes["mlp_dim"] == 0


@ONE_KIND
def test_an_empty_batch(oracle: Oracle, device: str) -> None:
    assert serve(oracle.options(device)).step(torch.zeros(0, HIDDEN), [1], [0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("spans", "layers", "scope", "expected"),
    [
        (None, range(2, 6), Scope.BLOCK, (range(2, 6),)),
        (None, range(2, 4), Scope.MIXER, (range(2, 3), range(3, 4))),
        ([range(4, 6), range(1, 4)], range(8), Scope.BLOCK, (range(4, 6), range(1, 4))),
    ],
    ids=["block", "mixer", "named"],
)
def test_spans(spans: list[range] | None, layers: range, scope: Scope, expected: tuple[range, ...]) -> None:
    assert check_spans(spans, layers, scope) == expected


@pytest.mark.parametrize(
    ("spans", "scope", "message"),
    [
        ([], Scope.BLOCK, "--spans: expected at least one"),
        ([range(0, 2), range(1, 3)], Scope.BLOCK, "--spans: expected disjoint spans, got 0:2 and 1:3"),
        ([range(0, 1), range(0, 1)], Scope.BLOCK, "--spans: expected disjoint spans, got 0:1 and 0:1"),
        ([range(3, 5)], Scope.BLOCK, "--spans: expected layers inside 0:4, got 3:5"),
        ([range(2, 2)], Scope.BLOCK, "--spans: expected layers inside 0:4, got 2:2"),
        ([range(0, 4, 2)], Scope.BLOCK, "--spans: expected layers inside"),
        ([range(0, 2)], Scope.MIXER, "--spans: expected one layer each in mixer scope, got 0:2"),
    ],
    ids=["none", "overlap", "twice", "outside", "empty", "step", "long-mixer"],
)
def test_spans_that_cannot_be_are_refused(spans: list[range], scope: Scope, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_spans(spans, range(4), scope)


@ONE_KIND
def test_layers_of_no_span_are_not_loaded(oracle: Oracle) -> None:
    model = load_model(oracle.options(spans=[range(1, 2), range(3, 4)]))
    assert model.num_layers == 2
    assert len(model.make_pool(StateOptions(1, 1)).layers) == 2


@ONE_KIND
@pytest.mark.parametrize("use", [load_model, check_model])
def test_layers_outside_the_checkpoint_are_refused(oracle: Oracle, use: Callable[[ModelOptions], object]) -> None:
    with pytest.raises(ModelError, match="--layers: expected a range inside 0:4, got 2:5"):
        use(oracle.options(layers=range(2, 5)))


@ONE_KIND
@pytest.mark.parametrize("use", [load_model, check_model])
def test_a_model_comes_from_one_place(oracle: Oracle, use: Callable[[ModelOptions], object]) -> None:
    with pytest.raises(ModelError, match="expected either a model directory or a config"):
        use(ModelOptions(torch.device("cpu")))
    with pytest.raises(ModelError, match="expected either a model directory or a config"):
        use(oracle.options(random_init=oracle.directory / "config.json"))


@ONE_KIND
def test_a_device_that_is_not_there_is_refused(oracle: Oracle) -> None:
    with pytest.raises(ModelError, match="device: expected one that torch finds here, got cuda:99"):
        load_model(oracle.options("cuda:99"))


@ONE_KIND
def test_a_model_is_checked_without_its_device_and_its_weights(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Checkpoint, "read")
    check_model(oracle.options("meta"))
    with pytest.raises(AttributeError, match="read"):
        load_model(oracle.options())


@ONE_KIND
def test_weights_for_which_there_is_no_room_are_told(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: torch.empty(1 << 50))
    with pytest.raises(ModelError, match=r"^--model, --random-init: the weights can't be loaded to cpu: .*memory"):
        load_model(oracle.options())


def test_random_weights_serve_a_config_alone(oracle: Oracle, device: str) -> None:
    options = ModelOptions(torch.device(device), random_init=oracle.directory / "config.json", seed=3)
    hidden = torch.randn(20, HIDDEN)
    first, again, other = (serve(replace(options, seed=seed)).step(hidden, [1], [20]) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert 0.1 < float(first.std()) < 10
