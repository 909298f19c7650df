"""Layers as transformers computes them, and the same layers as a span is served: what tests of layers compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltaline_kernels import Rows
from deltaline_server.layers.kv_cache import KvState
from deltaline_server.layers.state_pool import LayerState, StateOptions, StatePool
from deltaline_server.layers.streams import StreamEnds
from deltaline_server.models.config import Scope
from deltaline_server.models.model import Model, ModelOptions, load_model
from deltaline_server.snapshots.tiers import layer_numbers

TOLERANCE = 1e-4
MIXERS = ("mixer", "mamba", "linear_attn", "conv", "self_attn")
SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
MAX_DRAFT, PAGE_SIZE = 4, 16
# Whose mixers alone make a layer.
BARE_MAMBA = ("mamba", "falcon_mamba", "mamba2")
MAMBA = (*BARE_MAMBA, "jamba", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1", "zamba2")
WITHOUT_POSITIONS = (*BARE_MAMBA, "jamba", "nemotron_h", "kimi_linear", "glm5_next_text")
# Whose attention makes its own masks, of which tokens there are.
SPARSE = ("glm5_next_text",)


@dataclass
class Oracle:
    """A transformers model on the CPU and its checkpoint; with residual streams if examples/streams.py added them."""

    model: Any
    directory: Path

    def options(self, device: str = "cpu", **changes: Any) -> ModelOptions:
        """What serves it."""
        return replace(ModelOptions(torch.device(device), model=self.directory), **changes)

    def cache(self) -> Any:
        import transformers  # large, and absent where only the other tests run

        return transformers.DynamicCache(config=self.model.config)

    def run(
        self, layers: range, hidden: Tensor, cache: Any = None, position: int = 0, scope: Scope = Scope.BLOCK
    ) -> Tensor:
        """Run layers over one sequence's tokens `[n, ...]`, of which `position` came before; cache: None for a new one.

        Those that a cache continues are to be one by one: transformers' recurrence of several takes another path.
        """
        cache = self.cache() if cache is None else cache
        x, base, config = hidden[None], self.model.base_model, self.model.config
        at = torch.arange(position, position + len(hidden))[None]
        if config.model_type in MAMBA:
            takes_cache = "cache_params" if config.model_type in BARE_MAMBA else "past_key_values"
            arguments = {"cache_params" if hasattr(config, "hc_mult") else takes_cache: cache}
        else:
            arguments = {"past_key_values": cache}
        rotary = getattr(base, "rotary_emb", getattr(base, "pos_emb", None))
        if config.model_type not in WITHOUT_POSITIONS:
            at = at.expand(3, 1, -1) if config.model_type.startswith("qwen3_5") else at
            arguments["position_embeddings"] = None if rotary is None else rotary(x.flatten(2), at)
        mask = torch.full((len(hidden), position + len(hidden)), float("-inf")).triu(position + 1)[None, None]
        if config.model_type in SPARSE:
            mask = torch.ones(1, len(hidden), dtype=torch.bool)
        for i in layers:
            layer = base.layers[i]
            if config.model_type == "zamba2" and scope is Scope.BLOCK:
                x = layer(x, hidden[None], i, causal_mask=mask, **arguments)
                continue
            mixer = next(getattr(layer, name) for name in MIXERS if getattr(layer, name, None) is not None)
            kind = getattr(layer, "block_type", None)  # of families whose mixers all have one name
            is_attention = getattr(layer, "self_attn", None) is not None or kind == "full_attention"
            is_attention = is_attention and kind != "linear_attention"
            if scope is Scope.BLOCK:
                has_mask = is_attention or config.model_type not in MAMBA
                masks = {"attention_mask": mask if is_attention else None} if has_mask else {}
                made = layer(x, **arguments, **masks)
                x = made[0] if isinstance(made, tuple) else made
                if config.model_type in SPARSE:
                    arguments["prev_topk_indices"] = made[1]
            elif config.model_type == "falcon_h1":
                made = layer.mamba(x, cache_params=cache) * layer.ssm_out_multiplier
                attended = x * layer.attention_in_multiplier
                attended = layer.self_attn(attended, attention_mask=mask, **arguments)[0]
                x = made + attended * layer.attn_out_multiplier
            elif is_attention:
                x = mixer(x, attention_mask=mask, **arguments)[0]
            elif kind in ("mlp", "moe"):
                x = mixer(x)
            elif config.model_type in SHORT_CONVOLUTIONS:
                x = mixer(x, past_key_values=cache)
            else:
                x = mixer(x, cache_params=cache)
        return x[0]


class WithEnds(Oracle):
    """A model with residual streams of its own, from embeddings to what its final norm is given, with as many tokens as
    its attention takes all of."""

    def options(self, device: str = "cpu", **changes: Any) -> ModelOptions:
        told = {"max_context": self.model.config.index_topk, "stream_ends": StreamEnds.BOTH}
        return super().options(device, **(told | changes))

    def run(self, layers: range, hidden: Tensor, *rest: Any, **options: Any) -> Tensor:
        streams = hidden[:, None].expand(-1, self.model.config.hc_mult, -1)
        return super().run(layers, streams, *rest, **options).mean(dim=1)


@dataclass
class Served:
    """A model and its state, one sequence per line, whose pages are poisoned where nothing was written."""

    model: Model
    pool: StatePool
    free: list[int]
    pages: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    # By span and line.
    position: dict[tuple[int, int], int] = field(default_factory=dict)
    half: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def step(
        self,
        hidden: Tensor,
        lines: Sequence[int],
        lengths: Sequence[int],
        *,
        verify: Sequence[bool] | bool = False,
        accepted: Sequence[int] | int = 0,
        span: int = 0,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Run a span over packed rows, each its line's next tokens; give pages as they are needed.

        verify: which rows are drafts. accepted: of the drafts of a verify before. Each of all rows, or by row.
        slots: of the rows' adapters.
        """
        keys = [(span, line) for line in lines]
        is_draft = [verify] * len(lines) if isinstance(verify, bool) else verify
        replayed = [accepted] * len(lines) if isinstance(accepted, int) else accepted
        begins = [self.position.get(key, 0) + count for key, count in zip(keys, replayed, strict=True)]
        rows = Rows.build(
            lengths,
            [line if key in self.position else 0 for key, line in zip(keys, lines, strict=True)],
            lines,
            [0 if draft else length for draft, length in zip(is_draft, lengths, strict=True)],
            replayed,
            [self.half[key] for key in keys],
            position=begins,
            max_short=MAX_DRAFT,
            device=self.model.device,
        )
        pages = None if self.pool.kv is None else self._new_pages(lines, begins, lengths)
        ends, device = self.model.ends[span], self.model.device
        flat = hidden.to(device, self.model.dtype).reshape(len(hidden), ends.input_width)
        adapters = None if slots is None else torch.tensor(slots, dtype=torch.int32, device=device)
        made = self.model.forward(span, flat, rows, self.pool, adapters, pages)
        assert made.shape == (len(hidden), ends.output_width) and made.dtype is self.model.dtype
        for key, begin, length, draft in zip(keys, begins, lengths, is_draft, strict=True):
            self.position[key] = begin + (0 if draft else length)
            self.half[key] ^= int(draft)
        return made.cpu().reshape(len(hidden), *ends.output_shape)

    def end(self, line: int) -> None:
        """End a line's sequence; its pages are the next to be given."""
        self.free += reversed(self.pages.pop(line))
        del self.position[0, line]
        self.pool.zero(torch.tensor([line]).numpy())

    def _new_pages(self, lines: Sequence[int], begins: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """The pages that begin among the rows' tokens, as StatePool.put_pages takes them."""
        new = [(0, 0, 0)]
        for line, begin, length in zip(lines, begins, lengths, strict=True):
            own = self.pages[line]
            while len(own) * PAGE_SIZE < begin + length:
                own.append(self.free.pop())
            starts = range(-(-begin // PAGE_SIZE), -(-(begin + length) // PAGE_SIZE))
            new += [(line, place, own[place]) for place in starts]
        return torch.tensor(new, dtype=torch.int32, device=self.model.device).t().contiguous()


def serve(options: ModelOptions, lines: int = 4) -> Served:
    """Load a model with state for so many sequences; pages are given in an order drawn at random."""
    model = load_model(options)
    pool = model.make_pool(StateOptions(lines, MAX_DRAFT, page_size=PAGE_SIZE))
    for state in pool.layers:
        if isinstance(state, KvState):
            state.k_pages.fill_(float("nan"))
            state.v_pages.fill_(float("nan"))
    num_pages = 0 if pool.kv is None else pool.kv.num_pages
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)) + 1
    return Served(model, pool, order.tolist())


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    """Fail unless one is as the other, but for a share of its length."""
    assert ours.shape == theirs.shape
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < tolerance


def assert_same_state(served: Served, line: int, cache: Any, layers: range) -> None:
    """Fail unless the lines of the recurrent layers among these are what transformers keeps of the same sequence."""
    is_mamba = served.model.config.model_type in MAMBA
    for state, i in zip(served.pool.layers, layer_numbers(served.model), strict=True):
        if isinstance(state, LayerState) and i in layers:
            history = cache.layers[i].conv_states[0][0].t()[1:]
            assert_close(state.conv[line, : len(history)].cpu(), history)
            if state.recurrent.numel():
                recurrent = cache.layers[i].recurrent_states[0][0]
                kept = state.recurrent[line].cpu()
                # Of Mamba-1 their channels have no heads.
                assert_close(kept, recurrent.view_as(kept) if is_mamba else recurrent.transpose(1, 2))


def assert_same_life(oracle: Oracle, device: str, layers: range) -> None:
    """Prefill, decode, verify, commit, and go on: a served sequence is what the oracle computes at once, and its state
    as well."""
    prompt, drafts, accepted, end = 40, MAX_DRAFT, 2, 50
    served, cache = serve(oracle.options(device)), oracle.cache()
    [width] = served.model.ends[0].input_shape
    hidden = torch.randn(end, width)
    ours = [served.step(hidden[:prompt], [1], [prompt]), served.step(hidden[prompt : prompt + 1], [1], [1])]
    drafted = torch.cat((hidden[prompt + 1 : prompt + 1 + accepted], torch.randn(drafts - accepted, width)))
    ours.append(served.step(drafted, [1], [drafts], verify=True)[:accepted])
    ours.append(served.step(hidden[prompt + 1 + accepted :], [1], [end - prompt - 1 - accepted], accepted=accepted))
    assert_close(torch.cat(ours), oracle.run(layers, hidden, cache))
    assert_same_state(served, 1, cache, layers)
