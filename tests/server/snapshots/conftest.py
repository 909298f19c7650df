"""What tests of states that travel share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rigs.state_rig import StateRig
from rigs.stored_states import make_rig


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[StateRig, StateRig]]:
    """A function that makes two rigs of one model."""

    def make(name: str = "hybrid", **changes: Any) -> tuple[StateRig, StateRig]:
        for folder in ("from", "to"):
            (tmp_path / folder).mkdir()
        return make_rig(tmp_path / "from", name, **changes), make_rig(tmp_path / "to", name, **changes)

    return make
