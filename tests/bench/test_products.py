"""bench/products.py: which products a model has, and the table that it writes."""

from __future__ import annotations

import runpy
from pathlib import Path

import products
import pytest

from deltaline_kernels.linear import FEW_ROWS
from deltaline_kernels.linear.fastest import FASTEST
from deltaline_kernels.linear.plan import Offer, choose


def test_the_products_of_a_model_are_those_of_its_projections() -> None:
    assert products.sizes_of("27b") == {(5120, 6144), (5120, 17408), (14336, 5120), (16480, 5120), (34816, 5120)}


def test_the_table_that_is_written_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fastest.py"
    path.write_text(products.TABLE.read_text())
    monkeypatch.setattr(products, "TABLE", path)
    monkeypatch.setattr(products, "name_device", lambda _: "A device")
    table = {(64, 10, 20): Offer(15, 1), (1, 10, 20): Offer(10, 3)}
    products.write(table)
    assert runpy.run_path(str(path))["FASTEST"] == table
    assert path.read_text().startswith(products.TABLE.read_text().partition("\n\n")[0])
    products.write(dict(FASTEST))
    assert runpy.run_path(str(path))["FASTEST"] == FASTEST


def test_the_fastest_offer_is_chosen_and_else_the_first() -> None:
    (num_rows, outputs, inputs), fastest = next(iter(FASTEST.items()))
    offers = [Offer(1, 1), Offer(*fastest), Offer(2, 1)]
    assert choose(num_rows, outputs, inputs, offers) == 1
    assert choose(num_rows, outputs, inputs, offers[::2]) == 0
    assert choose(num_rows, outputs + 1, inputs, offers) == 0
    assert {rows for rows, _, _ in FASTEST} <= set(FEW_ROWS)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["products.py", "27b"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert products.main() == 2
    assert capsys.readouterr().err == "products: expected a CUDA device, got none\n"
