"""Shared memory as a test sees it from outside: which arrays lie in it, and which regions a server has made."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltaline.v1 import admin_service_pb2 as admin
from deltaline_server.app import Server
from deltaline_server.memory.regions import Owner, Region
from deltaline_server.principal import Quotas


def lies_in_shared_memory(array: NDArray[Any]) -> bool:
    """Whether an array is in a mapping of memory that the server made, by the kernel's word."""
    address = array.ctypes.data
    mappings = re.findall(r"^(\w+)-(\w+) .*/memfd:deltaline", Path("/proc/self/maps").read_text(), re.M)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in mappings)


def mapped(made: admin.CreateSharedMemoryResponse) -> NDArray[np.uint8]:
    """The bytes of a region, as its client maps it."""
    fd = os.open(made.name, os.O_RDWR)
    try:
        memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, made.size_bytes), np.uint8)
    finally:
        os.close(fd)
    return memory


def note_regions(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the regions that a server makes from now on, in their order."""
    regions, numbers = server.runtime.regions, list[int]()
    create = regions.create

    async def noted(size_bytes: int, lease_s: float | None, owner: Owner, quotas: Quotas | None) -> Region:
        region = await create(size_bytes, lease_s, owner, quotas)
        numbers.append(region.id)
        return region

    monkeypatch.setattr(regions, "create", noted)
    return numbers
