"""A peer that cannot be loaded says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deltaline_bench.peers import PeerMissing, Peers

LOADER = """
import sys
def install(directory):
    sys.path.insert(0, directory)
"""


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Peers of a directory with a package `a_peer`; one of its modules lacks something else."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    (tmp_path / "peer_loader.py").write_text(LOADER)
    (tmp_path / "a_peer").mkdir()
    (tmp_path / "a_peer" / "__init__.py").write_text("__version__ = '1.2'")
    (tmp_path / "a_peer" / "ops.py").write_text("def function():\n    return 3\n")
    (tmp_path / "a_peer" / "broken.py").write_text("import no_such_module_of_a_peer")
    return Peers(tmp_path)


def test_function_is_loaded_with_the_version_of_its_source(peers: Peers) -> None:
    assert peers.load("a_peer.ops", "function")() == 3
    assert peers.versions["a_peer"].startswith("1.2 source, ops.py sha256 ")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("no_such_peer.ops", "^not installed$"),
        ("a_peer.ops", "^not installed$"),
        ("a_peer.broken", "cannot be imported: .*no_such_module_of_a_peer"),
    ],
    ids=["no package", "no such function", "lacks another package"],
)
def test_what_cannot_be_loaded_says_why(peers: Peers, module: str, why: str) -> None:
    with pytest.raises(PeerMissing, match=why):
        peers.load(module, "other")
