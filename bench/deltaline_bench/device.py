"""What a run ran on: the device's name and the versions that its figures depend on. Measures nothing."""

from __future__ import annotations

import platform
import subprocess

import torch


def describe_device(device: torch.device) -> dict[str, str]:
    """Name the device and the versions of python, torch, CUDA, triton, ptxas and the driver."""
    import triton  # here: it may be missing where reports are only read
    from triton import knobs

    return {
        "name": torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "triton": str(triton.__version__),
        "ptxas": str(getattr(getattr(knobs.nvidia, "ptxas", None), "version", "unknown")),
        "driver": _driver_version(),
    }


def _driver_version() -> str:
    """Ask the driver's own tool."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip() if done.stdout else "unknown"
