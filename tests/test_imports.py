"""The packages import without what they must not need. Knows import names only; import-linter checks the directions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = {
    "client": (
        ["deltaline_client"],
        ["torch", "triton", "transformers", "prometheus_client", "deltaline_kernels", "deltaline_server"],
    ),
    "command": (["deltaline_cli.__main__"], ["torch", "triton", "deltaline_kernels", "deltaline_server"]),
    "model for transformers": (["deltaline_transformers"], ["triton", "deltaline_kernels", "deltaline_server"]),
    "contract": (
        ["deltaline.wire", "deltaline.v1.layer_service_pb2_grpc"],
        ["torch", "deltaline_client", "deltaline_kernels", "deltaline_server"],
    ),
    "sequences": (
        ["deltaline_server.tables.sequences", "deltaline_server.scheduling.scheduler"],
        ["torch", "triton", "grpc"],
    ),
    "front end": (
        ["deltaline_server.front.ends.__main__"],
        ["torch", "triton", "prometheus_client", "safetensors", "re2", "deltaline_kernels", "deltaline_client"],
    ),
    "engine": (["deltaline_server.engine.engine"], ["triton", "grpc", "deltaline", "deltaline_client"]),
}


def import_without(modules: list[str], blocked: list[str]) -> subprocess.CompletedProcess[str]:
    """Import `modules` in a new interpreter in which importing any of `blocked` fails."""
    program = "\n".join(
        [
            "import importlib, sys",
            f"sys.path[:0] = {[str(ROOT / folder) for folder in ('proto', 'kernels', 'server', 'client')]!r}",
            f"sys.modules.update(dict.fromkeys({blocked!r}))",
            f"[importlib.import_module(name) for name in {modules!r}]",
        ]
    )
    return subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", CASES)
def test_package_imports_without(case: str) -> None:
    done = import_without(*CASES[case])
    assert done.returncode == 0, done.stderr


NOTHING_BUT_TORCH = f"""
import sys
sys.path.insert(0, {str(ROOT / "kernels")!r})
import torch

class NothingElse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed:
            raise ModuleNotFoundError(name)

allowed = sys.stdlib_module_names | {{"torch", "deltaline_kernels"}}
found = {{name for name in sys.modules if name.partition(".")[0] not in allowed}}
sys.modules.update(dict.fromkeys(found))  # what torch has imported for itself is blocked as well
sys.meta_path.insert(0, NothingElse())
"""


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        (
            "import deltaline_kernels as k, deltaline_kernels.compat; assert all(c.ok for c in k.run_selftest('cpu'))",
            "",
        ),
        ("import numpy", "numpy"),
        ("import deltaline", "deltaline"),
    ],
)
def test_kernels_need_nothing_but_torch(program: str, missing: str) -> None:
    program = f"{NOTHING_BUT_TORCH}\n{program}"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == bool(missing) and missing in done.stderr, done.stderr


def test_a_blocked_import_is_noticed() -> None:
    assert "numpy" in import_without(["deltaline.wire"], ["numpy"]).stderr
