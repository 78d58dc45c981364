"""docs/grafana/fanin.json and docs/operations.md name what a switch serves."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
from conftest import SwitchProcess
from ranks import wait_until

DOCS = Path(__file__).parents[2] / "docs"

# The label that Prometheus adds to all that it reads.
ADDED = {"instance"}

Series = dict[str, set[str]]


def scrape(address: str) -> tuple[Series, dict[str, str]]:
    """Each series' name with its labels, and each metric's type."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    series: Series = {}
    for name, labels in re.findall(r"^(fanin_\w+)(?:\{(.*)\})? \S+$", text, re.M):
        series.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return series, dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))


@pytest.fixture(scope="module")
def served() -> tuple[Series, dict[str, str]]:
    """The metrics of a switch that has had something of everything."""
    switch = SwitchProcess("--heartbeat-timeout", "1")
    switch.start()
    with fanin.connect(switch.address, job="metrics", rank=0, world_size=1) as group:
        with pytest.raises(fanin.errors.JoinRefused):
            fanin.connect(switch.address, job="metrics", rank=0, world_size=1)

        def measurements_are_told() -> bool:
            group.all_reduce(np.ones(400_000, np.float32))
            told = {"fanin_round_trip_seconds", "fanin_job_byte_seconds"}
            return told <= scrape(switch.address)[0].keys()

        wait_until(measurements_are_told, "a heartbeat tells what the rank measured")
        seen, types = scrape(switch.address)
    switch.kill()
    server = SwitchProcess("--protocol", "atp")
    server.start()
    rack = SwitchProcess("--protocol", "atp", "--upstream", server.address)
    rack.start()
    with fanin.connect(rack.address, job="a", rank=0, world_size=1, protocol="atp") as group:
        group.all_reduce(np.ones(100_000, np.float32))
        for address in (server.address, rack.address):
            more, more_types = scrape(address)
            for name, labels in more.items():
                seen.setdefault(name, set()).update(labels)
            types |= more_types
    rack.kill()
    server.kill()
    return seen, types


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DOCS / "grafana" / "fanin.json").read_text())
    return read


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def metrics(expression: str) -> dict[str, set[str]]:
    """The metrics of a PromQL expression with the labels that it selects them by."""
    found = re.findall(r"\b(fanin_\w+)(?:\{([^}]*)\})?", expression)
    return {name: set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)) for name, labels in found}


def test_every_metric_of_the_dashboard_is_served_with_its_labels(
    served: tuple[Series, dict[str, str]], dashboard: dict[str, Any]
) -> None:
    series, _ = served
    queries = [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    shown: set[str] = set()
    for expression in expressions(dashboard) + queries:
        named = metrics(expression)
        assert named, expression
        for name, labels in named.items():
            assert name in series, expression
            assert labels <= series[name] | ADDED, expression
        shown |= named.keys()
    assert shown == series.keys(), "a panel for each metric"
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            labels = set().union(*(series[name] for name in metrics(target["expr"])))
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= labels | ADDED, panel["title"]


def test_the_dashboard_has_what_an_import_needs(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None, "else Grafana looks for one that it has"
    assert dashboard["title"]
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert {"instance", "job_name"} <= variables.keys()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]
            assert panel["options"]
            for query in [panel, *panel["targets"]]:
                assert query["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) > 0
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used <= variables.keys() | {"__rate_interval", "__all"}


def test_the_manual_lists_every_metric_with_its_type_and_labels(
    served: tuple[Series, dict[str, str]],
) -> None:
    series, types = served
    text = (DOCS / "operations.md").read_text()
    rows = re.findall(r"^\| `(fanin_\w+)` \| (\w+) \| (.*?) \|", text, re.M)
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert listed.keys() == series.keys()
    for name, (kind, labels) in listed.items():
        assert types[name.removesuffix("_total")] == kind, name
        assert labels == series[name], name
    for name in re.findall(r"\bfanin_(?!torch|cli|controller)\w+", text):
        assert name in series, f"{name} in docs/operations.md"


def listed_under(heading: str) -> set[str]:
    """The first column of the manual's table there."""
    section = (DOCS / "operations.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.M))


def test_the_manual_lists_every_error() -> None:
    assert listed_under("Errors") == set(fanin.errors.__all__) - {"Tensor"}
