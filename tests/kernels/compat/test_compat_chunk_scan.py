"""The engines' chunked Mamba2 against a plain one. Whatever must not be read is NaN, and must be NaN afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rigs.kernels.field_mamba2 import field_scan
from rigs.kernels.paths import Path
from rigs.kernels.tolerance import assert_close

from deltaline_kernels.compat import mamba_chunk_scan_combined_varlen


@dataclass(frozen=True)
class Scan:
    """Sequences of a call, behind `before` tokens of none.

    `packed`: x, B, C are columns of one tensor. `skip`: dimensions of D.
    """

    lengths: tuple[int, ...]
    H: int = 4
    G: int = 2
    P: int = 16
    S: int = 16
    packed: bool = True
    skip: int = 1
    gated: bool = False
    biased: bool = True
    softplus: bool = True
    fresh: bool = False
    pool: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    gates: torch.dtype = torch.float32
    states: torch.dtype = torch.float32
    before: int = 0
    # x is of 16 bits, B and C are of 32.
    mixed: bool = False

    @property
    def starts(self) -> list[int]:
        return [self.before + sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]


SCANS = {
    "one": Scan((70,)),
    "ragged": Scan((5, 1, 130, 64)),
    # A peer's bug: what follows an empty sequence began with the first chunk of all.
    "empty-middle": Scan((70, 0, 80, 0, 9)),
    "all-empty": Scan((0, 0)),
    "fresh": Scan((33, 20), fresh=True),
    "fresh-and-empty": Scan((0, 20), fresh=True),
    "apart": Scan((40, 30), packed=False),
    "no-skip-no-bias": Scan((40,), skip=0, biased=False),
    "skip-per-channel": Scan((40,), skip=2),
    "gated": Scan((40, 3), gated=True, before=2),
    "gated-skip-per-channel": Scan((40, 3), gated=True, skip=2, H=2, G=1),
    "steps-as-they-come": Scan((66,), softplus=False),
    "limits": Scan((40,), limits=(0.3, 0.9)),
    "limits-of-steps-as-they-come": Scan((40,), softplus=False, limits=(0.3, 0.9)),
    "pool": Scan((40, 0, 9), pool=True),
    "pool-of-16-bits": Scan((40, 9), pool=True, states=torch.bfloat16),
    "states-of-16-bits": Scan((40, 9), states=torch.bfloat16),
    "16-bit-gates": Scan((40, 9), gates=torch.bfloat16),
    "tokens-before": Scan((40, 9), before=3),
    "groups-of-fp32": Scan((40, 9), mixed=True),
    "wide": Scan((70, 20), H=2, G=1, P=64, S=64),
}


def make_call(scan: Scan, path: Path) -> dict[str, Any]:
    """Make the arguments of a call; tokens of no sequence and unused slots are NaN, as `out` is."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    end, N = scan.starts[-1] + 2, len(scan.lengths)
    values, keys = scan.H * scan.P, scan.G * scan.S
    wide = normal(end, values + 2 * keys + 8)
    wide[:, values:] /= scan.S**0.25
    dt, z = normal(end, scan.H), normal(end, scan.H, scan.P)
    for tokens in (wide, dt, z):
        tokens[: scan.before] = torch.nan
        tokens[scan.starts[-1] :] = torch.nan
    tokens = wide.to(path.device, path.dtype)[:, : values + 2 * keys]
    x, B, C = (
        part.unflatten(1, size)
        for part, size in zip(
            tokens.split((values, keys, keys), dim=1),
            ((scan.H, scan.P), (scan.G, scan.S), (scan.G, scan.S)),
            strict=True,
        )
    )
    if not scan.packed:
        x, B, C = x.clone(), B.contiguous(), C.clone()
    if scan.mixed:
        x, B, C = x.to(path.narrow), B.float(), C.float()
    told = {
        "x": x,
        "dt": dt.to(path.device, scan.gates),
        "A": -normal(scan.H).exp().to(path.device),
        "B": B,
        "C": C,
        "chunk_size": 64,
        "cu_seqlens": torch.tensor(scan.starts, dtype=torch.int32, device=path.device),
        "cu_chunk_seqlens": None,
        "last_chunk_indices": None,
        "seq_idx": None,
        "out": torch.full_like(x, torch.nan).contiguous(),
        "D": (None, normal(scan.H), normal(scan.H, scan.P))[scan.skip],
        "z": z.to(path.device, path.dtype) if scan.gated else None,
        "dt_bias": normal(scan.H).to(path.device, scan.gates) if scan.biased else None,
        "initial_states": None if scan.fresh else normal(N, scan.H, scan.P, scan.S).to(path.device),
        "dt_softplus": scan.softplus,
        "dt_limit": scan.limits,
        "state_dtype": scan.states,
    }
    if told["D"] is not None:
        told["D"] = told["D"].to(path.device)
    if scan.pool:
        size = (2 * N + 1, scan.H, scan.P, scan.S)
        told["final_states_out"] = torch.full(size, torch.nan, dtype=scan.states, device=path.device)
        told["final_state_indices"] = torch.arange(2 * N - 1, 0, -2, dtype=torch.int32, device=path.device)
    return told


def check_scan(scan: Scan, path: Path) -> None:
    told = make_call(scan, path)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    want_y, want_states = field_scan(
        {name: told[name] for name in names}, scan.starts, scan.limits, softplus=scan.softplus
    )
    before = {name: told[name].clone() for name in names if told[name] is not None}
    states = mamba_chunk_scan_combined_varlen(**told)
    begin, end = scan.starts[0], scan.starts[-1]
    assert_close("out", told["out"][begin:end], want_y[begin:end], told["x"].dtype)
    computed = torch.float32 if scan.mixed else path.dtype
    limit = torch.bfloat16 if scan.states == torch.bfloat16 else computed
    if scan.pool:
        assert states is None
        slots = told["final_state_indices"].long()
        pool = told["final_states_out"]
        assert_close("pool", pool[slots], want_states, limit)
        others = torch.ones(pool.shape[0], dtype=torch.bool, device=pool.device)
        others[slots] = False
        assert pool[others].isnan().all()
    else:
        assert states is not None and states.dtype == scan.states
        assert_close("states", states, want_states, limit)
    assert all(torch.equal(told[name].nan_to_num(7.0), x.nan_to_num(7.0)) for name, x in before.items())


@pytest.mark.parametrize("scan", SCANS)
def test_scan_matches_the_reference(path: Path, scan: str) -> None:
    check_scan(SCANS[scan], path)


def test_gated_tokens_of_no_sequence_are_left_alone(path: Path) -> None:
    told = make_call(Scan((9, 4), gated=True, before=2), path)
    mamba_chunk_scan_combined_varlen(**told)
    assert told["out"][:2].isnan().all() and told["out"][15:].isnan().all()
    assert told["out"][2:15].isfinite().all()


@pytest.mark.parametrize(
    "scan", ["ragged", "empty-middle", "fresh", "limits-of-steps-as-they-come", "pool", "16-bit-gates"]
)
def test_the_state_behind_each_chunk_is_the_final_one_of_what_ends_there(path: Path, scan: str) -> None:
    told, lengths = make_call(SCANS[scan], path), SCANS[scan].lengths
    # Chunks as vLLM cuts them: of 32 tokens, the first one shorter where part of it was computed before.
    bounds = [told["cu_seqlens"][0].item()]
    sequence = []
    for i, length in enumerate(lengths):
        ends = [*range(32 - 5 * i, length, 32), length] if length else []
        bounds += [int(told["cu_seqlens"][i]) + end for end in ends]
        sequence += [i] * len(ends)
    told["cu_chunk_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=path.device)
    given = {name: told[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")}
    states = mamba_chunk_scan_combined_varlen(**told, return_intermediate_states=True)
    assert states is not None and states.dtype == told["state_dtype"] and len(states) == len(sequence)
    want_y, _ = field_scan(given, SCANS[scan].starts, SCANS[scan].limits, softplus=told["dt_softplus"])
    assert_close("out", told["out"][bounds[0] : bounds[-1]], want_y[bounds[0] : bounds[-1]], path.dtype)
    for chunk, i in enumerate(sequence):
        starts = [int(told["cu_seqlens"][i]), bounds[chunk + 1]]
        initial = None if given["initial_states"] is None else given["initial_states"][i : i + 1]
        _, want = field_scan(
            given | {"initial_states": initial}, starts, SCANS[scan].limits, softplus=told["dt_softplus"]
        )
        assert_close(f"state behind chunk {chunk}", states[chunk], want[0], path.dtype)
    if scan == "pool":
        assert told["final_states_out"][told["final_state_indices"].long()].isfinite().all()


def test_the_state_behind_a_chunk_owes_nothing_to_sequences_before(path: Path) -> None:
    told = make_call(SCANS["ragged"], path)
    starts = told["cu_seqlens"].tolist()
    told["cu_chunk_seqlens"] = told["cu_seqlens"].to(torch.int64)
    told["cu_seqlens"] = told["cu_seqlens"].to(torch.int32)
    want = mamba_chunk_scan_combined_varlen(**told, return_intermediate_states=True)
    told["dt"] = told["dt"].clone()
    told["dt"][starts[1] : starts[2]] = math.nan
    states = mamba_chunk_scan_combined_varlen(**told, return_intermediate_states=True)
    assert states is not None and want is not None and states[1].isnan().any()
    others = [0, *range(2, len(want))]
    assert want.isfinite().all() and torch.equal(states[others], want[others])


def test_states_behind_chunks_need_chunks() -> None:
    told = make_call(Scan((9,)), Path("cpu", torch.float32))
    with pytest.raises(TypeError, match=r"^cu_chunk_seqlens: expected a tensor"):
        mamba_chunk_scan_combined_varlen(**told, return_intermediate_states=True)


def test_states_have_the_dtype_of_the_tokens_unless_told(path: Path) -> None:
    told = make_call(Scan((9,)), path) | {"state_dtype": None}
    states = mamba_chunk_scan_combined_varlen(**told)
    assert states is not None and states.dtype == path.dtype


def test_scan_names_the_wrong_argument() -> None:
    good = make_call(Scan((9, 4), pool=True, gated=True), Path("cpu", torch.float32))
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "x", good["x"][0]),
        (ValueError, "dt", good["dt"][:3]),
        (ValueError, "A", good["A"][:3]),
        (TypeError, "B", good["B"].double()),
        (ValueError, "C", good["C"][:, :1]),
        (TypeError, "chunk_size", 1.5),
        (ValueError, "cu_seqlens", good["cu_seqlens"].flip(0)),
        (ValueError, "out", good["out"].transpose(0, 1).contiguous().transpose(0, 1)),
        (ValueError, "D", good["D"][:3]),
        (ValueError, "z", good["z"][1:]),
        (ValueError, "dt_bias", good["dt_bias"][1:]),
        (ValueError, "initial_states", good["initial_states"][1:]),
        (ValueError, "dt_limit", (0.5, 0.4)),
        (TypeError, "dt_limit", None),
        (TypeError, "dt_limit", (0.0,)),
        (TypeError, "dt_limit", (0.0, "inf")),
        (TypeError, "dt_softplus", good["dt_bias"]),
        (TypeError, "return_intermediate_states", 1),
        (TypeError, "final_states_out", good["final_states_out"].double()),
        (TypeError, "final_state_indices", None),
        (ValueError, "final_state_indices", good["final_state_indices"][:1]),
        (ValueError, "final_state_indices", torch.tensor([1, 1])),
        (ValueError, "final_state_indices", torch.tensor([1, -1])),
    ]
    for error, name, value in wrong:
        with pytest.raises(error, match=f"^{name}: expected"):
            mamba_chunk_scan_combined_varlen(**(good | {name: value}))
    with pytest.raises(TypeError, match=r"^state_dtype: expected"):
        mamba_chunk_scan_combined_varlen(
            **(good | {"state_dtype": torch.float64, "final_states_out": None, "final_state_indices": None})
        )
