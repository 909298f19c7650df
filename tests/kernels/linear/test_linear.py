"""Products with plain weights: against fp64, of any rows, by the algorithms that are chosen for few on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rigs.kernels.graphs import check_replay, no_waits
from rigs.kernels.paths import Path
from rigs.kernels.recurrence_checks import same_bits
from rigs.kernels.tolerance import assert_close
from torch import Tensor

from deltaline_kernels import linear, linear_reference
from deltaline_kernels.linear import ALIGNMENT, FEW_ROWS

# [N, K]: whole tiles, parts of tiles, many inputs for few outputs, and sizes of which 16 bytes are no multiple.
SIZES = ((512, 256), (1000, 200), (96, 4096), (257, 72), (33, 31))


def draw(path: Path, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(path.dtype).to(path.device)


def check(x: Tensor, weight: Tensor) -> Tensor:
    """Compare a product with fp64's, and with itself."""
    got, size = linear(x, weight), x.shape[1] ** 0.5
    want = linear_reference(x.double(), weight.double())
    assert got.dtype == x.dtype
    assert_close("product", got / size, want / size, x.dtype)
    assert same_bits(linear(x, weight), got)
    return got


@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 64, 200, 256])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_match_the_reference(path: Path, size: tuple[int, int], num_rows: int) -> None:
    check(draw(path, num_rows, size[1]), draw(path, *size))


def test_rows_may_lie_apart_and_begin_anywhere(path: Path) -> None:
    wide, weights = draw(path, 16, 3 * 256 + 8), draw(path, 800, 256)
    for begin in (0, 8, 256):
        check(wide[:, begin : begin + 256], weights[:512])
        check(wide[:1, begin : begin + 256], weights[5:])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 3, 4)}, ValueError, "x: expected"),
        ({"x": torch.zeros(2, 4, dtype=torch.int32)}, TypeError, "x: expected"),
        ({"weight": torch.zeros(5, 3)}, ValueError, "weight: expected"),
        ({"weight": torch.zeros(5, 4, dtype=torch.bfloat16)}, TypeError, "weight: expected"),
        ({"weight": torch.zeros(4, 5).t()}, ValueError, "weight: expected"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear(**({"x": torch.zeros(2, 4), "weight": torch.zeros(5, 4)} | change))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", FEW_ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_take_what_was_chosen(num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltaline_kernels.linear import cublaslt

    made: list[Any] = []
    multiply: Callable[..., Tensor] = cublaslt.Product.multiply

    def counted(product: cublaslt.Product, *args: Tensor) -> Tensor:
        made.append(product)
        return multiply(product, *args)

    monkeypatch.setattr(cublaslt.Product, "multiply", counted)
    path = Path("cuda", dtype)
    for outputs, inputs in ((5120, 6144), (16480, 5120), (5120, 17408), (2048, 4096)):
        x, weight = draw(path, num_rows, inputs), draw(path, outputs, inputs)
        got, shift = check(x, weight), num_rows // 3
        assert made, "torch multiplied what plans know"
        # A row's bits are the same at every place and beside every other.
        assert same_bits(linear(x.roll(shift, 0), weight).roll(-shift, 0), got)
        others = torch.where(torch.arange(num_rows, device="cuda")[:, None] == num_rows - 1, x, torch.randn_like(x))
        assert same_bits(linear(others, weight)[-1], got[-1])
        made.clear()
    linear(draw(path, num_rows, 264)[:, 4:260], draw(path, 512, 256))
    assert not made and ALIGNMENT > 8, "what begins anywhere is torch's"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_nothing_waits_and_a_graph_follows_what_its_tensors_hold(num_rows: int) -> None:
    path = Path("cuda", torch.bfloat16)
    x, weight = draw(path, num_rows, 17408), draw(path, 5120, 17408)
    linear(x, weight)
    with no_waits():
        linear(x, weight)

    def change() -> None:
        x.copy_(torch.randn_like(x))

    check_replay(lambda: [linear(x, weight)], [], change)
