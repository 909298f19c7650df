"""The cases of attention with their bars. The figures are for an H200."""

from __future__ import annotations

from deltaline_bench.attention.batch import Batch
from deltaline_bench.attention.shape import Shape
from deltaline_bench.attention.sides import ours, peers
from deltaline_bench.bar import at_least_copy, at_least_peers, at_most_us, pair
from deltaline_bench.case import Suite
from deltaline_bench.family import Family, Row

FAMILY = Family(Batch, ours, peers)


def _decode(name: str, shape: Shape, needed: float | None, aim: float | None = None) -> Row[Shape]:
    lengths = f"{shape.lengths[0]} keys each" if not shape.is_ragged else "ragged keys"
    return Row(name, f"{shape.num_rows} rows of {shape.tokens}, {lengths}", shape, *pair(at_most_us, needed, aim))


def _prefill(name: str, shape: Shape) -> Row[Shape]:
    what = f"{shape.num_rows} rows of {shape.tokens}, {shape.lengths[0]} keys each"
    return Row(name, what, shape, *pair(at_least_peers, 1.0))


def _latent(num_rows: int, length: int, tokens: int = 1, needed: float | None = None) -> Row[Shape]:
    """Latent attention with the heads of Kimi-Linear: latents of 512 channels, 64 behind them, and the scale of a
    head's own keys of 128 + 64. needed: the share of a copy, in per cent."""
    scale = (128 + 64) ** -0.5
    shape = Shape((length,) * num_rows, tokens, 32, 1, 512 + 64, value_dim=512, scale=scale)
    name = f"latent-{'decode' if tokens == 1 else 'verify'}-{num_rows}x{length}"
    return Row(name, f"{num_rows} rows of {tokens}, {length} latents each", shape, *pair(at_least_copy, needed))


RAGGED = tuple(int(2 ** (i / 2)) for i in range(2, 34))
# Bytes of the ragged rows at 4.38 TB/s, and a fifth more.
RAGGED_US = Shape(RAGGED).num_bytes() / 4.38e6 * 1.2
WINDOW = 4096

ROWS = (
    _decode("decode-32x8192", Shape((8192,) * 32, is_causal=False), 142, 132),
    _decode("decode-32x8192-capped", Shape((8192,) * 32, soft_cap=30.0), 142, 132),
    _decode("decode-1x32768", Shape((32768,), is_causal=False), 29, 24),
    _decode("decode-1x32768-capped", Shape((32768,), soft_cap=30.0), 29, 24),
    _decode("decode-32x8192-32-8-128", Shape((8192,) * 32, 1, 32, 8, 128, soft_cap=30.0), 262, 250),
    _decode("decode-128x2048", Shape((2048,) * 128), 140, 132),
    _decode("decode-ragged", Shape(RAGGED), round(RAGGED_US, 1)),
    _decode("verify-32x8192", Shape((8192,) * 32, 5), None, 142),
    _latent(32, 8192, needed=80),
    _latent(64, 2048),
    _latent(32, 8192, tokens=5),
    _prefill("prefill-1x8192-24-4", Shape((8192,), 8192, 24, 4)),
    _prefill("prefill-4096-behind-4096-24-4", Shape((8192,), 4096, 24, 4)),
    _prefill("prefill-1x8192-16-2", Shape((8192,), 8192)),
    _prefill("prefill-8x2048-24-4", Shape((2048,) * 8, 2048, 24, 4)),
    _prefill("prefill-1x8192-32-8-128", Shape((8192,), 8192, 32, 8, 128)),
    Row(
        "decode-16x131072-window",
        "16 rows of 1, a window of 4096 over 131072 keys; bars in the speed of rows of 4096",
        Shape((131072,) * 16, window=WINDOW),
        # At most 1.2 times the time.
        *pair(at_least_peers, 0.834, 0.95),
        beside=("as many keys as the window", Shape((WINDOW,) * 16)),
    ),
)
SUITE = Suite("attention", FAMILY.cases(ROWS))
