"""Attention layers, alone and among others, against transformers on the same checkpoint; and what pages may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.state_pool import StateOptions, StatePool
from deltaline_server.models.config import Scope
from deltaline_server.models.model import Model, ModelOptions, load_model

TOLERANCE = 1e-4
MAX_DRAFT, PAGE_SIZE = 4, 16
HIDDEN = 128
HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
SPANS = [(Scope.MIXER, range(1, 2)), (Scope.BLOCK, range(3, 4)), (Scope.BLOCK, range(4))]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass
class Oracle:
    """The transformers model on the CPU and its checkpoint."""

    model: Any
    directory: Path

    def cache(self) -> Any:
        import transformers  # large, and absent where only the other tests run

        return transformers.DynamicCache(config=self.model.config)

    def run(self, layers: range, scope: Scope, hidden: Tensor, position: int, cache: Any) -> Tensor:
        """Run layers over one sequence's tokens `[n, hidden]`, of which `position` came before."""
        x, base = hidden[None], self.model.base_model
        at = torch.arange(position, position + len(hidden))
        turns = base.rotary_emb(x, at[None] if self.model.config.model_type == "qwen3_next" else at.expand(3, 1, -1))
        mask = torch.full((len(hidden), position + len(hidden)), float("-inf")).triu(position + 1)[None, None]
        for i in layers:
            layer = base.layers[i]
            if scope is Scope.MIXER:
                x = layer.self_attn(x, turns, mask, cache)[0]
            else:
                own = mask if HYBRID[i] == "full_attention" else None
                x = layer(x, position_embeddings=turns, attention_mask=own, past_key_values=cache)
        return x[0]

    def options(self, **changes: Any) -> ModelOptions:
        return replace(ModelOptions(torch.device("cpu"), model=self.directory), **changes)


@pytest.fixture(scope="module")
def make_oracle(
    tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[..., Any]
) -> Callable[..., Oracle]:
    def make(model_type: str, **changes: Any) -> Oracle:
        directory = tmp_path_factory.mktemp(model_type)
        sizes = {"hidden": HIDDEN, "intermediate": 96, "head_dim": 16, "layer_types": HYBRID, "num_attention_heads": 6}
        heads = {"num_key_value_heads": 2, "attn_implementation": "eager", "max_position_embeddings": 512}
        changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}} | changes
        values = sizes | heads | changes
        rope = values.pop("rope_parameters")
        model = write_checkpoint(directory, model_type, **values, rope_parameters=rope)
        return Oracle(model, directory)

    return make


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def oracle(request: pytest.FixtureRequest, make_oracle: Callable[..., Oracle]) -> Oracle:
    return make_oracle(request.param)


@dataclass
class Served:
    """A model and its state, one sequence per line, whose pages are poisoned where nothing was written."""

    model: Model
    pool: StatePool
    pages: dict[int, list[int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    position: dict[int, int] = field(default_factory=dict)

    def step(
        self, hidden: Tensor, lines: list[int], lengths: list[int], *, verify: bool = False, accepted: int = 0
    ) -> Tensor:
        """Run span 0 over packed rows, each its line's next tokens; give pages as they are needed.

        verify: they are drafts of all rows. accepted: of the drafts of a verify before, in all rows.
        """
        new, zeros = [], [0] * len(lines)
        read = [line if line in self.position else 0 for line in lines]
        position = [self.position.get(line, 0) + accepted for line in lines]
        for line, begin, length in zip(lines, position, lengths, strict=True):
            own = self.pages.setdefault(line, [])
            while len(own) * PAGE_SIZE < begin + length:
                own.append(self.free.pop())
            starts = range(-(-begin // PAGE_SIZE), -(-(begin + length) // PAGE_SIZE))
            new += [(line, place, own[place]) for place in starts]
            self.position[line] = begin + (0 if verify else length)
        rows = Rows.build(
            lengths,
            read,
            lines,
            zeros if verify else lengths,
            [accepted] * len(lines),
            [int(bool(accepted))] * len(lines),
            position=position,
            max_short=MAX_DRAFT,
            device="cpu",
        )
        entries = torch.tensor([*new, (0, 0, 0)], dtype=torch.int32).t().contiguous()
        return self.model.forward(0, hidden, rows, self.pool, new_pages=entries)


def serve(options: ModelOptions, lines: int = 4, seed: int = 0) -> Served:
    model = load_model(options)
    pool = model.make_pool(StateOptions(lines, MAX_DRAFT, page_size=PAGE_SIZE))
    assert pool.kv is not None
    for state in pool.layers:
        if isinstance(state, KvState):
            state.k_pages.fill_(float("nan"))
            state.v_pages.fill_(float("nan"))
    order = torch.randperm(pool.kv.num_pages, generator=torch.Generator().manual_seed(seed)) + 1
    return Served(model, pool, free=order.tolist())


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < tolerance


@pytest.mark.parametrize(("scope", "span"), SPANS, ids=["mixer", "block", "hybrid"])
@pytest.mark.parametrize("length", [1, 15, 16, 70])
def test_prefill_then_decode(oracle: Oracle, scope: Scope, span: range, length: int) -> None:
    served, cache = serve(oracle.options(scope=scope, spans=[span])), oracle.cache()
    hidden = torch.randn(length + 4, HIDDEN)
    ours = [served.step(hidden[:length], [2], [length])]
    theirs = [oracle.run(span, scope, hidden[:length], 0, cache)]
    for t in range(length, length + 4):
        ours.append(served.step(hidden[t : t + 1], [2], [1]))
        theirs.append(oracle.run(span, scope, hidden[t : t + 1], t, cache))
    assert_close(torch.cat(ours), torch.cat(theirs))


def test_rows_of_a_batch_are_their_sequences(oracle: Oracle) -> None:
    served, lengths, more = serve(oracle.options()), [1, 4, 40, 71], [1, 2, 1, 20]
    hidden, later = torch.randn(sum(lengths), HIDDEN), torch.randn(sum(more), HIDDEN)
    ours = [served.step(hidden, [1, 2, 3, 4], lengths), served.step(later, [1, 2, 3, 4], more)]
    for i, (first, second) in enumerate(zip(hidden.split(lengths), later.split(more), strict=True)):
        cache = oracle.cache()
        assert_close(ours[0].split(lengths)[i], oracle.run(range(4), Scope.BLOCK, first, 0, cache))
        # As one prefill more: transformers' recurrence of several tokens takes another path with a cache.
        whole = oracle.run(range(4), Scope.BLOCK, torch.cat((first, second)), 0, oracle.cache())
        assert_close(ours[1].split(more)[i], whole[len(first) :])


@pytest.mark.parametrize("length", [9, 14, 16], ids=lambda n: f"at-{n}")
@pytest.mark.parametrize("accepted", range(MAX_DRAFT + 1))
def test_verify_then_a_rejection(oracle: Oracle, length: int, accepted: int) -> None:
    served = serve(oracle.options())
    prompt, drafts, last = torch.randn(length, HIDDEN), torch.randn(MAX_DRAFT, HIDDEN), torch.randn(3, HIDDEN)
    served.step(prompt, [1], [length])
    verified = served.step(drafts, [1], [MAX_DRAFT], verify=True)
    decoded = [served.step(last[:1], [1], [1], accepted=accepted)]
    decoded += [served.step(last[t : t + 1], [1], [1]) for t in (1, 2)]

    tokens = torch.cat((prompt, drafts[:accepted], last))
    whole = oracle.run(range(4), Scope.BLOCK, tokens, 0, oracle.cache())
    assert_close(torch.cat((verified[:accepted], *decoded)), whole[length:])


@pytest.mark.parametrize("split", [1, 16, 37])
def test_a_split_prefill_is_a_whole_one(oracle: Oracle, split: int) -> None:
    served = serve(oracle.options())
    hidden = torch.randn(90, HIDDEN)
    parts = [served.step(part, [2], [len(part)]) for part in hidden.split(split)]
    assert_close(torch.cat(parts), oracle.run(range(4), Scope.BLOCK, hidden, 0, oracle.cache()))


def test_a_page_that_was_anothers_tells_nothing(oracle: Oracle) -> None:
    hidden, other = torch.randn(37, HIDDEN), torch.randn(60, HIDDEN)
    results: list[Tensor] = []
    for served in (serve(oracle.options()), serve(oracle.options())):
        if results:  # the second time, on the pages of a sequence that is over
            served.step(other, [1], [60])
            served.free += reversed(served.pages.pop(1))
            del served.position[1]
            served.pool.zero(torch.tensor([1]).numpy())
        results.append(torch.cat([served.step(hidden[:30], [1], [30]), served.step(hidden[30:], [1], [7])]))
    assert torch.equal(results[0], results[1])


def test_skipped_rows_store_nothing(oracle: Oracle) -> None:
    served = serve(oracle.options())
    rows = Rows.build([2], [0], [-1], [2], [0], [0], max_short=MAX_DRAFT, device="cpu")
    served.model.forward(0, torch.randn(2, HIDDEN), rows, served.pool)
    caches = [state for state in served.pool.layers if isinstance(state, KvState)]
    assert len(caches) == 2
    assert all(bool(tensor.isnan().all()) for state in caches for tensor in (state.k_pages, state.v_pages))


@pytest.mark.parametrize("scope", list(Scope))
def test_the_outputs_of_two_ranks_sum_to_the_whole(make_oracle: Callable[..., Oracle], scope: Scope) -> None:
    oracle = make_oracle("qwen3_5_text", attention_bias=True)
    options, hidden = oracle.options(scope=Scope.MIXER, layers=range(1, 2)), torch.randn(40, HIDDEN)
    whole, *ranks = (
        serve(replace(options, rank=rank, world_size=size)).step(hidden, [1], [40])
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    assert_close(ranks[0] + ranks[1], whole, tolerance=1e-5)
    assert_close(whole, oracle.run(range(1, 2), Scope.MIXER, hidden, 0, oracle.cache()))
    with pytest.raises(ModelError, match="world_size: expected a divisor of 2 key-value heads, got 4"):
        load_model(replace(options, world_size=4))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1, 0], "mrope_interleaved": True}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}, "head_dim": 32},
    ],
    ids=["half", "mrope", "whole"],
)
def test_rotary_embeddings_are_those_of_the_config(make_oracle: Callable[..., Oracle], changes: dict[str, Any]) -> None:
    oracle = make_oracle("qwen3_5_text", **changes)
    hidden, span = torch.randn(50, HIDDEN), range(1, 2)
    served = serve(oracle.options(scope=Scope.MIXER, spans=[span]))
    ours = served.step(hidden, [1], [50])
    assert_close(ours, oracle.run(span, Scope.MIXER, hidden, 0, oracle.cache()))


def test_bfloat16_follows_the_checkpoint_model(make_oracle: Callable[..., Oracle]) -> None:
    oracle = make_oracle("qwen3_5_text", dtype="bfloat16")
    served, hidden = serve(oracle.options()), torch.randn(40, HIDDEN).bfloat16()
    theirs = oracle.run(range(4), Scope.BLOCK, hidden, 0, oracle.cache())
    # Both round at every layer; neither is nearer to the exact result.
    assert_close(served.step(hidden, [1], [40]), theirs, tolerance=3e-2)


def test_random_weights_serve_a_config_alone(oracle: Oracle) -> None:
    options = ModelOptions(torch.device("cpu"), random_init=oracle.directory / "config.json", seed=3)
    hidden = torch.randn(20, HIDDEN)
    first, again = (serve(options).step(hidden, [1], [20]) for _ in range(2))
    assert torch.equal(first, again)
    assert 0.1 < float(first.std()) < 10
