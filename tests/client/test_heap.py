"""The heap of the client's process: large messages are made of pages that it has already."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults while blocks of 4 MiB, a few at a time, are filled and freed: first as it is, then with memory kept.
FAULTS = """
import resource
from deltaline_client._heap import keep_freed_memory

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [bytearray(b"x") * (4 << 20) for _ in range(6)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

faults()
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back so soon")
def test_blocks_of_messages_are_filled_without_new_pages() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=50)
    before, after = map(int, run.stdout.split())
    assert after < before / 10, run.stdout
