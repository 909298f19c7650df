"""Looks at the instructions of a compiled kernel for what an assembler may get wrong, or makes slow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LOCAL = re.compile(r"\b(LDL|STL)\b")
# A product of which the left operand is in registers.
PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)")
_WRITES = re.compile(r"^(?:@!?U?P\w+ )?([A-Z]\S*) (?:U?P\w+, )*R(\d+)\b")
# Registers that an instruction writes, by the width that its name says.
_WIDTHS = {".64": 2, ".128": 4}


def instructions(kernel: Any) -> list[str]:
    """Return the instructions of a kernel, in their order."""
    return [line.split("\t")[-1].strip() for line in kernel.asm["sass"].splitlines()]


def overwritten_operands(lines: Sequence[str]) -> list[str]:
    """Return the instructions that write to left operands of running products; there is at least one such product."""
    running: list[set[int]] = [set()]
    num_products = 0
    found = list[str]()
    for line in lines:
        if "HGMMA" in line:
            if product := PRODUCT.search(line):
                num_products += 1
                running[-1] |= set(range(int(product[1]), int(product[1]) + 4))
            if "gsb0" in line:
                running.append(set())
        elif wait := _WAIT.search(line):
            # All but so many groups of products have ended.
            running = running[max(0, len(running) - 1 - int(wait[1])) :]
        elif (writes := _WRITES.match(line)) and not writes[1].startswith(("ST", "SYNCS")):
            width = next((count for suffix, count in _WIDTHS.items() if suffix in writes[1]), 1)
            if set(range(int(writes[2]), int(writes[2]) + width)) & set().union(*running):
                found.append(line)
    assert num_products > 0
    return found


def is_serial(lines: Sequence[str]) -> bool:
    """Return whether every asynchronous product is waited for at once, as where registers do not suffice."""
    return sum("DEPBAR.LE gsb0" in line for line in lines) >= sum("HGMMA" in line for line in lines)
