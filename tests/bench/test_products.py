"""bench/products.py: which products a model has, and the table that it writes."""

from __future__ import annotations

import runpy
from pathlib import Path

import products
import pytest

from deltaline_kernels.linear.fastest import FASTEST
from deltaline_kernels.linear.plan import Offer, choose


def test_the_products_of_a_model_are_those_of_its_projections() -> None:
    assert products.sizes_of("27b") == {(5120, 6144), (5120, 17408), (14336, 5120), (16480, 5120), (34816, 5120)}


def test_ranks_share_outputs_or_inputs() -> None:
    assert products.sizes_of("27b", 2) == {(5120, 3072), (5120, 8704), (7168, 5120), (8240, 5120), (17408, 5120)}
    # Its router is on all of them, and 2 key-value heads on two each.
    assert products.sizes_of("35b-a3b", 4) >= {(257, 2048), (2048, 1024), (256, 2048), (2048, 128), (2560, 2048)}


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


def test_the_fastest_offer_is_chosen_and_else_none() -> None:
    (num_rows, outputs, inputs), fastest = next(iter(FASTEST.items()))
    offers = [Offer(1, 1), Offer(*fastest), Offer(2, 1)]
    assert choose(num_rows, outputs, inputs, offers) == 1
    assert choose(num_rows, outputs, inputs, offers[::2]) is None
    assert choose(num_rows, outputs + 1, inputs, offers) is None


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["products.py", "27b"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert products.main() == 2
    assert capsys.readouterr().err == "products: expected a Hopper GPU, which the table is for, got none\n"
