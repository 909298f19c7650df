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


def test_the_tests_nearest_to_a_mutant_run_first(tmp_path: Path) -> None:
    room = tmp_path / "tests/server/front"
    files = ["test_a.py", "link/test_a.py", "link/test_b.py", "port/test_b.py"]
    for name in files:
        (room / name).parent.mkdir(parents=True, exist_ok=True)
        (room / name).touch()
    module = tmp_path / "server/deltaline_server/front/link/b.py"
    for given, expected in ((None, sorted(files)), (module, ["link/test_b.py", "link/test_a.py", *sorted(files)])):
        run = [word for word in mutants.tests_of("front", tmp_path, given) if word.endswith(".py")]
        assert run == [str(room / name) for name in dict.fromkeys(expected)]


def test_a_run_goes_on_where_another_ended_and_says_what_became_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests are a search for `a > b` here."""
    room = tmp_path / "server/deltaline_server/tables"
    room.mkdir(parents=True)
    (room / "module.py").write_text(MODULE)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "COPIED", ("server",))
    monkeypatch.setattr(mutants, "timed", lambda room, copy: 0.0)
    grep = "grep -q 'a > b' "
    monkeypatch.setattr(mutants, "tests_of", lambda room, copy, module: ["sh", "-c", f'"{grep}{module}"'])
    said = []
    for skip in (0, 15):
        options = ["--rooms", "tables", "--count", "20", "--skip", str(skip), "--workers", "2"]
        monkeypatch.setattr("sys.argv", ["mutants", *options])
        assert mutants.main() == 0
        said.append(capsys.readouterr().out.splitlines()[1:])
    *lines, total = said[0]
    results = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdecimal()]
    assert [int(number) for number, *_ in results] == list(range(20))
    num_caught = [became for _, became, *_ in results].count("caught")
    assert 0 < num_caught < 20 and total == f"tables: {num_caught} of 20 were caught"
    assert said[1][:-1] == lines[lines.index(" ".join(results[15])) :]
    assert (room / "module.py").read_text() == MODULE
