"""The dashboards under deploy/grafana as data: their queries with the variables filled in, and the metrics that a query
names. Knows Grafana's JSON and PromQL; asks nothing of a server."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
# What Grafana would fill in, for a server that is scraped every second.
VARIABLES = {"$__rate_interval": "30s", "$job": ".*", "$instance": ".*"}
# What Prometheus adds to the scrape of a server by itself.
OF_PROMETHEUS = {"up"}


@dataclass(frozen=True)
class Query:
    """A query as a panel has it."""

    board: str
    panel: str
    expression: str

    def filled(self, kind: str = ".*") -> str:
        """The query with every variable replaced; `kind` is that of the dashboard's variable of the name."""
        text = self.expression
        for name, value in (VARIABLES | {"$kind": kind}).items():
            text = text.replace(name, value)
        assert "$" not in text, f"{self.board}, {self.panel}: a variable that is not filled in: {text}"
        return text


def read(path: Path) -> dict[str, Any]:
    """A dashboard."""
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def queries() -> list[Query]:
    """Every query of every dashboard."""
    return [
        Query(path.stem, panel["title"], target["expr"])
        for path in PATHS
        for panel in read(path)["panels"]
        for target in panel.get("targets", [])
    ]


def metrics_of(expression: str) -> set[str]:
    """The names of the metrics in a PromQL expression. Raises ValueError when it is none."""
    names = set[str]()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            names.add(str(node.name))
        elif isinstance(node, promql_parser.MatrixSelector):
            names.add(str(node.vector_selector.name))

    promql_parser.walk(promql_parser.parse(expression), visit)
    return names


def exported(scrape: str) -> set[str]:
    """The sample names of a scrape, in Prometheus' text format."""
    return set(re.findall(r"^([a-z_:]+)(?:\{| )", scrape, re.M))
