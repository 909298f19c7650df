"""deploy/README.md: the commands that it gives name what exists."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import yaml
from rigs.image import ROOT, stages

from deltaline_server.config import Config, flag

PAGE = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?<![\w/])deploy/[\w./-]*[\w-]", PAGE))))
def test_a_path_of_the_page_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_targets_profiles_and_variables_are_those_of_the_files() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    profiles = {name for service in compose["services"].values() for name in service.get("profiles", [])}
    assert set(re.findall(r"--profile (\w+)", PAGE)) == profiles
    assert set(re.findall(r"--target (\w+)", PAGE)) <= set(stages())
    text = (ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8")
    assert {"MODEL_DIR", "TORCH_INDEX"} == set(re.findall(r"\$\{(\w+)", text))
    arguments = set(re.findall(r"--build-arg (\w+)", PAGE))
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M))
    assert arguments == {"BASE", "TORCH_INDEX"} and arguments <= declared


def test_options_of_the_server_exist() -> None:
    known = {flag(option.name) for option in fields(Config)}
    named = set(re.findall(r"`(--[a-z-]+)`", PAGE)) - {"--time"}  # Docker's
    assert len(named) > 6 and named <= known
    keys = {option.name for option in fields(Config)}
    assert {"drain_timeout_s"} <= keys & set(re.findall(r"`([a-z_]+)`", PAGE))
