"""How a batch is cut into programs of the LoRA kernels.

A table's first row that a batch fits in counts. So the plan of a batch depends on its numbers of tokens and slots and
on the sizes of the projection, never on which token has which adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deltaline_kernels.device.overlap import launch_options

# Tokens of a tile: few where a batch has few per adapter, see tile.py; many where ranks are high too, see dense.py.
SMALL_TILE, LARGE_TILE, DENSE_TILE = 16, 32, 128
FEW_TOKENS = 512
# At least so many tokens and ranks take dense tiles.
DENSE_TOKENS, DENSE_RANK = 1024, 64
# As fp16, sums of products might overflow; the products of fp32 are not those of the tensor cores.
DENSE_DTYPES = (torch.bfloat16,)
# Ranks are padded to so many.
RANK_UNIT = 16
SHRINK_WARPS = EXACT_WARPS = 4
# Blocks of inputs on their way, and one more.
MAX_STAGES = 5


@dataclass(frozen=True)
class ShrinkPlan:
    """`splits` programs per `block_m` tokens and slice, each with `steps` blocks of `block_k` inputs in `ways` parts.

    `programs`: about so many at once; those of a large batch have several tiles.
    """

    block_m: int
    block_k: int
    steps: int
    ways: int
    block_r: int
    warps: int
    stages: int
    eager_rows: int
    programs: int
    splits: int

    def options(self, rows: int) -> dict[str, int]:
        """Return what the kernel is compiled with for tiles of `rows` tokens."""
        return {
            "BLOCK_M": self.block_m,
            "PIECES": rows // self.block_m,
            "BLOCK_R": self.block_r,
            "BLOCK_K": self.block_k,
            "WAYS": self.ways,
            "STEPS": self.steps,
            "EAGER_ROWS": self.eager_rows,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class ExpandPlan:
    """Programs of `steps` times `block_n` outputs of `block_m` tokens, `block_r` ranks at once.

    `registers`: of a thread, None for as many as it takes. `programs`: about so many at once.
    """

    block_m: int
    block_n: int
    steps: int
    block_r: int
    warps: int
    registers: int | None
    programs: int


@dataclass(frozen=True)
class DensePlan:
    """Two launches for tiles of many tokens. `programs`: about so many at once.

    Shrink: programs of `shrink_r` ranks, `shrink_k` inputs at a time; what is in use or on its way is `shrink_stages`
    blocks. Expand: programs of `expand_n` outputs, `expand_r` ranks at a time; `early`: outputs are loaded before the
    products and not behind them; `registers`: of a thread, None for as many as it takes. `columns`: of either half of
    the sums of one slice, whole blocks of both.
    """

    columns: int
    programs: int
    shrink_r: int
    shrink_k: int
    shrink_steps: int
    shrink_warps: int
    shrink_stages: int
    expand_n: int
    expand_r: int
    expand_warps: int
    expand_stages: int
    early: bool
    registers: int | None


@dataclass(frozen=True)
class DenseBucket:
    """A row of the table of dense tiles: batches of at most `tokens` tokens and weights of at most `rank` ranks.

    Args:
        shrink: ranks of a program, inputs at a time, warps, and blocks on their way or in use.
        expand: outputs of a program, ranks at a time, warps, blocks, whether outputs are loaded before the products,
            and registers of a thread, None for as many as it takes.
    """

    tokens: int
    rank: int
    shrink: tuple[int, int, int, int]
    expand: tuple[int, int, int, int, bool, int | None]


@dataclass(frozen=True)
class Bucket:
    """A row of the table: batches of at most `tokens` tokens and weights of at most `rank` ranks.

    Args:
        shrink: programs per tile, and inputs at a time.
        expand: outputs at a time, times per program, warps, and registers of a thread, None for as many as it takes.
    """

    tokens: int
    rank: int
    shrink: tuple[int, int]
    expand: tuple[int, int, int, int | None]


# So few tokens wait more than they load: the first rows of A are on their way before the rank is known.
EAGER_TOKENS = 64
ANY = 1 << 62
# Measured, but for those of 8 tokens, of 64 with any rank and of 2,048: these follow their neighbours.
BUCKETS = (
    Bucket(2, 16, (16, 128), (128, 1, 4, None)),
    Bucket(8, 16, (16, 64), (128, 1, 4, None)),
    Bucket(8, ANY, (16, 128), (128, 1, 8, None)),
    Bucket(64, 16, (8, 256), (128, 2, 4, None)),
    Bucket(64, ANY, (8, 128), (128, 1, 8, None)),
    Bucket(FEW_TOKENS, 16, (2, 256), (256, 2, 8, None)),
    Bucket(FEW_TOKENS, ANY, (8, 64), (64, 4, 4, None)),
    Bucket(2048, ANY, (4, 128), (128, 4, 4, None)),
    Bucket(ANY, ANY, (1, 128), (128, 16, 4, None)),
)
# Measured, for ranks of 256 up to 1,024 tokens, of 128 up to 2,048, and of 64 and 256 with 8,192.
DENSE_BUCKETS = (
    DenseBucket(1024, ANY, (64, 64, 8, 4), (128, 32, 8, 3, False, 128)),
    DenseBucket(2048, ANY, (64, 64, 8, 4), (128, 64, 4, 2, False, None)),
    DenseBucket(ANY, 64, (64, 64, 4, 4), (128, 64, 4, 2, False, None)),
    DenseBucket(ANY, ANY, (128, 64, 8, 4), (128, 32, 8, 4, False, 128)),
)
# The products of fp32 are not those of the tensor cores: smaller blocks, which fit in registers.
EXACT_K, EXACT_N, EXACT_R = 64, 64, 16
SHRINK_PROGRAMS, EXPAND_PROGRAMS, DENSE_PROGRAMS = 1056, 4224, 4224
# Ranks at once; of a large tile fewer fit in registers.
SHRINK_RANKS, SMALL_TILE_RANKS, LARGE_TILE_RANKS = 64, 64, 32


def tile_rows(num_tokens: int, max_rank: int) -> int:
    """Return the tokens of a tile of a batch: a multiple of what the kernels of any projection take at a time."""
    return DENSE_TILE if num_tokens >= DENSE_TOKENS and max_rank >= DENSE_RANK else piece_rows(num_tokens)


def piece_rows(num_tokens: int) -> int:
    """Return the tokens of a tile that are taken at a time where ranks are low."""
    return SMALL_TILE if num_tokens <= FEW_TOKENS else LARGE_TILE


def pad_rank(rank: int) -> int:
    """Return the columns of the sums of one slice."""
    return -(-rank // RANK_UNIT) * RANK_UNIT


def find_bucket(num_tokens: int, rank: int) -> Bucket:
    """Return the row of the table for a batch."""
    return next(bucket for bucket in BUCKETS if num_tokens <= bucket.tokens and rank <= bucket.rank)


def plan_shrink(bucket: Bucket, num_tokens: int, rank: int, inputs: int, dtype: torch.dtype) -> ShrinkPlan:
    """Return how the sums are computed."""
    splits, most = bucket.shrink
    exact = dtype == torch.float32
    part, rows = -(-inputs // splits), piece_rows(num_tokens)
    block_r = EXACT_R if exact else min(SHRINK_RANKS, _power(rank))
    # Parts of the inputs give each warp columns of its own.
    ways = 1 if exact or rows != SMALL_TILE else max(1, SHRINK_WARPS * RANK_UNIT // block_r)
    # A power of two that covers the inputs if it can, and gives each part what a product takes.
    block_k = max(ways * RANK_UNIT, min(EXACT_K if exact else most, _power(part)))
    steps = -(-part // block_k)
    return ShrinkPlan(
        block_m=rows,
        block_k=block_k,
        steps=steps,
        ways=ways,
        block_r=block_r,
        warps=SHRINK_WARPS,
        stages=1 if exact else min(steps + 1, MAX_STAGES),
        eager_rows=min(rank, RANK_UNIT) if num_tokens <= EAGER_TOKENS else 0,
        programs=SHRINK_PROGRAMS,
        splits=-(-inputs // (steps * block_k)),
    )


def plan_expand(bucket: Bucket, num_tokens: int, rank: int, dtype: torch.dtype) -> ExpandPlan:
    """Return how the sums are turned into outputs."""
    block_n, steps, warps, registers = bucket.expand
    rows = piece_rows(num_tokens)
    most = SMALL_TILE_RANKS if rows == SMALL_TILE else LARGE_TILE_RANKS
    if dtype == torch.float32:
        return ExpandPlan(rows, EXACT_N, 1, EXACT_R, EXACT_WARPS, None, EXPAND_PROGRAMS)
    return ExpandPlan(rows, block_n, steps, min(most, _power(rank)), warps, registers, EXPAND_PROGRAMS)


def plan_dense(num_tokens: int, rows: int, rank: int, inputs: int, dtype: torch.dtype) -> DensePlan | None:
    """Return how tiles of `rows` tokens are computed whole, or None where they aren't dense or ranks are low."""
    if rows != DENSE_TILE or rank < DENSE_RANK or dtype not in DENSE_DTYPES:
        return None
    bucket = next(row for row in DENSE_BUCKETS if num_tokens <= row.tokens and rank <= row.rank)
    shrink_r, shrink_k, shrink_warps, shrink_stages = bucket.shrink
    unit = max(shrink_r, bucket.expand[1])
    columns, steps = -(-rank // unit) * unit, -(-inputs // shrink_k)
    return DensePlan(columns, DENSE_PROGRAMS, shrink_r, shrink_k, steps, shrink_warps, shrink_stages, *bucket.expand)


def expand_options(plan: ExpandPlan | DensePlan, *, dependent: bool) -> dict[str, Any]:
    """Return how an expand is launched that may be `dependent` on a shrink which still runs."""
    options = launch_options(overlap=dependent)
    return options if plan.registers is None else {**options, "maxnreg": plan.registers}


def _power(value: int) -> int:
    """Return the next power of two, at least the least that a product takes."""
    return max(RANK_UNIT, 1 << (value - 1).bit_length())
