"""compat.flex_decoding against eager flex_attention of PyTorch, with its BlockMask."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from deltaline_kernels.attention import and_masks, find_modifier
from deltaline_kernels.compat import flex_decoding

WINDOW = 40


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let PyTorch compute, not trace; it warns that this is slow."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor

    def check(
        self,
        path: Path,
        score: Callable[..., Tensor] | None = None,
        mask: Callable[..., Tensor] | None = None,
        **told: Any,
    ) -> Tensor:
        """Compare with what eager flex_attention does in fp64 with the functions; return the outputs."""
        q, k, v = (x.cpu().double() for x in (self.q, self.k, self.v))
        block_mask = None
        if mask is not None:
            block_mask = create_block_mask(mask, len(q), q.shape[1], q.shape[2], k.shape[2], device="cpu")
        want, aux = flex_attention(
            q,
            k.expand(len(q), -1, -1, -1),
            v.expand(len(q), -1, -1, -1),
            score_mod=score,
            block_mask=block_mask,
            scale=told.get("scale"),
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        o, lse = flex_decoding(self.q, self.k, self.v, return_lse=True, **told)
        assert_close("o", o, want, path.dtype)
        assert aux.lse is not None
        got, lse = lse.double().cpu(), aux.lse
        assert torch.equal(got.isinf(), lse.isinf())
        assert_close("lse", got.nan_to_num(0, 0, 0), lse.nan_to_num(0, 0, 0), path.dtype)
        return o


def make(
    path: Path,
    B: int = 2,
    HQ: int = 4,
    HKV: int = 2,
    M: int = 3,
    N: int = 100,
    D: int = 64,
    DV: int = 64,
    lines: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(B + 7 * M + N)
    shapes = ((B, HQ, M, D), (lines or B, HKV, N, D), (lines or B, HKV, N, DV))
    made = (torch.randn(*shape, generator=generator).to(path.dtype).to(path.device) for shape in shapes)
    return Inputs(*made)


def is_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def in_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv > q - WINDOW)


@pytest.mark.parametrize(
    "sizes",
    [{}, {"HQ": 6}, {"M": 1, "N": 700}, {"B": 1, "HQ": 7, "HKV": 1, "M": 16}, {"D": 96, "DV": 128}, {"M": 20, "N": 7}],
    ids=str,
)
def test_flex_matches_flex_attention(path: Path, sizes: dict[str, int]) -> None:
    inputs = make(path, **sizes)
    inputs.check(path)
    inputs.check(path, None, is_causal, mask_mod="causal")
    cap = find_modifier("soft_cap")(3.0)
    inputs.check(path, lambda s, b, h, q, kv: 3 * torch.tanh(s / 3), is_causal, score_mod=cap, mask_mod="causal")


def test_flex_takes_the_flag_of_shared_heads(exact_path: Path) -> None:
    make(exact_path).check(exact_path, enable_gqa=True)
    for flag in (True, False):
        make(exact_path, HQ=2).check(exact_path, enable_gqa=flag)


def test_flex_takes_scores_in_turn_and_a_scale(path: Path) -> None:
    inputs = make(path)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.3])
    scores = [find_modifier("alibi")(slopes, per="head"), find_modifier("soft_cap")(2.0)]
    inputs.check(
        path,
        lambda s, b, h, q, kv: 2 * torch.tanh((s + (kv - q) * slopes[h]) / 2),
        score_mod=scores,
        scale=0.3,
        kernel_options={"BLOCK_M": 64},
    )


def test_flex_broadcasts_keys_of_one_sequence(path: Path) -> None:
    inputs = make(path, B=3, lines=1)
    o = inputs.check(path)
    expanded = Inputs(inputs.q, inputs.k.expand(3, -1, -1, -1), inputs.v.expand(3, -1, -1, -1))
    assert_close("o", expanded.check(path), o, path.dtype)


@pytest.mark.parametrize("order", ["heads-first", "keys-first", "longer", "keys-first-longer", "mixed", "columns"])
def test_flex_takes_any_order_of_memory(path: Path, order: str) -> None:
    inputs = make(path)
    k, v = inputs.k, inputs.v
    poison = torch.full_like(k, torch.nan)
    if "keys-first" in order:
        k, v, poison = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v, poison))
    if "longer" in order:
        dim = 1 if "keys-first" in order else 2
        k, v = (torch.cat([*(x.transpose(1, 2) if dim == 1 else x for x in (one, poison))], dim) for one in (k, v))
        k, v = (x.transpose(1, 2)[:, :, :100] if dim == 1 else x[:, :, :100] for x in (k, v))
        assert not k.is_contiguous()
    if order == "mixed":
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "columns":
        k, v = torch.stack([k, v], -1).unbind(-1)
    Inputs(inputs.q.transpose(1, 2).contiguous().transpose(1, 2), k, v).check(path, None, is_causal, mask_mod="causal")


@pytest.mark.parametrize("block", [128, (1, 64), (64, 32), (32, 128)], ids=str)
def test_flex_takes_a_block_mask(path: Path, block: Any) -> None:
    """Lists of blocks by query block; beside them the modifier that means the same."""
    inputs = make(path, M=70, N=200)
    blocks = create_block_mask(in_window, None, None, 70, 200, device=path.device, BLOCK_SIZE=block)
    window = and_masks(find_modifier("causal")(), find_modifier("sliding_window")(WINDOW))
    inputs.check(path, None, in_window, block_mask=with_garbage(blocks), mask_mod=window)


def test_whole_blocks_skip_the_mask_and_never_the_score(path: Path) -> None:
    """The mask that is passed hides everything: what is seen are whole blocks, with their scores changed."""
    inputs = make(path, M=64, N=128)
    blocks = create_block_mask(is_causal, None, None, 64, 128, device=path.device, BLOCK_SIZE=(32, 32))
    nothing, cap = find_modifier("sink_tokens")(0), find_modifier("soft_cap")(1.5)
    inputs.check(
        path,
        lambda s, b, h, q, kv: 1.5 * torch.tanh(s / 1.5),
        lambda b, h, q, kv: kv // 32 < q // 32,
        score_mod=cap,
        mask_mod=nothing,
        block_mask=with_garbage(blocks),
    )


def with_garbage(blocks: Any) -> Any:
    """Return a mask whose lists hold numbers of no block behind their ends."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    found = {name: getattr(blocks, name).clone() for name in names}
    for count, numbers in zip(names[::2], names[1::2], strict=True):
        is_behind = torch.arange(found[numbers].shape[-1], device=found[count].device) >= found[count][..., None]
        found[numbers][is_behind] = 1 << 20
    return SimpleNamespace(BLOCK_SIZE=blocks.BLOCK_SIZE, mask_mod=None, **found)


def test_every_head_and_block_of_queries_has_a_list_of_its_own(path: Path) -> None:
    """PyTorch's first decode kernel read the lists of the first block for all of them. A list of none leaves -inf."""
    inputs = make(path, M=40, N=256)
    seen = torch.rand(4, 5, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    seen[0, 0] = False
    counts, numbers = seen.sum(-1)[None].int(), seen.int().argsort(-1, descending=True)[None].int()
    blocks = SimpleNamespace(
        BLOCK_SIZE=(8, 32),
        kv_num_blocks=counts.to(path.device),
        kv_indices=numbers.to(path.device),
        full_kv_num_blocks=torch.zeros_like(counts).to(path.device),
        full_kv_indices=numbers.to(path.device),
    )
    inputs.check(path, None, lambda b, h, q, kv: seen[h, q // 8, kv // 32], block_mask=with_garbage(blocks))


def call(inputs: Inputs, *, return_lse: bool = False) -> tuple[Tensor, ...]:
    """Return o, and lse if it is asked for."""
    found = flex_decoding(inputs.q, inputs.k, inputs.v, return_lse=return_lse)
    return found if isinstance(found, tuple) else (found,)


def test_flex_without_keys_or_queries(path: Path) -> None:
    o, lse = call(make(path, N=0), return_lse=True)
    assert torch.equal(o, torch.zeros_like(o)) and bool((lse == -torch.inf).all())
    assert call(make(path, M=0))[0].shape == (2, 4, 0, 64)
    assert call(make(path, B=0))[0].shape == (0, 4, 3, 64)


def test_flex_names_the_wrong_argument() -> None:
    path = Path("cpu", torch.float32)
    good = vars(make(path))
    names = dict(zip(("query", "key", "value"), good.values(), strict=True))

    def call(**changes: Any) -> None:
        flex_decoding(**{**names, **changes})

    call()
    q, k, v = good.values()

    def mask_of(heads: int | None, M: int, N: int, block: Any = 128) -> dict[str, Any]:
        made = create_block_mask(is_causal, None, heads, M, N, device="cpu", BLOCK_SIZE=block)
        return {"block_mask": made, "mask_mod": "causal"}

    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "score_mod: expected a score modifier .*alibi.*soft_cap.*got", {"score_mod": lambda s, *_: s}),
        (TypeError, "mask_mod: expected a mask modifier .*causal.*got function", {"mask_mod": is_causal}),
        (TypeError, "mask_mod: expected a mask modifier .*got alibi", {"mask_mod": find_modifier("alibi")(1.0)}),
        (ValueError, "modifier: expected one of alibi, causal, .*got 'casual'", {"mask_mod": "casual"}),
        (TypeError, "soft_cap: expected a parameter of float, got NoneType", {"score_mod": "soft_cap"}),
        (
            TypeError,
            "block_mask: its mask_mod is a Python function.*causal",
            mask_of(None, 3, 100) | {"mask_mod": None},
        ),
        (TypeError, "block_mask: expected a BlockMask, got int", {"block_mask": 3}),
        (ValueError, "block_mask: expected blocks for 3 queries", mask_of(None, 1, 100, (1, 64))),
        (ValueError, "block_mask: expected blocks for 100 keys", mask_of(None, 3, 64, 64)),
        (ValueError, "blocks: expected lists of 1 or 4 heads, got 3", mask_of(3, 3, 100)),
        (ValueError, "query: expected a multiple of the 2 heads", {"query": q[:, :3]}),
        (ValueError, "key: expected a batch of", {"key": k.repeat(2, 1, 1, 1)[:3], "value": v.repeat(2, 1, 1, 1)[:3]}),
        (TypeError, "value: ", {"value": v.half()}),
        (ValueError, "value: ", {"value": v[:, :, 1:]}),
        (TypeError, "scale: ", {"scale": "1"}),
        (TypeError, "kernel_options: ", {"kernel_options": 3}),
        (ValueError, "enable_gqa: expected True, as query has 4 heads and key 2, got False", {"enable_gqa": False}),
        (TypeError, "enable_gqa: expected True or False", {"enable_gqa": 1}),
    ]
    for kind, message, changes in wrong:
        with pytest.raises(kind, match=rf"^{message}"):
            call(**changes)
    with pytest.raises(TypeError, match=re.escape("alibi, causal, document, logit_bias, prefix_lm")):
        call(mask_mod=is_causal)


def test_large_biases_cost_no_more_than_they_cost_eager_attention(exact_path: Path) -> None:
    """Scores of thousands are rounded once, with the bias that makes them so: neither the bias itself nor exponents."""
    inputs = make(exact_path, B=1, HQ=80, HKV=40, M=2, N=2048, D=128, DV=128)
    slopes = torch.exp2(-8.0 / 80 * torch.arange(1, 81)).to(exact_path.device)

    def attend(dtype: torch.dtype) -> Tensor:
        q, k, v = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v))
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + (j - i) * slopes[h], enable_gqa=True)

    got = flex_decoding(inputs.q, inputs.k, inputs.v, score_mod=find_modifier("alibi")(slopes, per="head"))
    assert isinstance(got, Tensor)
    want = attend(torch.float64)
    own = (attend(torch.float32) - want).abs().max()
    assert (got - want).abs().max() <= 2 * own
