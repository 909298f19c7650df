"""The example of conversations: no token is computed twice, and what is said is what transformers says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from rigs.served import served

from deltaline_client import Client
from deltaline_server.app import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("device", ["cpu"])]

SYSTEM, QUESTION, REPLY = 100, 12, 24


@pytest.mark.parametrize(
    "kind", ["hybrid", *(pytest.param(one, marks=pytest.mark.sweep) for one in ("mamba2", "gated_delta_net"))]
)
def test_turns_reuse_what_was_said(
    make_server: Callable[..., Server],
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    chat: Any = import_module("chat")

    try:
        directory = tmp_path / "checkpoint"
        directory.mkdir()
        run_path(str(EXAMPLES / "make_checkpoint.py"))["make_checkpoint"](directory, kind)
        ends = chat.Ends(directory)
        options: dict[str, Any] = {"random_init": None, "model": str(directory), "snapshot_lines": 16}
        with served(make_server(**options)) as address, Client(address) as client:
            turns = chat.converse(client, ends)
            load = client.load()
            monkeypatch.setattr(chat, "converse", lambda *_: turns)
            monkeypatch.setattr(sys, "argv", ["chat.py", str(directory), "--server", address, "--compare"])
            assert chat.main() == 0
            shown = capsys.readouterr().out
            turns[-1].reply[0] ^= 1
            assert chat.main() == 1, "which looks at every turn's first token"
    finally:
        sys.modules.pop("chat"), sys.modules.pop("generate")
    # Behind a turn, all but the reply's last token is stored.
    said = [SYSTEM, *(SYSTEM + n * (QUESTION + REPLY) - 1 for n in (1, 2))]
    assert [turn.reused for turn in turns] == [0, said[0], said[1], said[2], said[2], said[2], said[1]]
    assert len({tuple(turn.prompt) for turn in turns}) == 7 and load.sequences_open == 0
    assert f"A, turn 2{len(turns[2].prompt):19}{said[1]:8}{QUESTION + 1:10}" in shown
    assert "the replies are those of transformers" in shown
    assert "the replies are not those of transformers" in capsys.readouterr().err
