"""Products with plain weights: against fp64, of any rows, by the algorithms that are chosen on a GPU."""

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
from deltaline_kernels.linear import cublaslt
from deltaline_kernels.linear.fastest import FASTEST
from deltaline_kernels.linear.plan import Offer

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
@pytest.mark.parametrize("shape", FASTEST, ids=str)
def test_what_was_measured_is_taken(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Hopper GPU: with another library than the one that was measured, the table has to be written anew."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the table is for Hopper GPUs")
    made: list[Any] = []
    multiply: Callable[..., Tensor] = cublaslt.Product.multiply

    def counted(product: cublaslt.Product, *args: Tensor) -> Tensor:
        made.append(product)
        return multiply(product, *args)

    monkeypatch.setattr(cublaslt.Product, "multiply", counted)
    path, (num_rows, outputs, inputs) = Path("cuda", torch.bfloat16), shape
    x, weight = draw(path, num_rows, inputs), draw(path, outputs, inputs)
    got, shift = check(x, weight), num_rows // 3
    assert made and Offer(*FASTEST[shape]) in made[0].problem.offers
    # A row's bits are the same at every place and beside every other.
    assert same_bits(linear(x.roll(shift, 0), weight).roll(-shift, 0), got)
    others = torch.where(torch.arange(num_rows, device="cuda")[:, None] == num_rows - 1, x, torch.randn_like(x))
    assert same_bits(linear(others, weight)[-1], got[-1])
    wide = torch.zeros(num_rows, inputs + 128, dtype=torch.bfloat16, device="cuda")
    wide[:, :inputs] = x
    assert same_bits(check(wide[:, :inputs], weight), got)
    made.clear()
    wide[:, 4 : inputs + 4] = x
    check(wide[:, 4 : inputs + 4], weight)
    check(x.half(), weight.half())
    assert not made, "what begins anywhere, and fp16, is torch's"


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


def test_tensors_without_memory_have_products_too() -> None:
    num_rows, outputs, inputs = next(iter(FASTEST))
    x = torch.empty(num_rows, inputs, dtype=torch.bfloat16, device="meta")
    assert linear(x, torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")).shape == (num_rows, outputs)
