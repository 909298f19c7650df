"""Which peers can be imported, and their versions. Does not know what they compute."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Import name of each known peer and the distribution that installs it.
DISTRIBUTIONS = {
    "causal_conv1d": "causal-conv1d",
    "fla": "fla-core",
    "flag_gems": "flag-gems",
    "flash_kda": "flash-kda",
    "mamba_ssm": "mamba-ssm",
    "selective_scan_cuda": "mamba-ssm",
    "sglang": "sglang",
    "vllm": "vllm",
}


# What a peer offers.
Function = Callable[..., Any]


class PeerMissing(Exception):
    """A peer cannot be imported; the message says why."""


class Peers:
    """The peers of this run: installed ones, and those whose sources lie in a directory.

    Args:
        directory: holds `peer_loader.py`, whose `install(directory)` makes the sources beside it importable; None
            for installed peers only.

    Raises:
        FileNotFoundError: the directory has no `peer_loader.py`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = None if directory is None else directory.resolve()
        self.versions = dict.fromkeys(DISTRIBUTIONS, "not imported")
        if self._directory is not None:
            _install(self._directory)

    def load(self, module: str, name: str) -> Any:
        """Import `name` from `module` and record the version.

        Raises:
            PeerMissing: it is not there. Whatever else its import raises is raised.
        """
        package = module.partition(".")[0]
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
            why = "not installed" if missing else f"cannot be imported: {error}"
            self.versions[package] = why
            raise PeerMissing(why) from error
        # A module without a file is a stand-in for one that the directory lacks.
        if getattr(loaded, "__file__", None) is None or name not in vars(loaded):
            self.versions[package] = "not installed"
            raise PeerMissing("not installed")
        self.versions[package] = self._version(package, loaded)
        return vars(loaded)[name]

    def _version(self, package: str, module: ModuleType) -> str:
        """Name the release; sources from the directory are named by the digest of the file as well."""
        path = Path(str(module.__file__)).resolve()
        if self._directory is None or not path.is_relative_to(self._directory):
            try:
                return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
            except importlib.metadata.PackageNotFoundError:
                return "unknown"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        release = getattr(sys.modules[package], "__version__", "")
        return f"{release} source, {path.name} sha256 {digest}".strip()


def _install(directory: Path) -> None:
    """Let the directory's own loader put it on the import path."""
    path = directory / "peer_loader.py"
    if not path.is_file():
        raise FileNotFoundError(f"--peers: expected a directory with peer_loader.py, got {directory}")
    spec = importlib.util.spec_from_file_location("peer_loader", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"--peers: cannot load {path}")
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    loader.install(str(directory))
