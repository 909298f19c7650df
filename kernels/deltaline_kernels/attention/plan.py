"""The sizes of an attention's heads, and how its work is cut."""

from dataclasses import dataclass

from deltaline_kernels.device.sizes import pow2

# Columns of a tile: the least that a matrix instruction has, and the most whose outputs registers have room for.
LEAST_COLUMNS, MOST_COLUMNS, MOST_SHORT_COLUMNS = 16, 64, 64
# Rows that are looked at at once, where there are few, one for each thread of a warp, and where there are more. Kernels
# are compiled for these, not for each number. Of a Hopper's long rows fewer than a warp has threads spill registers.
FEW_ROWS, MOST_ROWS = 32, 256
# Programs of a combine below which each takes few of the channels, and many splits at once: of one row with 128
# splits, and of many rows with a few.
FEW_COMBINES = 512
FEW, MANY = (32, 128), (64, 32)
# Of many queries over latents, whose outputs are wide, and in tiles of more than LEAST_COLUMNS: all channels, since
# fewer programs have less to look up. On an H200 verifies of 32 x 8,192 keys with 2 heads of 256 take 149.4 us so,
# 166.7 by MANY.
WIDE = (512, 8)
# Programs of a combine for each multiprocessor, and the registers of a thread, with fewer of which a part's loads wait
# for each other. 8 programs fit at once; twice as many cost rows of one split nothing, verifies less.
COMBINES, COMBINE_REGISTERS = 16, 64


@dataclass(frozen=True)
class AttentionHeads:
    """`num_queries` heads of queries, of which as many share each of `num_keys` heads of keys and values."""

    num_queries: int
    num_keys: int
    key_dim: int
    value_dim: int
    scale: float
    is_latent: bool = False
    """Whether values are the first channels of keys."""

    @property
    def behind_latent(self) -> int:
        """Channels that keys have behind those that are values too; 0 where none are."""
        return self.key_dim - self.value_dim if self.is_latent else 0

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.num_queries // self.num_keys


@dataclass(frozen=True)
class Tile:
    """`columns`, in which are the heads of `tokens`, by `keys` keys; `split` keys are an item of work, 0 for all."""

    columns: int
    tokens: int
    keys: int
    num_warps: int
    stages: int
    split: int
    programs: int  # of a multiprocessor


# By the bytes of a key of 16-bit values: keys of a tile, warps, blocks on their way, programs on a multiprocessor.
SHORT: dict[int, tuple[int, int, int, int]] = {
    128: (128, 4, 3, 2),
    256: (64, 4, 3, 2),
    512: (32, 4, 3, 2),
    1024: (32, 8, 2, 1),
}
LONG: dict[int, tuple[int, int, int, int]] = {
    128: (64, 4, 3, 2),
    256: (64, 4, 3, 2),
    512: (32, 4, 3, 1),
    1024: (32, 8, 2, 1),
}
# Heads of a tile that share latents, at most, of 16-bit values and of fp32: a tile of 512 x 64 sums leaves half of the
# registers of 8 warps. With what latents of 512 channels have above, 32 short rows of 8,192 take an H200 298 us, which
# has a kernel of its own for them; long rows are not measured yet.
LATENT_HEADS, EXACT_LATENT_HEADS = 64, 16
# Of causal long rows on a Hopper, by the size of keys and values: rows of a tile, which are queries there, keys of a
# block, blocks of each on their way, warps.
HOPPER: dict[int, tuple[int, int, int, int]] = {128: (64, 64, 2, 4), 256: (128, 64, 2, 8)}
# Of fp32, whose products are not those of matrix instructions: tiles that need few registers.
EXACT, EXACT_COLUMNS = (16, 4, 1, 2), 16
# Keys of a split, by rows x heads of keys up to a number; more of them fill the device with longer splits. On an H200,
# with 2 heads of 256, by kernel.py: 1 x 32,768 keys take 26.8 us in splits of 256 and 28.1 of 512; 32 x 8,192 take
# 134 us in splits of 1,024 and 130 of 2,048, but 32 rows of 2 to 92,681 keys 173 and 192; 128 x 2,048 take 150 us in
# splits of 1,024 and 126 of 2,048. Tiles of more columns leave more for the combine: by hopper_short.py, which has no
# splits of 1,024 of them, verifies of 32 x 8,192 take 166.7 us in splits of 2,048 and 174.9 of 1,024.
SPLITS: tuple[tuple[int, int], ...] = ((4, 256), (32, 512), (64, 1024))
MOST_KEYS = 2048
# Values that all splits may leave for the combine, 1 GiB: of many rows that may be very long splits are longer. It is
# the same for a bucket, and far below what an int32 counts.
MOST_PARTIALS = 1 << 28
# Of latents on a Hopper: channels that are values, those behind, and keys of a split by rows x groups of heads. A
# program has a multiprocessor to itself, and what a split leaves is 2 KB for each query head. On an H200 32 rows of
# 8,192 take 82.1 us in splits of 2,048 and 91.1 of 1,024; 64 rows of 2,048 take 72.8 and 52.8, as 64 splits leave half
# of the processors idle.
LATENT_DIM, LATENTS_BEHIND = 512, (0, 64)
LATENT_SPLITS: tuple[tuple[int, int], ...] = ((4, 256), (16, 512), (32, 2048), (64, 1024))
# Of short rows on a Hopper: sizes of heads of keys and values, keys of a block, and programs of a multiprocessor where
# each has room for so many tiles of keys or values, so that one computes while another begins or ends. A program that
# has it to itself takes 8 warps for more columns than FEW_COLUMNS.
SHORT_DIMS, HOPPER_KEYS = (64, 128, 256), 64
SHORT_PROGRAMS, LEAST_TILES = 2, 3
FEW_COLUMNS = 32
# Shared memory of a multiprocessor, and what a program needs of it beside queries, weights and tiles.
SHARED_BYTES, SPARE_BYTES = 228 << 10, 3 << 10


def choose_group(heads: AttentionHeads, value_bytes: int) -> int:
    """Return how many heads of queries that share keys are in one tile: all, but of latents so many that their sums
    find room in registers."""
    if not heads.is_latent:
        return heads.group
    most = EXACT_LATENT_HEADS if value_bytes == 4 else LATENT_HEADS
    return next(size for size in range(min(most, heads.group), 0, -1) if heads.group % size == 0)


def choose_tile(
    heads: AttentionHeads, group: int, num_rows: int, max_length: int, value_bytes: int, *, long: bool
) -> Tile:
    """Return the tile for rows of at most `max_length` tokens, `group` heads of queries in each.

    It follows from the bucket only, never from positions: splits are the same whatever a row's neighbours are.
    """
    padded = pow2(group)
    bytes_of_key = pow2(max(heads.key_dim - heads.behind_latent, heads.value_dim, 64)) * 2
    keys, num_warps, stages, programs = (LONG if long else SHORT)[bytes_of_key]
    most = MOST_COLUMNS if long else MOST_SHORT_COLUMNS
    if value_bytes == 4:
        (keys, num_warps, stages, programs), most = EXACT, EXACT_COLUMNS
    columns = max(LEAST_COLUMNS, padded, min(most, padded * pow2(max(1, max_length))))
    split = 0 if long else _choose_split(num_rows * heads.num_keys, SPLITS)
    return Tile(columns, columns // padded, keys, num_warps, stages, split, programs)


def choose_hopper_tile(heads: AttentionHeads, group: int, num_rows: int, max_length: int) -> Tile:
    """Return what `choose_tile` does, of short rows for `attend_short_kernel`: its stages are all tiles of keys and of
    values that there is room for."""
    columns = max(LEAST_COLUMNS, pow2(group), min(MOST_SHORT_COLUMNS, pow2(group * max(1, max_length))))
    splits = LATENT_SPLITS if heads.is_latent else SPLITS if columns == LEAST_COLUMNS else SPLITS[:-1]
    split = _choose_split(num_rows * (heads.num_queries // group), splits)
    beside = SPARE_BYTES + 2 * columns * (heads.key_dim + HOPPER_KEYS)
    tiles = {n: (SHARED_BYTES // n - beside) // (2 * HOPPER_KEYS * heads.key_dim) for n in (1, SHORT_PROGRAMS)}
    programs = SHORT_PROGRAMS if tiles[SHORT_PROGRAMS] >= LEAST_TILES else 1
    num_warps = 8 if programs == 1 and columns > FEW_COLUMNS else 4
    return Tile(columns, columns // group, HOPPER_KEYS, num_warps, tiles[programs], split, programs)


def _choose_split(count: int, splits: tuple[tuple[int, int], ...]) -> int:
    return next((size for most, size in splits if count <= most), MOST_KEYS)


def count_at_once(num_rows: int) -> int:
    """Return how many rows a program looks at at once, of so many."""
    return FEW_ROWS if num_rows <= FEW_ROWS else MOST_ROWS


def choose_parts(value_dim: int, columns: int, num_queries: int) -> tuple[int, int]:
    """Return the channels that a program of the combine takes, and the splits at once, for tiles of so many columns and
    so many tokens x heads."""
    many = WIDE if value_dim >= LATENT_DIM or columns > LEAST_COLUMNS else MANY
    channels, splits = FEW if num_queries < FEW_COMBINES else many
    return min(pow2(value_dim), channels), splits
