"""The rules of Prometheus: promtool accepts them and their tests, every alert is shown to fire and to be quiet, is
explained, and is made of metrics that exist."""

from __future__ import annotations

import asyncio
import re
import subprocess
from typing import Any

import yaml
from rigs.dashboards import OF_PROMETHEUS, ROOT, exported, metrics_of
from rigs.scraper import FOLDER, program, scrape

from deltaline_server.app import Server
from deltaline_server.config import Config

RULE_FILES = sorted(FOLDER.glob("*.rules.yml"))


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return content


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """The rules of a kind, "alert" or "record", by their name."""
    found = [rule for path in RULE_FILES for group in read(path.name)["groups"] for rule in group["rules"]]
    return {rule[kind]: rule for rule in found if kind in rule}


def promtool(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_promtool_accepts_the_rules_the_configuration_and_their_tests() -> None:
    assert {path.name for path in RULE_FILES} == set(read("prometheus.yml")["rule_files"])
    for done in (
        promtool("check", "rules", *RULE_FILES),
        promtool("check", "config", FOLDER / "prometheus.yml"),
        promtool("check", "config", FOLDER / "local.yml"),
        promtool("check", "config", "--syntax-only", FOLDER / "tls.yml"),
        promtool("test", "rules", FOLDER / "rules.test.yml"),
    ):
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_local_configuration_differs_in_its_target_alone() -> None:
    local, containers = read("local.yml"), read("prometheus.yml")
    [job] = local["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{Config.metrics_port}"]}]
    job["static_configs"] = containers["scrape_configs"][0]["static_configs"]
    assert local == containers


def test_every_alert_is_shown_to_fire_and_to_be_quiet_beside_a_healthy_server() -> None:
    healthy, *others = read("rules.test.yml")["tests"]
    quiet = {case["alertname"] for case in healthy["alert_rule_test"] if case["exp_alerts"] == []}
    fires = {case["alertname"] for test in others for case in test.get("alert_rule_test", []) if case["exp_alerts"]}
    assert all(case["exp_alerts"] == [] for case in healthy["alert_rule_test"])
    assert quiet == fires == rules("alert").keys()


def test_every_recording_rule_is_shown_to_have_a_value() -> None:
    cases = [case for test in read("rules.test.yml")["tests"] for case in test.get("promql_expr_test", [])]
    shown = {name for case in cases if case["exp_samples"] for name in metrics_of(case["expr"])}
    assert shown == rules("record").keys()


def test_every_alert_is_in_the_table_with_its_severity() -> None:
    page = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(Deltaline\w+)` \| (\w+) \| .{10,} \| .{10,} \|$", page, re.M)
    assert dict(documented) == {name: rule["labels"]["severity"] for name, rule in rules("alert").items()}


async def test_promtool_has_nothing_to_say_of_a_servers_metrics(live: Server) -> None:
    page = await asyncio.to_thread(scrape, live)
    done = await asyncio.to_thread(promtool, "check", "metrics", text=page)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


async def test_rules_are_made_of_metrics_that_the_server_exports(live: Server) -> None:
    known = exported(await asyncio.to_thread(scrape, live)) | OF_PROMETHEUS | rules("record").keys()
    unknown = {
        name: missing
        for name, rule in (rules("alert") | rules("record")).items()
        if (missing := metrics_of(rule["expr"]) - known)
    }
    assert unknown == {}
    scaled = [rule["seriesQuery"] for rule in read("adapter-rules.yml")["rules"]]
    assert {name for query in scaled for name in metrics_of(query)} <= known
