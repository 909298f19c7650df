"""Weights in e4m3 with scales, read as what they stand for."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.host_staging import HostStaging
from rigs.quantised import ALL, BLOCK, quantise
from safetensors.torch import save_file
from torch import Tensor

from deltaline_server.checkpoints.checkpoint import Checkpoint, TensorSource
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.checkpoints.fingerprint import HashedTensors
from deltaline_server.checkpoints.fp8.dequantised import DequantisedTensors
from deltaline_server.checkpoints.fp8.quantization import Quantization
from deltaline_server.checkpoints.read_ahead import ReadAhead

NAME = "layers.0.proj.weight"


def ahead(checkpoint: Checkpoint, stack: ExitStack) -> TensorSource:
    source = stack.enter_context(ReadAhead(checkpoint, HostStaging()))
    source.begin({0: list(checkpoint.names)})
    return source


SOURCES: dict[str, Callable[[Checkpoint, ExitStack], TensorSource]] = {
    "parts": lambda checkpoint, _: checkpoint,
    "hashed": lambda checkpoint, _: HashedTensors(checkpoint),
    "ahead": ahead,
}


def opened(folder: Path, block: tuple[int, int] | None, **tensors: Tensor) -> DequantisedTensors:
    """A source of these tensors."""
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return DequantisedTensors(Checkpoint(folder), block)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("block", [BLOCK, (32, 48), (20, 37), None])
def test_any_part_is_that_of_the_values_times_their_blocks_scales(
    tmp_path: Path, source: str, block: tuple[int, int] | None
) -> None:
    chance = random.Random(f"{source} {block}")
    shapes = {"a.weight": (300, 150), "b.weight": (5, 129), "c": (3, 200, 70), "d.weight": (2, 128, 256)}
    made = {name: quantise(torch.randn(shape), block) for name, shape in shapes.items()}
    stored = {name: one.stored for name, one in made.items()} | {"norm.weight": torch.randn(9)}
    stored |= {f"{name}_scale_inv": one.scales.bfloat16() if name == "d" else one.scales for name, one in made.items()}
    save_file(stored, tmp_path / "model.safetensors")
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint(tmp_path))
        tensors = DequantisedTensors(SOURCES[source](checkpoint, stack), block)
        assert set(tensors.names) == set(shapes) | {"norm.weight"}
        assert torch.equal(tensors.read("norm.weight", slice(2, 5), ALL), stored["norm.weight"][2:5])
        for name, one in made.items():
            assert (tensors.info(name).shape, tensors.info(name).dtype) == (shapes[name], "F32")
            assert torch.equal(tensors.read(name, ALL, ALL), one.meant)
            for _ in range(8):
                rows, columns = (slice(*sorted(chance.sample(range(size + 1), 2))) for size in shapes[name][:2])
                assert torch.equal(tensors.read(name, rows, columns), one.meant[rows, columns])


def test_scales_and_weight_are_all_that_is_hashed_and_once(tmp_path: Path) -> None:
    made = quantise(torch.randn(300, 150), BLOCK)
    one = {NAME: made.stored, f"{NAME}_scale_inv": made.scales, "layers.0.proj.activation_scale": torch.tensor(2.0)}
    save_file(one, tmp_path / "model.safetensors")
    read = list[str]()

    class Counting(Checkpoint):
        def read(self, name: str, rows: slice, columns: slice) -> Tensor:
            read.append(name)
            return super().read(name, rows, columns)

    hashed = HashedTensors(Counting(tmp_path))
    tensors = DequantisedTensors(hashed, BLOCK)
    assert tensors.stored(NAME) == (f"{NAME}_scale_inv", NAME)
    for begin in (0, 100, 200):
        tensors.read(NAME, slice(begin, begin + 100), ALL)
    assert read == [f"{NAME}_scale_inv", NAME]
    assert [name for name, *_ in hashed.identity()] == [NAME, f"{NAME}_scale_inv"]
    assert hashed.identity()[0][1:3] == [[300, 150], "F8_E4M3"]


@pytest.mark.parametrize("source", SOURCES)
def test_scales_may_be_powers_of_2(tmp_path: Path, source: str) -> None:
    stored = torch.randn(300, 150).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [1.0, 2.0**-100], [4.0, 2.0**-120]])
    tensors = {"w": stored, "w_scale_inv": scales.to(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors")
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint(tmp_path))
        found = DequantisedTensors(SOURCES[source](checkpoint, stack), BLOCK).read("w", slice(100, 300), ALL)
    every = scales.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)[:300, :150]
    assert torch.equal(found, (stored.float() * every)[100:])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_weight_may_have_one_scale(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = quantise(torch.randn(30, 40), None)
    tensors = opened(tmp_path, None, w=made.stored, w_scale=made.scales.reshape(shape))
    assert torch.equal(tensors.read("w", slice(3, 9), slice(5, 8)), made.meant[3:9, 5:8])


@pytest.mark.parametrize("shape", [(4,), (4, 1), (4, 1, 1)])
def test_stacked_experts_may_have_one_scale_each(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = quantise(torch.randn(4, 30, 40), None)
    tensors = opened(tmp_path, None, w=made.stored, w_scale_inv=made.scales.reshape(shape))
    assert torch.equal(tensors.read("w", slice(2, 4), slice(5, 8)), made.meant[2:4, 5:8])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_stacked_experts_may_have_one_scale_of_all(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stored = torch.randn(4, 30, 40).to(torch.float8_e4m3fn)
    tensors = opened(tmp_path, None, w=stored, w_scale=torch.full(shape, 0.5))
    assert torch.equal(tensors.read("w", slice(2, 4), ALL), stored[2:4].float() * 0.5)


@pytest.mark.parametrize("block", [BLOCK, None])
def test_halves_of_small_stacked_experts_have_a_scale_each(tmp_path: Path, block: tuple[int, int] | None) -> None:
    """Gate and up, as transformers has them where both are within one block."""
    stored = torch.randn(4, 30, 40).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 2, 1) + 0.5
    tensors = opened(tmp_path, block, w=stored, w_scale_inv=scales)
    meant = stored.float() * scales.repeat_interleave(15, dim=1)
    assert torch.equal(tensors.read("w", slice(1, 3), slice(10, 20)), meant[1:3, 10:20])


E4M3 = torch.ones(300, 150).to(torch.float8_e4m3fn)
SCALES = torch.ones(3, 2)
SCALE = "w_scale_inv"
NO_SIZE: dict[str, Any] = {"weight_block_size": None}
LIES: list[tuple[dict[str, Any], str]] = [
    ({}, "w_scale_inv: expected the scales of a weight of dtype F8_E4M3, found nothing"),
    ({SCALE: torch.ones(3, 3)}, "w_scale_inv: expected shape [3, 2] of a weight [300, 150] ([128, 128], the weight"),
    ({SCALE: torch.ones(2, 2)}, "w_scale_inv: expected shape [3, 2] of a weight"),
    ({SCALE: torch.ones(6)}, "w_scale_inv: expected shape [3, 2] of a weight"),
    ({SCALE: torch.tensor(1.0)}, "w_scale_inv: expected shape [3, 2] of a weight"),
    ({SCALE: torch.ones(1, 3, 2)}, "w_scale_inv: expected shape [3, 2] of a weight"),
    ({SCALE: SCALES.to(torch.int32)}, "w_scale_inv: expected dtype F32 or BF16 or F16 or F8_E8M0, got I32"),
    ({SCALE: SCALES, "w_scale": SCALES}, "w_scale_inv: expected the scales of a weight of dtype F8_E4M3, found w_sc"),
    ({SCALE: SCALES, "w": E4M3.float()}, "w_scale_inv: expected none beside a weight of dtype F32, found one"),
    ({SCALE: SCALES, "w": E4M3.to(torch.float8_e5m2)}, "w: expected dtype F32 or BF16 or F16 or F8_E4M3, got F8_E5M2"),
    ({SCALE: SCALES, "w": E4M3.to(torch.int8)}, "w: expected dtype F32 or BF16 or F16 or F8_E4M3, got I8"),
    ({SCALE: SCALES, "w": E4M3[0]}, "w: expected 2 or 3 dimensions of 1 or more in F8_E4M3, got [150]"),
    ({SCALE: SCALES, "w": E4M3[:0]}, "w: expected 2 or 3 dimensions of 1 or more in F8_E4M3, got [0, 150]"),
]


@pytest.mark.parametrize(("lie", "expected"), LIES)
def test_scales_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, lie: dict[str, Tensor], expected: str
) -> None:
    tensors = opened(tmp_path, BLOCK, **({"w": E4M3} | lie))
    with pytest.raises(ModelError) as refused:
        tensors.info("w")
    assert str(refused.value).startswith(expected) and "\n" not in str(refused.value)


def test_scales_of_blocks_want_a_size_of_blocks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^w_scale_inv: .* \(one, as config.json has no weight_block_size\), got \[3"):
        opened(tmp_path, None, w=E4M3, w_scale_inv=SCALES).info("w")


def test_where_a_config_does_not_say_it_weights_have_one_scale_or_those_of_the_usual_blocks(tmp_path: Path) -> None:
    """Each as its own scales are."""
    block = {"quant_method": "fp8"}
    said, unsaid = (Quantization.read({"quantization_config": block | more}) for more in (NO_SIZE, {}))
    assert said is not None and unsaid is not None and said.usual_block_size is None
    made = {"a": quantise(torch.randn(300, 150), BLOCK), "b": quantise(torch.randn(3, 300, 150), BLOCK)}
    made |= {"c": quantise(torch.randn(300, 150), None), "d": quantise(torch.randn(3, 300, 150), None)}
    made |= {"e": quantise(torch.randn(3, 200, 100), BLOCK)}  # two blocks, and no halves
    stored = {name: one.stored for name, one in made.items()}
    save_file(stored | {f"{name}_scale": one.scales for name, one in made.items()}, tmp_path / "model.safetensors")
    tensors = DequantisedTensors(Checkpoint(tmp_path), unsaid.weight_block_size, usual=unsaid.usual_block_size)
    for name, one in made.items():
        assert torch.equal(tensors.read(name, ALL, ALL), one.meant)


@pytest.mark.parametrize("lie", [0.0, -1.0, float("inf"), float("nan"), 1e36])
def test_scales_that_are_no_scales_are_refused_as_they_are_read(tmp_path: Path, lie: float) -> None:
    scales = SCALES.clone()
    scales[2, 1] = lie
    tensors = opened(tmp_path, BLOCK, w=E4M3, w_scale_inv=scales)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"^w_scale_inv: expected positive numbers that times 448 are finite in f"):
            tensors.read("w", slice(0, 1), ALL)


def test_what_is_beside_no_weight_is_left_for_who_asks(tmp_path: Path) -> None:
    tensors = opened(tmp_path, BLOCK, w=E4M3, w_scale_inv=SCALES, other_scale_inv=SCALES, w_scale_2=SCALES)
    assert set(tensors.names) == {"w", "other_scale_inv", "w_scale_2"}
