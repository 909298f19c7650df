"""What a run ran on: the names of device and processor, and the versions that its figures depend on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CPU_INFO = Path("/proc/cpuinfo")
# What a processor has for matrices and vectors, by the flag that says so.
EXTENSIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX", "asimd": "NEON", "sve": "SVE"}


def name_device(device: torch.device) -> str:
    """Name what figures are taken on: a GPU, or the kind of this processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else describe_cpu()


def describe_cpu(cpu_info: Path = CPU_INFO) -> str:
    """Say the processor's model, the host's cores and the vector extensions: `AMD EPYC, 8 cores, AVX2 AVX-512`.

    Where `cpu_info` cannot be read, its architecture takes the model's place.
    """
    try:
        text = cpu_info.read_text(encoding="utf-8")
    except OSError:
        text = ""
    model = _field("model name", text) or platform.machine()
    flags = _field("flags|Features", text).split()
    extensions = [name for flag, name in EXTENSIONS.items() if flag in flags]
    return ", ".join((model, f"{os.cpu_count()} cores", " ".join(extensions) or "no known extensions"))


def _field(names: str, text: str) -> str:
    """Return the first value of a field of /proc/cpuinfo; empty where there is none."""
    found = re.search(rf"^(?:{names})\s*: (.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def describe_device(device: torch.device) -> dict[str, str]:
    """Name the device, the versions of python, torch, CUDA, triton, ptxas and the driver, and the host's processor."""
    import triton  # here: it may be missing where reports are only read
    from triton import knobs

    return {
        "name": name_device(device),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "triton": str(triton.__version__),
        "ptxas": str(getattr(getattr(knobs.nvidia, "ptxas", None), "version", "unknown")),
        "driver": _driver_version(),
        "host": describe_cpu(),
    }


def _driver_version() -> str:
    """Ask the driver's own tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.stdout else "unknown"


def provenance(device: str, *modules: ModuleType) -> dict[str, Any]:
    """The command, the date, the device and the versions of the modules that the figures depend on."""
    versions = {"python": platform.python_version()} | {module.__name__: module.__version__ for module in modules}
    return {
        "command": "python " + " ".join(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "device": device,
        "versions": versions,
    }
