"""The kernels' self-test as the server runs it at start: in the sizes that it serves, on its device."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from deltaline_kernels.selftest.run import run_selftest
from deltaline_server.checkpoints.config_reader import ModelError
from deltaline_server.layers.shapes import MixerShape, PagedShape
from deltaline_server.layers.state_pool import StateOptions
from deltaline_server.models.model import Model

# The self-test's arguments for mixers alone.
NOTHING_BESIDE: Mapping[str, Any] = {"hidden": 0}


def self_test(model: Model, options: StateOptions) -> None:
    """Compare the kernels as a model's layers call them, what blocks have beside mixers once, and adapters' where there
    are places for some; on the CPU nothing, where PyTorch computes. Raises ModelError as check_kernels."""
    if model.device.type == "cpu":
        return
    beside: Mapping[str, Any] = model.block_sizes
    for shape in dict.fromkeys(model.shapes):
        sizes = {**beside, "has_adapters": model.adapters is not None}
        check_kernels(model.device, model.dtype, shape, options, sizes)
        beside = NOTHING_BESIDE


def check_kernels(
    device: torch.device, dtype: torch.dtype, shape: MixerShape, options: StateOptions, block_sizes: Mapping[str, Any]
) -> None:
    """Compare every kernel, as it serves such a model, with its reference on the device.

    block_sizes: the self-test's arguments for what blocks have beside their mixers, as Model has them, and adapters.
    Raises: ModelError naming those that differ, and on a GPU what compiled them.
    """
    sizes: dict[str, Any] = shape.test_sizes() | dict(block_sizes)
    if isinstance(shape, PagedShape):
        sizes["page_size"] = options.page_size
    checks = run_selftest(device, dtype, **sizes, max_draft=options.max_draft, state_dtype=options.state_dtype)
    wrong = [check for check in checks if not check.ok]
    if wrong:
        text = "; ".join(f"{check.name}: error {check.error:.2g}, limit {check.limit:.2g}" for check in wrong)
        raise ModelError(f"self-test: the kernels compute wrong values on this device{_compiler(device)}: {text}")


def _compiler(device: torch.device) -> str:
    """What compiles kernels for a device, in parentheses; nothing for the CPU."""
    if device.type != "cuda":
        return ""
    from triton import knobs  # installed on Linux alone

    return f" (Triton {version('triton')}, ptxas {knobs.nvidia.ptxas.version})"
