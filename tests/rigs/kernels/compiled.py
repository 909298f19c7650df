"""Compiles what calls would launch on a GPU, a Hopper if not told otherwise; launches nothing.

Arguments are specialised as Triton does it. Tensors are those of the device "meta": they have no values, and go where
those of a GPU go.
"""

from __future__ import annotations

import copy
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltaline_kernels.device.sizes import find_shared_bytes

# An asynchronous product whose left operand is in registers, and a wait for all but so many groups of products.
PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")
# Registers that an instruction writes, by the width that its name says.
WRITES = re.compile(r"^(?:@!?U?P\w+ )?([A-Z]\S*) (?:U?P\w+, )*R(\d+)\b")
WIDTHS = {".64": 2, ".128": 4}


@dataclass(frozen=True)
class Gpu:
    """What is asked of a GPU: its compute capability and the shared memory that a program may have."""

    capability: tuple[int, int]
    shared_bytes: int


HOPPER, ADA, RTX_BLACKWELL = Gpu((9, 0), 227 << 10), Gpu((8, 9), 99 << 10), Gpu((12, 0), 99 << 10)


class AbsentDriver:
    """A device that is not there: what Triton asks for before it compiles."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def get_current_device(self) -> AbsentDriver:
        # Not a number: of a device Triton keeps what it compiled, and takes a kernel of a constant 1 for one of 1.0.
        return self

    def get_current_stream(self, device: AbsentDriver) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self.gpu.capability
        return GPUTarget("cuda", 10 * major + minor, 32)


def compile_launches(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object], gpu: Gpu = HOPPER) -> list[Any]:
    """Return the kernels that `call` would launch, compiled; none has a scan that Triton gets wrong."""
    from triton.runtime import jit

    launch, compiled = jit.JITFunction.run, list[Any]()

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))
        assert not scans_of_repeated_columns(compiled[-1].asm["ttgir"])

    with monkeypatch.context() as patch:
        patch.setattr(jit, "driver", SimpleNamespace(active=AbsentDriver(gpu)))
        patch.setattr(jit.JITFunction, "run", only_compile)
        take_place_of(patch, gpu)
        call()
    return compiled


def take_place_of(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Let torch tell of a GPU for any device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpu.capability)
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=gpu.shared_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    find_shared_bytes.cache_clear()


def instructions(kernel: Any) -> list[str]:
    """Return what a compiled kernel becomes on the device, all of it: Triton's own listing ends after 64 KiB."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-sass", file.name], text=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?) ;", listing, re.MULTILINE)


def find_overwritten_operands(code: list[str]) -> list[str]:
    """Return the instructions that write registers which an asynchronous product may not have read yet."""
    running: list[set[int]] = [set()]
    found_all = []
    for line in code:
        if "HGMMA" in line:
            if found := PRODUCT.search(line):
                running[-1] |= set(range(int(found[1]), int(found[1]) + 4))
            if "gsb0" in line:
                running.append(set())
        elif found := WAIT.search(line):
            running = running[max(0, len(running) - 1 - int(found[1])) :]
        elif (found := WRITES.match(line)) and not found[1].startswith(("ST", "SYNCS")):
            width = next((count for suffix, count in WIDTHS.items() if suffix in found[1]), 1)
            if set(range(int(found[2]), int(found[2]) + width)) & set().union(*running):
                found_all.append(line)
    return found_all


def scans_of_repeated_columns(ttgir: str) -> list[str]:
    """Return the layouts of scans in which threads hold the same columns twice.

    Triton 3.6 and 3.7 then take what earlier rows come to from a thread that has not all of them.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(\w+<.*>)$", ttgir, re.MULTILINE))
    scans = re.findall(r'"tt\.scan".*?\}\) : .*?$', ttgir, re.DOTALL | re.MULTILINE)
    assert len(scans) == ttgir.count('"tt.scan"'), "a scan is written in another way than is looked for"
    found = []
    for scan in scans:
        axis = int(re.findall(r"axis = (\d+)", scan)[0])
        sizes, name = re.findall(r"\}\) : \(tensor<([\dx]+)x\w+, (#\w+)", scan)[0]
        if "x" not in sizes:  # there are no other columns, and what threads hold twice of a row they leave out
            continue
        if not layouts[name].startswith("blocked"):
            raise AssertionError(f"a scan in a layout that is not looked into: {layouts[name]}")
        held = [list(map(int, numbers.split(", "))) for numbers in re.findall(r"= \[([\d, ]+)\]", layouts[name])[:3]]
        across = [dim for dim in range(len(held[0])) if dim != axis]
        if any(held[0][dim] * held[1][dim] * held[2][dim] > int(sizes.split("x")[dim]) for dim in across):
            found.append(f"{sizes}, axis {axis}: {layouts[name]}")
    return found


def on_meta(value: Any) -> Any:
    """Return an argument with its tensors on "meta", strides and places in their storage as they are."""
    if isinstance(value, torch.Tensor):
        size = value.untyped_storage().nbytes() // value.element_size()
        storage = torch.empty(size, dtype=value.dtype, device="meta")
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, list | tuple):
        return type(value)(map(on_meta, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    moved = copy.copy(value)
    for field in fields(value):
        object.__setattr__(moved, field.name, on_meta(getattr(value, field.name)))
    return moved
