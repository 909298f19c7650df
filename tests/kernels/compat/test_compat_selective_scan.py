"""The engines' selective scans, and their state update with values per channel, against plain loops and sums in fp64.

Whatever must not be read is NaN, and stays NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rigs.kernels.draws import ints, normal
from rigs.kernels.field_mamba1 import Tokens
from rigs.kernels.field_recurrence import field_moves, field_rows, field_slots, field_table
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels.compat import selective_scan_fn, selective_scan_varlen, selective_state_update


def scan_whole(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and the last state of mamba-ssm's layouts, in fp64, all channels of a token at once."""
    u, delta, A, B, C, D, z, bias = (x.cpu().double() for x in (u, delta, A, B, C, D, z, bias))
    step = (delta + bias[:, None]).exp().log1p()
    B, C = (x if x.ndim == 4 else x[:, None] for x in (B, C))
    B, C = (x.repeat_interleave(u.shape[1] // x.shape[1], dim=1) for x in (B, C))  # (b, d, s, n)
    h, ys = torch.zeros(u.shape[0], *A.shape).double(), []
    for t in range(u.shape[2]):
        h = (step[:, :, t, None] * A).exp() * h + (step * u)[:, :, t, None] * B[..., t]
        ys.append((h * C[..., t]).sum(-1))
    y = torch.stack(ys, dim=2) + D[:, None] * u if ys else u.clone()
    return y * F.silu(z), h


def batch_of(path: Path, n: int, groups: int | None, dim: int = 4, dstate: int = 8) -> dict[str, Any]:
    """The inputs of mamba-ssm's own test: a batch of 2 with small time steps and rates."""
    keys = (2, dstate, n) if groups is None else (2, groups, dstate, n)
    tokens = {
        "u": normal(2, dim, n, seed=0),
        "delta": 0.5 * normal(2, dim, n, seed=1).abs(),
        "B": normal(*keys, seed=2),
        "C": normal(*keys, seed=3),
        "z": normal(2, dim, n, seed=4),
    }
    weights = {
        "A": -0.5 * normal(dim, dstate, seed=5).abs(),
        "D": normal(dim, seed=6),
        "delta_bias": normal(dim, seed=7),
    }
    moved = {name: x.to(path.device, path.dtype) for name, x in tokens.items()}
    return moved | {name: x.to(path.device) for name, x in weights.items()}


@pytest.mark.parametrize("groups", [None, 1, 2])
@pytest.mark.parametrize(
    "n", [0, 1, 65, 128, *(pytest.param(n, marks=pytest.mark.sweep) for n in (256, 512, 1024, 2048, 4096))]
)
def test_scan_matches_the_recurrence(path: Path, n: int, groups: int | None) -> None:
    """Of mamba-ssm's own test."""
    told = batch_of(path, n, groups)
    order = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    want, want_state = scan_whole(*(told[name] for name in order))
    given: list[Any] = [*(told[name] for name in order), True, True]
    y, state = selective_scan_fn(*given)
    assert y.dtype == path.dtype and state.dtype == torch.float32
    assert_close("y", y, want, path.dtype)
    assert_close("state", state, want_state, torch.float32)
    again = selective_scan_fn(**told, delta_softplus=True)
    assert isinstance(again, Tensor) and torch.equal(again, y)


def test_scan_without_what_may_be_left_out(path: Path) -> None:
    told = batch_of(path, 9, 1)
    bare = {name: told[name] for name in ("u", "delta", "A", "B", "C")}
    zeros = torch.zeros_like(told["D"])
    softplus_of = {"delta": (bare["delta"].float().expm1()).log().to(path.dtype)}  # whose softplus is delta
    y = selective_scan_fn(**bare)
    assert isinstance(y, Tensor)
    want = selective_scan_fn(**(bare | softplus_of), D=zeros, delta_bias=zeros, delta_softplus=True)
    assert isinstance(want, Tensor)
    assert_close("y", y, want, torch.bfloat16)


@pytest.mark.parametrize("by_place", [True, False])
def test_varlen_scan_matches_the_plain_one(path: Path, by_place: bool) -> None:
    """Rows of several lengths, an empty and a skipped one among them; states of any dtype, begun with or not."""
    starts, slots, begun = [0, 3, 3, 8, 10, 17], [4, 1, -1, 0, 2], [True, True, True, False, True]
    T, dim, S, G = starts[-1], 6, 5, 2
    wide = {"u": (dim, T), "delta": (dim, T), "B": (G, S, T), "C": (G, S, T), "z": (dim, T)}
    told = {name: normal(*size, seed=i) for i, (name, size) in enumerate(wide.items())}
    for x in told.values():
        x[..., 3:8] = torch.nan
    told = {name: x.to(path.dtype) for name, x in told.items()}
    A, D, bias = -normal(dim, S, seed=8).exp(), normal(dim, seed=9), normal(dim, seed=10)
    pool = torch.full((6, dim, S), torch.nan)
    pool[[4, 2]] = normal(2, dim, S, seed=11)
    want_pool = pool.to(torch.float16)[:, None]
    by_token = {name: x.movedim(-1, 0) for name, x in told.items()}
    x, dt, z = (by_token[name][:, None] for name in ("u", "delta", "z"))
    tokens = Tokens(x, dt, A[None], by_token["B"], by_token["C"], D[None], z, bias[None])
    begins = want_pool.clone()
    begins[0] = 0  # the row whose slot is no history
    want = field_slots(tokens, starts, begins, slots)[:, 0].t()
    want_pool[[4, 0, 2]] = begins[[4, 0, 2]]
    own = want_pool[:, 0].clone()
    own.copy_(pool)
    own = own.to(path.device)
    index: dict[str, Any] = {
        "query_start_loc": torch.tensor(starts).to(path.device),
        "cache_indices": ints(*slots).to(path.device),
        "has_initial_state": torch.tensor(begun).to(path.device),
    }
    there = on(path, told)
    weights = [x.to(path.device) for x in (A, D, bias)]
    if by_place:
        y = selective_scan_varlen(
            there["u"],
            own,
            there["delta"],
            weights[0],
            there["B"],
            there["C"],
            weights[1],
            there["z"],
            weights[2],
            True,
            *index.values(),
        )
    else:
        names: dict[str, Any] = {"A": weights[0], "D": weights[1], "delta_bias": weights[2]}
        y = selective_scan_varlen(
            ssm_states=own, delta_softplus=True, **there, **names, **index, block_size=1024, cu_chunk_seqlen=None
        )
    assert_close("y", y, want, path.dtype)
    assert_close("states", own, want_pool[:, 0], torch.float16)


def test_varlen_scan_skips_the_rows_of_a_null_block(path: Path) -> None:
    """vLLM pads with block 0, which is one like others unless it is named."""
    told = {name: x[0] if name in ("u", "delta", "B", "C", "z") else x for name, x in batch_of(path, 7, 1).items()}
    told |= {"query_start_loc": ints(0, 3, 5, 7).to(path.device)}
    pools = [normal(3, 4, 8, seed=9).to(path.device) for _ in range(2)]
    slots = [ints(2, none, none).to(path.device) for none in (0, -1)]
    got = selective_scan_varlen(ssm_states=pools[0], cache_indices=slots[0], null_block_id=0, **told)
    want = selective_scan_varlen(ssm_states=pools[1], cache_indices=slots[1], **told)
    assert torch.equal(got, want) and torch.equal(*pools) and got[:, :3].any() and not got[:, 3:].any()


def test_varlen_scan_of_a_batch_is_that_of_its_rows(path: Path) -> None:
    told = batch_of(path, 7, 1)
    pool = torch.full((3, 4, 8), torch.nan, device=path.device)
    y = selective_scan_varlen(ssm_states=pool, delta_softplus=True, **told)
    want, state = selective_scan_fn(**told, delta_softplus=True, return_last_state=True)
    assert torch.equal(y, want) and torch.equal(pool[:2], state) and bool(pool[2].isnan().all())


UPDATES: dict[str, Any] = {
    "mamba-1": {"heads": 0, "dim": 12, "G": 1, "S": 16},
    "mamba-1-keys-of-groups": {"heads": 0, "dim": 12, "G": 2, "S": 5},
    "heads": {"heads": 3, "dim": 4, "G": 1, "S": 16},
    "heads-of-groups": {"heads": 4, "dim": 3, "G": 2, "S": 32},
    "ungated": {"heads": 0, "dim": 7, "G": 1, "S": 4, "bare": True},
}


def update_of(
    path: Path, num_tokens: int, *, heads: int, dim: int, G: int, S: int, bare: bool = False
) -> tuple[Tokens, dict[str, Any]]:
    """Make tokens with values of each channel, and the function's keywords, without heads where there are 0."""
    H = max(heads, 1)
    x, dt, z = (normal(num_tokens, H, dim, seed=i).to(path.dtype) for i in range(3))
    if bare:
        dt = dt.abs()
    B, C = (normal(num_tokens, G, S, seed=3 + i).to(path.dtype) for i in range(2))
    A = -normal(H, dim, S, seed=5).abs() - 1.0
    D, bias = normal(H, dim, seed=6), normal(H, dim, seed=7)
    host = Tokens(x, dt, A, B, C) if bare else Tokens(x, dt, A, B, C, D, z, bias)
    host = Tokens(**(vars(host) | {"softplus": not bare}))
    told = {"x": x, "dt": dt, "A": A, "B": B, "C": C} | ({} if bare else {"D": D, "z": z, "dt_bias": bias})
    if heads == 0:
        told = {name: x.squeeze(0 if name in ("A", "D", "dt_bias") else 1) for name, x in told.items()}
        told |= {} if G == 1 else {"B": B, "C": C}
    moved: dict[str, Any] = {name: x.to(path.device) for name, x in told.items()}
    return host, moved | {"dt_softplus": not bare}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", UPDATES)
def test_update_of_values_per_channel(path: Path, name: str, dtype: torch.dtype) -> None:
    """With the slots of the rows, and of one there is none."""
    tokens, told = update_of(path, 3, **UPDATES[name])
    slots = [4, -1, 2]
    pool = torch.full((6, *tokens.A.shape), torch.nan)
    pool[[4, 2]] = normal(2, *tokens.A.shape, seed=9)
    want_pool = pool.to(dtype)
    own = want_pool.squeeze(1) if told["x"].ndim == 2 else want_pool
    own = own.to(path.device, copy=True)
    want = field_slots(tokens, [0, 1, 2, 3], want_pool, slots).view(told["x"].shape)
    y = selective_state_update(own, **told, state_batch_indices=ints(*slots).to(path.device))
    assert y.dtype == path.dtype
    assert_close("y", y, want, path.dtype)
    assert_close("state", own, want_pool.view(own.shape), dtype)


def on(path: Path, given: dict[str, Tensor]) -> dict[str, Any]:
    return {name: x.to(path.device) for name, x in given.items()}


@pytest.mark.parametrize("heads", [0, 3])
def test_update_of_offsets_and_tables(path: Path, heads: int) -> None:
    """vLLM's forms: several tokens of a row, a slot for each, and states that go elsewhere."""
    tokens, told = update_of(path, 4, heads=heads, dim=5, G=1, S=8)
    states = normal(6, *tokens.A.shape, seed=9)
    table, accepted, starts = [[4, 1, 0], [2, 5, 3]], [1, 2], [0, 3, 4]
    want_pool = states.clone()
    want = field_table(tokens, starts, want_pool, table, accepted).view(told["x"].shape)
    own = states.view(6, *(told["A"].shape)).to(path.device, copy=True)
    index: dict[str, Any] = {
        "cu_seqlens": ints(*starts),
        "num_accepted_tokens": ints(*accepted),
        "state_batch_indices": ints(4),
    }
    index["state_batch_indices"] = torch.tensor(table)
    out = torch.full(told["x"].shape, torch.nan, dtype=torch.float32, device=path.device)
    y = selective_state_update(own, **told, **on(path, index), out=out)
    assert y is out
    assert_close("y", y, want, torch.float32 if path.dtype == torch.float32 else path.dtype)
    assert_close("state", own, want_pool.view(own.shape), torch.float32)
    before, target = states.view(own.shape).to(path.device, copy=True), torch.full_like(own, torch.nan)
    moved: dict[str, Any] = {
        "state_batch_indices": ints(4, 2),
        "dst_state_batch_indices": ints(1, -1),
        "cu_seqlens": ints(*starts),
    }
    y = selective_state_update(before, **told, **on(path, moved), final_state=target)
    want, last = field_rows(tokens, starts, states[[4, 2]])
    assert_close("y", y, want.view(y.shape), path.dtype)
    assert_close("state", target[1], last[0].view(target[1].shape), torch.float32)
    assert torch.equal(before.cpu(), states.view(before.shape)) and bool(target[[0, 2, 3, 4, 5]].isnan().all())


def test_update_of_several_tokens_and_a_state_of_each(path: Path) -> None:
    """SGLang's forms: tokens in a dimension of their own, a buffer of states."""
    tokens, told = update_of(path, 4, heads=2, dim=5, G=1, S=8)
    told |= {name: told[name].unflatten(0, (2, 2)) for name in ("x", "dt", "B", "C", "z")}
    states = normal(6, *tokens.A.shape, seed=9)
    steps = torch.full((3, 2, *tokens.A.shape), torch.nan)
    want = field_moves(tokens, [0, 2, 4], states, [4, 2], steps.flatten(0, 1), [[2, 3], [4, 5]], each=True)
    own, buffer = states.to(path.device, copy=True), torch.full_like(steps, torch.nan, device=path.device)
    index = on(path, {"state_batch_indices": ints(4, 2), "intermediate_state_indices": ints(1, 2)})
    y = selective_state_update(own, **told, **index, intermediate_states_buffer=buffer, disable_state_update=True)
    assert_close("y", y, want.view(y.shape), path.dtype)
    assert_close("states", buffer, steps, torch.float32)
    assert torch.equal(own.cpu(), states)


@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("dstate", [16, 32, 64])
@pytest.mark.parametrize("dim", [2048, 2064, 4096])
@pytest.mark.sweep
def test_update_of_mamba_ssms_own_sizes(path: Path, dim: int, dstate: int, has_z: bool) -> None:
    x, dt, z = (normal(2, dim, seed=i).to(path.device, path.dtype) for i in range(3))
    B, C = (normal(2, dstate, seed=3 + i).to(path.device, path.dtype) for i in range(2))
    A, D, bias = -normal(dim, dstate, seed=5).abs() - 1.0, normal(dim, seed=6), normal(dim, seed=7) - 4.0
    A, D, bias = (w.to(path.device) for w in (A, D, bias))
    state = normal(2, dim, dstate, seed=8).to(path.device, path.dtype)
    step = (dt.double() + bias).exp().log1p()[..., None]
    want_state = (step * A).exp() * state.double() + step * (x.double()[..., None] * B.double()[:, None])
    want = (want_state @ C.double()[..., None])[..., 0] + D * x.double()
    if has_z:
        want = want * F.silu(z.double())
    y = selective_state_update(state, x, dt, A, B, C, D, z if has_z else None, bias, dt_softplus=True)
    assert_close("y", y, want, path.dtype)
    assert_close("state", state, want_state, path.dtype)


def test_arguments_are_named_when_they_are_wrong() -> None:
    path = Path("cpu", torch.float32)
    good: dict[str, Any] = dict(batch_of(path, 3, 2))
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "u", {"u": good["u"].double()}),
        (ValueError, "u", {"u": good["u"][0]}),
        (ValueError, "delta", {"delta": good["delta"][:1]}),
        (TypeError, "A", {"A": good["A"].to(torch.complex64)}),
        (ValueError, "A", {"A": torch.ones(4, 257), "B": torch.ones(2, 257, 3), "C": torch.ones(2, 257, 3)}),
        (ValueError, "B", {"B": good["B"][:, :, :7]}),
        (ValueError, "B", {"B": good["A"]}),
        (ValueError, "C", {"C": good["C"][:, :1]}),
        (ValueError, "u", {"B": torch.ones(2, 3, 8, 3), "C": torch.ones(2, 3, 8, 3)}),
        (ValueError, "D", {"D": good["D"][:1]}),
        (ValueError, "z", {"z": good["z"][0]}),
        (ValueError, "delta_bias", {"delta_bias": good["A"]}),
        (TypeError, "delta_softplus", {"delta_softplus": 1}),
    ]
    for error, name, change in wrong:
        with pytest.raises(error, match=f"^{name}: expected"):
            selective_scan_fn(**(good | change))
    packed = {name: x[0] if name in ("u", "delta", "B", "C", "z") else x for name, x in good.items()}
    packed |= {"ssm_states": torch.zeros(2, 4, 8), "query_start_loc": ints(0, 1, 3), "cache_indices": ints(1, 0)}
    more: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "u", {"query_start_loc": None}),
        (TypeError, "ssm_states", {"ssm_states": torch.zeros(2, 4, 8).double()}),
        (ValueError, "ssm_states", {"ssm_states": torch.zeros(1, 4, 8), "cache_indices": None}),
        (ValueError, "query_start_loc", {"query_start_loc": ints(0, 3, 1)}),
        (ValueError, "cache_indices", {"cache_indices": ints(1)}),
        (ValueError, "cache_indices", {"cache_indices": ints(1, 2)}),
        (ValueError, "cache_indices", {"cache_indices": ints(1, 1)}),
        (TypeError, "has_initial_state", {"has_initial_state": ints(1, 1)}),
        (TypeError, "pad_slot_id", {"pad_slot_id": 0.5}),
        (ValueError, "initial_state_idx", {"initial_state_idx": ints(1, 1)}),
        (TypeError, "chunk_size", {"chunk_size": 64}),
    ]
    selective_scan_varlen(**packed)
    for error, name, change in more:
        with pytest.raises(error, match=f"^{name}: expected"):
            selective_scan_varlen(**(packed | change))
