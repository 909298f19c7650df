"""The dashboards: what Grafana needs of them, that every query parses, and that the server exports what they name."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import yaml
from rigs.dashboards import OF_PROMETHEUS, PATHS, ROOT, Query, exported, metrics_of, queries, read
from rigs.scraper import scrape

from deltaline_server.app import Server

PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"


def name_of(query: Query) -> str:
    return f"{query.board}: {query.panel}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_panels_have_ids_of_their_own_and_do_not_overlap(path: Path) -> None:
    panels = read(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_query_asks_the_data_source_that_the_reader_chose(path: Path) -> None:
    board = read(path)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    asked = [panel["datasource"] for panel in board["panels"] if panel["type"] != "row"]
    asked += [target["datasource"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [variable["datasource"] for variable in variables.values() if variable["type"] == "query"]
    assert len(asked) > 20 and all(source == chosen for source in asked)


def test_provisioning_reads_the_folders_that_compose_mounts() -> None:
    provider = yaml.safe_load((PROVISIONING / "dashboards" / "deltaline.yaml").read_text(encoding="utf-8"))
    source = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    grafana, prometheus = compose["services"]["grafana"], compose["services"]["prometheus"]
    mounts = dict(mount.split(":")[:2] for mount in grafana["volumes"])
    [folder] = [one["options"]["path"] for one in provider["providers"]]
    assert (
        mounts["../grafana/dashboards"] == folder and mounts["../grafana/provisioning"] == "/etc/grafana/provisioning"
    )
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(folder) and Path(home).name in {path.name for path in PATHS}
    [data] = source["datasources"]
    assert data["url"] == "http://prometheus:" + prometheus["ports"][0].split(":")[-1]


async def test_every_query_parses_and_names_metrics_that_the_server_exports(live: Server) -> None:
    text = await asyncio.to_thread(scrape, live)
    names = exported(text) | OF_PROMETHEUS
    unknown = {name_of(query): missing for query in queries() if (missing := metrics_of(query.filled()) - names)}
    assert len(queries()) > 50 and unknown == {}
    # And nothing that it exports is on none of them.
    shown = {re.sub("_(sum|count|bucket)$", "", name) for query in queries() for name in metrics_of(query.filled())}
    assert set(re.findall(r"^# TYPE (\w+)", text, re.M)) - shown == set()


async def test_every_metric_is_documented(live: Server) -> None:
    text = await asyncio.to_thread(scrape, live)
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`(?:deltaline|grpc|process)_.*?) \|", page, re.M)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(re.findall(r"^# TYPE (\w+)", text, re.M))
