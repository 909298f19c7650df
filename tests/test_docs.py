"""The documents say what the code does, where that can be checked. Reads markdown; judges no prose."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2

from deltaline.v1 import adapter_service_pb2, admin_service_pb2, layer_service_pb2, state_service_pb2
from deltaline_server.config import Config, flag, kind_of, shown
from deltaline_server.errors import Reason

ROOT = Path(__file__).parents[1]
MAX_README_LINES = 120
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table under the heading row whose first cell is `heading`, without that row."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_reason_is_in_the_table_with_its_code() -> None:
    documented = {row[0]: row[1] for row in table("docs/protocol.md", "reason")}
    assert documented == {reason.name: code_pb2.Code.Name(reason.code) for reason in Reason}


def test_every_call_is_in_the_table() -> None:
    services = [
        *layer_service_pb2.DESCRIPTOR.services_by_name.values(),
        *state_service_pb2.DESCRIPTOR.services_by_name.values(),
        *admin_service_pb2.DESCRIPTOR.services_by_name.values(),
        *adapter_service_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    calls = {f"{service.name}.{method.name}" for service in services for method in service.methods}
    assert {row[0] for row in table("docs/protocol.md", "call")} == calls


@pytest.mark.parametrize("path", sorted(ROOT.glob("proto/deltaline/v1/*.proto")), ids=name_of)
def test_contract_names_only_reasons_that_exist(path: Path) -> None:
    comments = " ".join(re.findall(r"//(.*)", path.read_text(encoding="utf-8")))
    named = set(re.findall(r"reason ([A-Z_]{4,})", comments))
    assert named <= {reason.name for reason in Reason}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_decisions_are_numbered_one_by_one() -> None:
    pages = sorted(ROOT.glob("docs/adr/0*.md"))
    assert [page.name[:4] for page in pages] == [f"{i:04}" for i in range(1, len(pages) + 1)]
    titles = [page.read_text(encoding="utf-8").partition(".")[0] for page in pages]
    assert titles == [f"# {page.name[:4]}" for page in pages]


def test_make_targets_of_the_pages_exist() -> None:
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "CONTRIBUTING.md"))
    named = set(re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", pages, re.M))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {"demo", "test"} <= named <= targets


def test_readme_opens_with_the_two_commands_and_is_two_screens() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= MAX_README_LINES
    commands = re.findall(r"^    (make \w+)", readme, re.M)
    assert commands[:2] == ["make demo", "make test"]


def takes(option: Field[Any]) -> str:
    """The values of an option as the page tells them."""
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if kind_of(option) is bool:
        return "switch"
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if low is not None:
        return f"{low:,} .. {high:,}"
    metavar: str = option.metadata["metavar"]
    return metavar.lower().replace("dir", "folder").replace("|", " or ")


def default(option: Field[Any]) -> str:
    """The default of an option as the page tells it; the help's, which has it in brackets, is the same."""
    if kind_of(option) is bool:
        return "off"
    return f"`{shown(option)[2:-1]}`" if shown(option) else "none"


def test_every_option_is_in_the_table_with_its_default_and_limits() -> None:
    documented = [row[:4] for row in table("docs/options.md", "option")]
    options = [[f"`{flag(o.name)}`", o.metadata["group"], default(o), takes(o)] for o in fields(Config)]
    assert documented == options
    assert all(len(row[4]) > 10 for row in table("docs/options.md", "option"))


def test_every_alert_is_in_the_table_of_what_can_happen() -> None:
    rules = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("deploy/prometheus/*.yml"))
    alerts = set(re.findall(r"- alert: (\w+)", rules))
    documented = [
        name for row in table("docs/operations.md", "what happened") for name in re.findall(r"`(Deltaline\w+)`", row[1])
    ]
    assert len(alerts) > 10 and set(documented) == alerts
    assert all(len(row[2]) > 20 for row in table("docs/operations.md", "what happened"))
