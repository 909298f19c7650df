"""Functions of single values on the CPU: a value's result is its own, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rigs.kernels.draws import normal
from torch import Tensor

from deltaline_kernels.cpu.elementwise import evenly_


@pytest.mark.parametrize("function", [F.silu, F.softplus, torch.sigmoid])
def test_a_value_s_bits_do_not_depend_on_those_around_it(function: Callable[[Tensor], Tensor]) -> None:
    values = normal(2079)
    whole = evenly_(function, values.clone())
    assert torch.allclose(whole, function(values.double()).float())
    for begin, end in ((0, 1), (0, 33), (7, 40), (2046, 2079), (1, 2079), (0, 2064)):
        assert torch.equal(evenly_(function, values[begin:end].clone()), whole[begin:end]), (begin, end)


def test_values_are_replaced_in_their_place() -> None:
    values = normal(3, 5)
    expected, same = torch.sigmoid(values), evenly_(torch.sigmoid, values)
    assert same.data_ptr() == values.data_ptr() and torch.allclose(values, expected)
