"""Weights that are drawn: beside SplitMix64 in Python's integers, whatever part is read and wherever."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from deltaline_server.checkpoints import random_tensors
from deltaline_server.checkpoints.modules import ALL
from deltaline_server.checkpoints.random_tensors import RandomTensors

CPU = torch.device("cpu")
SHAPES = {"x.weight": (6, 4), "y.weight": (6, 4), "conv.weight": (6, 1, 4), "up": (3, 5, 7), "l.A_log": (64,)}
MASK = 2**64 - 1


def splitmix64(key: int, index: int) -> int:
    z = (key + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return int(z ^ (z >> 31))


def value(seed: int, name: str, index: int, columns: int) -> float:
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    words = splitmix64(key, index).to_bytes(8, "little")
    total = sum(int.from_bytes(words[i : i + 2], "little", signed=True) for i in range(0, 8, 2))
    return float((total + 2) * math.sqrt(3) / 2**16 * columns**-0.5)


@pytest.mark.parametrize("name", ["x.weight", "conv.weight", "up"])
def test_each_value_is_by_its_seed_its_tensor_and_its_place(name: str) -> None:
    shape = SHAPES[name]
    drawn = RandomTensors(SHAPES, 5, CPU).read(name, ALL, ALL)
    expected = torch.tensor([value(5, name, i, shape[-1]) for i in range(math.prod(shape))]).view(shape)
    assert drawn.shape == shape and torch.allclose(drawn, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("at_once", [1, 8, 1 << 16])
def test_a_part_is_that_part_of_the_whole(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RandomTensors(SHAPES, 1, CPU)
    wholes = {name: source.read(name, ALL, ALL) for name in SHAPES}
    monkeypatch.setitem(random_tensors.AT_ONCE, "cpu", at_once)
    rows, columns = slice(2, 5), slice(1, 3)
    for name, whole in wholes.items():
        part = source.read(name, rows, columns)
        assert torch.equal(part, whole[rows] if whole.ndim == 1 else whole[rows, columns])
        assert (
            source.read(name, slice(2, 2), columns).shape
            == (whole[2:2] if whole.ndim == 1 else whole[2:2, columns]).shape
        )


def test_other_seeds_and_names_are_other_tensors() -> None:
    source = RandomTensors(SHAPES, 1, CPU)
    whole = source.read("x.weight", ALL, ALL)
    assert torch.equal(RandomTensors({"x.weight": (6, 4)}, 1, CPU).read("x.weight", ALL, ALL), whole)
    assert not torch.equal(source.read("y.weight", ALL, ALL), whole)
    assert not torch.equal(RandomTensors(SHAPES, 2, CPU).read("x.weight", ALL, ALL), whole)


def test_values_are_nearly_normal_at_the_scale_of_their_input() -> None:
    drawn = RandomTensors({"w": (1000, 400)}, 3, CPU).read("w", ALL, ALL) * 20
    flat = drawn.flatten()
    moments = [float(flat.pow(n).mean()) for n in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 2.7], abs=0.02)
    for shift in (1, 2, 400):  # neighbours in a row and in a column
        assert abs(float((flat[shift:] * flat[:-shift]).mean())) < 0.01


def test_gates_forget_over_ten_to_a_thousand_tokens() -> None:
    decay = RandomTensors(SHAPES, 1, CPU).read("l.A_log", ALL, ALL).exp()
    assert ((decay >= 1) & (decay <= 16)).all() and decay.std() > 1


@pytest.mark.gpu
def test_a_device_draws_the_same_bits() -> None:
    shapes = SHAPES | {"long": (3000, 7000)}
    here, there = RandomTensors(shapes, 9, CPU), RandomTensors(shapes, 9, torch.device("cuda"))
    for name in shapes:
        for part in ((ALL, ALL), (slice(1, 3), slice(1, 3))):
            drawn = there.read(name, *part)
            assert drawn.is_cuda and torch.equal(drawn.cpu(), here.read(name, *part))


def test_rates_are_drawn_alike_however_many_dimensions_they_have() -> None:
    source = RandomTensors({"a.A_log": (1, 1, 64, 1), "b.A_log": (64, 16)}, 3, CPU)
    wide = source.read("a.A_log", ALL, ALL)
    assert wide.shape == (1, 1, 64, 1) and float(wide.min()) > 0 and math.log(8) < float(wide.max()) < math.log(16)
    assert torch.equal(wide.flatten(), RandomTensors({"a.A_log": (64,)}, 3, CPU).read("a.A_log", ALL, ALL))
    assert float(source.read("b.A_log", ALL, ALL).min()) < 0  # a weight like others
