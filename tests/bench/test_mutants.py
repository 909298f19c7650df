"""Mutants: which changes are drawn, and that they are judged on a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed")

import mutants

MODULE = '''\
"""A module."""


def larger(a: int | None, b: int) -> int | None:
    limit: int | float = 3
    return a if a > b else limit | b
'''


def test_code_is_changed_and_annotations_are_not(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    found = list(mutants.mutants_of(path))
    changed = {(mutant.start_pos[0], mutant.operator_name.split("/")[1].rpartition("_")[0]) for mutant in found}
    lines = MODULE.splitlines()
    assert {line for line, _ in changed} == {lines.index("    limit: int | float = 3") + 1, len(lines)}
    assert {"ReplaceComparisonOperator_Gt", "ReplaceBinaryOperator_BitOr"} <= {name for _, name in changed}
    bit_ors = [mutant for mutant in found if "BitOr" in mutant.operator_name]
    assert {mutant.start_pos for mutant in bit_ors} == {(len(lines), lines[-1].index("|"))}


def test_a_seed_names_a_sample_of_all_rooms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for room in ("tables", "front", "engine"):
        folder = tmp_path / "server/deltaline_server" / room
        folder.mkdir(parents=True)
        (folder / "module.py").write_text(MODULE)
    rooms = ["front", "tables"]
    first, again, other = (mutants.drawn(rooms, 20, seed) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 20
    assert {(room, mutant.module_path.parent.name) for room, mutant in first} == {(room, room) for room in rooms}
    assert "20 drawn from seed 1" in capsys.readouterr().out
