"""How much memory the processes of this host, or of this container, can have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

# Of a control group: in the folder of version 2, and in that of version 1's controller.
_LIMITS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}


def host_bytes(root: Path = Path("/")) -> int | None:
    """The host's memory with its swap, or the limit of this process's control groups where that is less; None where the
    system does not tell. What is in use counts too: it may be a server that this one takes the place of.

    root: where proc and sys are.
    """
    found = [*_group_limits(root), *_system_bytes(root)]
    return min(found, default=None)


def _system_bytes(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        yield (sizes["MemTotal"] + sizes.get("SwapTotal", 0)) << 10
    except (OSError, LookupError, ValueError):  # no Linux
        with suppress(OSError, ValueError):
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits(root: Path) -> Iterator[int]:
    """The limits of this process's control groups and of those that they are in, as far as they can be read."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in set(controllers.split(",")) & _LIMITS.keys():
                folder, name = _LIMITS[controller]
                group = PurePosixPath(path.strip("/"))
                for inner in (group, *group.parents):  # a container sees its own group as the outermost
                    with suppress(OSError, ValueError):
                        yield int((root / folder / inner / name).read_text())
