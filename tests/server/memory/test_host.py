"""The host's memory is the least that the system and the process's control groups tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaline_server.memory.host import host_bytes

MEMORY = "MemTotal:  1000 kB\nMemFree:  5 kB\nSwapTotal:  24 kB\nHugePages_Total:  0\n"
V2, V1 = "sys/fs/cgroup/{}memory.max", "sys/fs/cgroup/memory/{}memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1024 << 10),
        ({"proc/self/cgroup": "0::/a/b\n", V2.format("a/b/"): "max\n", V2.format("a/"): "4096\n"}, 4096),
        ({"proc/self/cgroup": "0::/not/here\n", V2.format(""): "8192\n"}, 8192),
        ({"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/x\n", V1.format("x/"): "2048\n"}, 2048),
        ({"proc/self/cgroup": "4:memory:/x\n", V1.format("x/"): str(2**63 - 4096)}, 1024 << 10),
        ({"proc/self/cgroup": "odd\n", V2.format(""): "1\n"}, 1024 << 10),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in {"proc/meminfo": MEMORY, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_bytes(tmp_path) == expected


def test_this_host_has_some_where_nothing_is_written_down(tmp_path: Path) -> None:
    assert (host_bytes(tmp_path) or 0) > 1 << 20
    assert (host_bytes() or 0) > 1 << 20
