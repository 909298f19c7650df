"""Layers and spans against transformers on the same checkpoint: outputs, recurrent states and conv states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.checkpoints.checkpoint import Checkpoint
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.models.config import Scope
from deltaline_server.models.model import Model, ModelOptions, check_model, check_spans, load_model

TOLERANCE = 1e-4
MAX_DRAFT = 4
HIDDEN = 256
MAMBA = ["mamba2", "nemotron_h"]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass
class Oracle:
    """The transformers model on the CPU, its checkpoint, and the options to serve it."""

    model: Any
    directory: Path

    @property
    def layers(self) -> Any:
        return self.model.base_model.layers

    @property
    def is_mamba(self) -> bool:
        return self.model.config.model_type in MAMBA

    def cache(self) -> Any:
        import transformers  # large, and absent where only the other tests run

        return transformers.DynamicCache(config=self.model.config)

    def run(self, layers: range, scope: Scope, hidden: Tensor, cache: Any) -> Tensor:
        """Run layers over one sequence's tokens `[n, hidden]`."""
        x = hidden[None]
        for i in layers:
            layer = self.layers[i]
            if scope is Scope.MIXER:
                x = (layer.mixer if self.is_mamba else layer.linear_attn)(x, cache_params=cache)
            elif self.model.config.model_type == "mamba2":
                x = layer(x, cache_params=cache)
            else:
                x = layer(x, position_embeddings=None, past_key_values=cache)
        return x[0]

    def options(self, device: str, **changes: Any) -> ModelOptions:
        return replace(ModelOptions(torch.device(device), model=self.directory), **changes)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text", *MAMBA])
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]
) -> Oracle:
    directory = tmp_path_factory.mktemp(request.param)
    return Oracle(write_checkpoint(directory, request.param, hidden=HIDDEN, value_heads=4, key_heads=2), directory)


@dataclass
class Served:
    """A model and its state, one sequence per line."""

    model: Model
    pool: StatePool

    def step(self, hidden: Tensor, lines: list[int], lengths: list[int], **fields: list[int]) -> Tensor:
        """Run span 0 over packed rows; fields are those of Rows.build, else a plain commit of each row."""
        zeros = [0] * len(lines)
        values = {"read_line": lines, "write_line": lines, "num_committed": lengths}
        values |= {"num_replayed": zeros, "draft_half": zeros} | fields
        device = self.model.device
        rows = Rows.build(lengths, **values, max_short=MAX_DRAFT, device=device)
        return self.model.forward(0, hidden.to(device, self.model.dtype), rows, self.pool).cpu()


def serve(options: ModelOptions, lines: int = 4) -> Served:
    model = load_model(options)
    return Served(model, model.make_pool(StateOptions(lines, MAX_DRAFT)))


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < tolerance


def assert_same_state(served: Served, line: int, cache: Any, layers: range) -> None:
    is_mamba = served.model.config.model_type in MAMBA
    for place, i in enumerate(layers):
        state, theirs = served.pool.layers[place], cache.layers[i]
        history = theirs.conv_states[0][0].t()[1:]
        recurrent = theirs.recurrent_states[0][0]
        assert_close(state.recurrent[line].cpu(), recurrent if is_mamba else recurrent.transpose(1, 2))
        assert_close(state.conv[line, : len(history)].cpu(), history)


@pytest.mark.parametrize(
    ("scope", "span"),
    [(Scope.MIXER, range(2, 3)), (Scope.BLOCK, range(1, 2)), (Scope.BLOCK, range(4))],
    ids=["mixer", "block", "span-of-four"],
)
@pytest.mark.parametrize("length", [1, 3, 64, 131], ids=lambda n: f"{n}-tokens")
def test_prefill_then_decode(oracle: Oracle, device: str, scope: Scope, span: range, length: int) -> None:
    served = serve(oracle.options(device, scope=scope, spans=[span]))
    cache = oracle.cache()
    hidden = torch.randn(length + 3, HIDDEN)
    ours = [served.step(hidden[:length], [2], [length], read_line=[0])]
    theirs = [oracle.run(span, scope, hidden[:length], cache)]
    assert_same_state(served, 2, cache, span)
    for t in range(length, length + 3):
        ours.append(served.step(hidden[t : t + 1], [2], [1]))
        theirs.append(oracle.run(span, scope, hidden[t : t + 1], cache))
    assert_close(torch.cat(ours), torch.cat(theirs))
    assert_same_state(served, 2, cache, span)


def test_rows_of_a_batch_are_their_sequences(oracle: Oracle, device: str) -> None:
    served = serve(oracle.options(device))
    lengths = [1, 4, 70, 131]
    hidden = torch.randn(sum(lengths), HIDDEN)
    ours = served.step(hidden, [1, 2, 3, 4], lengths, read_line=[0] * 4)
    caches = [oracle.cache() for _ in lengths]
    parts = zip(hidden.split(lengths), caches, strict=True)
    theirs = [oracle.run(range(4), Scope.BLOCK, part, cache) for part, cache in parts]
    assert_close(ours, torch.cat(theirs))
    for line, cache in enumerate(caches, start=1):
        assert_same_state(served, line, cache, range(4))


@pytest.mark.parametrize("accepted", range(MAX_DRAFT + 1))
def test_verify_then_replay_of_the_accepted(oracle: Oracle, device: str, accepted: int) -> None:
    served = serve(oracle.options(device))
    prompt, drafts, last = torch.randn(9, HIDDEN), torch.randn(MAX_DRAFT, HIDDEN), torch.randn(1, HIDDEN)
    served.step(prompt, [1], [9], read_line=[0])
    verified = served.step(drafts, [1], [MAX_DRAFT], num_committed=[0])
    decoded = served.step(last, [1], [1], num_replayed=[accepted], draft_half=[1])

    cache = oracle.cache()
    oracle.run(range(4), Scope.BLOCK, prompt, cache)
    # One by one, as a decode: transformers' recurrence of several tokens takes another path.
    kept = [oracle.run(range(4), Scope.BLOCK, drafts[t : t + 1], cache) for t in range(accepted)]
    if kept:
        assert_close(verified[:accepted], torch.cat(kept))
    assert_close(decoded, oracle.run(range(4), Scope.BLOCK, last, cache))
    assert_same_state(served, 1, cache, range(4))


def test_a_verify_computes_all_its_drafts_and_commits_none(oracle: Oracle, device: str) -> None:
    served = serve(oracle.options(device))
    prompt, drafts = torch.randn(9, HIDDEN), torch.randn(MAX_DRAFT, HIDDEN)
    served.step(prompt, [1], [9], read_line=[0])
    verified = served.step(drafts, [1], [MAX_DRAFT], num_committed=[0])
    again = served.step(drafts, [1], [MAX_DRAFT])
    assert_close(verified, again, tolerance=1e-6)


@pytest.mark.parametrize("split", [1, 2, 63, 100], ids=lambda n: f"at-{n}")
def test_a_split_prefill_is_a_whole_one(oracle: Oracle, device: str, split: int) -> None:
    served = serve(oracle.options(device))
    hidden = torch.randn(130, HIDDEN)
    whole = served.step(hidden, [1], [130], read_line=[0])
    parts = [served.step(hidden[:split], [2], [split], read_line=[0]), served.step(hidden[split:], [2], [130 - split])]
    assert_close(torch.cat(parts), whole, tolerance=1e-5)


def test_the_mixer_outputs_of_two_ranks_sum_to_the_whole(oracle: Oracle, device: str) -> None:
    if oracle.model.config.model_type == "mamba2":
        with pytest.raises(ModelError, match="world_size: expected a divisor of 1 groups of the mixer's norm, got 2"):
            load_model(oracle.options(device, rank=0, world_size=2))
        return
    options = oracle.options(device, scope=Scope.MIXER, layers=range(1, 2))
    hidden = torch.randn(70, HIDDEN)
    whole, *ranks = (
        serve(replace(options, rank=rank, world_size=world_size)).step(hidden, [1], [70], read_line=[0])
        for rank, world_size in ((0, 1), (0, 2), (1, 2))
    )
    assert_close(ranks[0] + ranks[1], whole, tolerance=1e-5)


def test_bfloat16_follows_the_checkpoint_model(
    tmp_path: Path, write_checkpoint: Callable[..., Any], device: str
) -> None:
    oracle = Oracle(write_checkpoint(tmp_path, "qwen3_next", dtype="bfloat16", layers=2), tmp_path)
    served = serve(oracle.options(device))
    hidden = torch.randn(40, HIDDEN).bfloat16()
    assert served.model.dtype is torch.bfloat16
    theirs = oracle.run(range(2), Scope.BLOCK, hidden, oracle.cache())
    # Both round at every layer; neither is nearer to the exact result.
    assert_close(served.step(hidden, [1], [40], read_line=[0]), theirs, tolerance=2e-2)


def test_an_empty_batch(oracle: Oracle, device: str) -> None:
    served = serve(oracle.options(device))
    assert served.step(torch.zeros(0, HIDDEN), [1], [0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("spans", "layers", "scope", "expected"),
    [
        (None, range(2, 6), Scope.BLOCK, (range(2, 6),)),
        (None, range(2, 4), Scope.MIXER, (range(2, 3), range(3, 4))),
        ([range(4, 6), range(1, 2)], range(8), Scope.BLOCK, (range(4, 6), range(1, 2))),
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


def test_layers_of_no_span_are_not_loaded(oracle: Oracle) -> None:
    model = load_model(oracle.options("cpu", spans=[range(1, 2), range(3, 4)]))
    assert model.num_layers == 2
    assert len(model.make_pool(StateOptions(1, 1)).layers) == 2


@pytest.mark.parametrize("use", [load_model, check_model])
def test_layers_outside_the_checkpoint_are_refused(oracle: Oracle, use: Callable[[ModelOptions], object]) -> None:
    with pytest.raises(ModelError, match="--layers: expected a range inside 0:4, got 2:5"):
        use(oracle.options("cpu", layers=range(2, 5)))


@pytest.mark.parametrize("use", [load_model, check_model])
def test_a_model_comes_from_one_place(oracle: Oracle, use: Callable[[ModelOptions], object]) -> None:
    with pytest.raises(ModelError, match="expected either a model directory or a config"):
        use(ModelOptions(torch.device("cpu")))
    with pytest.raises(ModelError, match="expected either a model directory or a config"):
        use(oracle.options("cpu", random_init=oracle.directory / "config.json"))


def test_a_device_that_is_not_there_is_refused(oracle: Oracle) -> None:
    with pytest.raises(ModelError, match="device: expected one that torch finds here, got cuda:99"):
        load_model(oracle.options("cuda:99"))


def test_a_model_is_checked_without_its_device_and_its_weights(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Checkpoint, "read")
    check_model(oracle.options("meta"))
    with pytest.raises(AttributeError, match="read"):
        load_model(oracle.options("cpu"))


def test_weights_for_which_there_is_no_room_are_told(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: torch.empty(1 << 50))
    with pytest.raises(ModelError, match=r"^--model, --random-init: the weights can't be loaded to cpu: .*memory"):
        load_model(oracle.options("cpu"))


def test_random_weights_serve_a_config_alone(oracle: Oracle, device: str) -> None:
    options = ModelOptions(torch.device(device), random_init=oracle.directory / "config.json", seed=3)
    hidden = torch.randn(20, HIDDEN)
    first, again, other = (
        serve(replace(options, seed=seed)).step(hidden, [1], [20], read_line=[0]) for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert 0.1 < float(first.std()) < 10
