"""docs/grafana and docs/operations.md name what a switch serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fanin
import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from conftest import SwitchProcess
from ranks import wait_until

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GRAFANA = DOCS / "grafana"

# The labels that Prometheus adds to all that it reads.
ADDED = {"instance", "job"}
# Series of Prometheus itself.
OWN = {"up", "ALERTS"}
# Labels whose values are users'.
NAMES = {"job_name", "rank"}

# Each series' name with its labels, and their values.
Series = dict[str, dict[str, set[str]]]


def add(series: Series, name: str, labels: str) -> None:
    of_name = series.setdefault(name, {})
    for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
        of_name.setdefault(label, set()).add(value)


def scrape(address: str) -> tuple[Series, dict[str, str]]:
    """All series, and each metric's type."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    series: Series = {}
    for name, labels in re.findall(r"^(fanin_\w+)(?:\{(.*)\})? \S+$", text, re.M):
        add(series, name, labels)
    return series, dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))


def joined(series: Series, more: Series) -> None:
    for name, labels in more.items():
        of_name = series.setdefault(name, {})
        for label, values in labels.items():
            of_name.setdefault(label, set()).update(values)


@pytest.fixture(scope="module")
def served() -> tuple[Series, dict[str, str]]:
    """The metrics of a switch that has had something of everything."""
    switch = SwitchProcess("--heartbeat-timeout", "1", "--rate", "1gbit")
    switch.start()

    def joined_by(rank: int) -> fanin.Group:
        # Each is a machine by itself, so that there are links to plan for.
        said: dict[str, Any] = {"machine": f"m{rank}", "rate": "1gbit", "plan": "switch"}
        return fanin.connect(switch.address, job="metrics", rank=rank, world_size=2, **said)

    def sums_as_long_as_the_other() -> None:
        with joined_by(1) as group:
            while group.all_reduce(np.zeros(400_000, np.float32))[0]:
                pass

    with ThreadPoolExecutor() as other:
        ended = other.submit(sums_as_long_as_the_other)
        with joined_by(0) as group:
            with pytest.raises(fanin.errors.JoinRefused):
                fanin.connect(switch.address, job="metrics", rank=0, world_size=1)

            def measurements_are_told() -> bool:
                group.all_reduce(np.ones(400_000, np.float32))
                seen, _ = scrape(switch.address)
                measured = seen.get("fanin_job_byte_seconds", {}).get("of", set())
                return "fanin_round_trip_seconds" in seen and "measured" in measured

            wait_until(measurements_are_told, "a heartbeat tells what the rank measured")
            seen, types = scrape(switch.address)
            group.all_reduce(np.zeros(400_000, np.float32))
            ended.result()
    switch.kill()
    server = SwitchProcess("--protocol", "atp")
    server.start()
    rack = SwitchProcess("--protocol", "atp", "--upstream", server.address)
    rack.start()
    with fanin.connect(rack.address, job="a", rank=0, world_size=1, protocol="atp") as group:
        group.all_reduce(np.ones(100_000, np.float32))
        for address in (server.address, rack.address):
            more, more_types = scrape(address)
            joined(seen, more)
            types |= more_types
    rack.kill()
    server.kill()
    # A switch counts only those of which there were some.
    refusals = (ROOT / "crates/protocol/src/control/refusal.rs").read_text()
    named = set(re.findall(r'^ +\w+ = "(\w+)"', refusals, re.M))
    assert seen["fanin_refusals_total"]["reason"] < named
    seen["fanin_refusals_total"]["reason"] = named
    return seen, types


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((GRAFANA / "fanin.json").read_text())
    return read


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.fixture(scope="module")
def alert_tests() -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load((GRAFANA / "alerts_test.yml").read_text())["tests"]
    return tests


def targets(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in dashboard["panels"] for target in panel.get("targets", [])]


def expressions(dashboard: dict[str, Any]) -> list[str]:
    of_annotations = [entry["expr"] for entry in dashboard["annotations"]["list"][1:]]
    return [target["expr"] for target in targets(dashboard)] + of_annotations


def metrics(expression: str) -> Series:
    """The metrics of a PromQL expression, the labels that it selects them by, and which values."""
    found: Series = {}
    for name, labels in re.findall(r"\b(fanin_\w+|up|ALERTS)\b(?:\{([^}]*)\})?", expression):
        of_name = found.setdefault(name, {})
        for label, text in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', labels):
            values = set() if "$" in text else set(text.split("|"))
            of_name.setdefault(label, set()).update(values)
    return found


def labels_of(series: Series, expression: str) -> set[str]:
    return ADDED.union(*(series[name] for name in metrics(expression) if name not in OWN))


def check_that_it_is_served(series: Series, expression: str) -> set[str]:
    """An expression's metrics, which a switch must serve with the labels that it names."""
    named = metrics(expression)
    assert named, expression
    ours = named.keys() - OWN
    for name in ours:
        assert name in series, expression
        assert named[name].keys() <= series[name].keys() | ADDED, expression
        for label in named[name].keys() - ADDED - NAMES:
            assert named[name][label] <= series[name][label], expression
    matching = r"\b(?:by|without|on|ignoring|group_left)\s*\(([\w\s,]*)\)"
    grouped = set(re.findall(r"\w+", " ".join(re.findall(matching, expression))))
    assert grouped <= labels_of(series, expression), expression
    return ours


def test_every_metric_of_the_dashboard_is_served_with_its_labels(
    served: tuple[Series, dict[str, str]], dashboard: dict[str, Any]
) -> None:
    series, _ = served
    queries = [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    shown: set[str] = set()
    for expression in expressions(dashboard) + queries:
        shown |= check_that_it_is_served(series, expression)
    assert shown == series.keys(), "a panel for each metric"
    for target in targets(dashboard):
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert legend <= labels_of(series, target["expr"]), target["expr"]


def test_the_dashboard_has_what_an_import_needs(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None, "else Grafana looks for one that it has"
    assert dashboard["title"]
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert {"instance", "job_name"} <= variables.keys()
    for annotation in dashboard["annotations"]["list"][1:]:
        assert annotation["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    panels = dashboard["panels"]
    needed = {needs["id"] for needs in dashboard["__requires"] if needs["type"] == "panel"}
    assert needed == {panel["type"] for panel in panels} - {"row"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["options"]
            for query in [panel, *panel["targets"]]:
                assert query["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) > 0
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    assert used <= variables.keys() | {"__rate_interval", "__all"}


def test_every_metric_of_the_alerts_is_served_with_its_labels(
    served: tuple[Series, dict[str, str]], alerts: list[dict[str, Any]]
) -> None:
    series, _ = served
    for alert in alerts:
        check_that_it_is_served(series, alert["expr"])
        said = " ".join(alert["annotations"].values())
        labels = set(re.findall(r"\$labels\.(\w+)", said))
        assert labels <= labels_of(series, alert["expr"]), alert["alert"]


def test_every_alert_says_how_grave_it_is_and_what_mends_it(alerts: list[dict[str, Any]]) -> None:
    helps: dict[str, str] = {}
    for alert in alerts:
        assert alert["labels"]["severity"] in {"warning", "critical"}, alert["alert"]
        assert alert["annotations"].keys() == {"summary", "description"}, alert["alert"]
        commands = re.findall(r"`fanin (\w+) ([^`]*)`", alert["annotations"]["description"])
        assert commands or alert["alert"] == "FaninCallsAreDenied", alert["alert"]
        for command, options in commands:
            if command not in helps:
                asked = [sys.executable, "-m", "fanin", command, "--help"]
                helps[command] = subprocess.check_output(asked, text=True)
            for flag in re.findall(r"--[a-z-]+", options):
                assert flag in helps[command], f"{alert['alert']}: fanin {command} {flag}"


def test_every_alert_is_tested_for_what_it_is_for_and_for_what_it_is_not(
    served: tuple[Series, dict[str, str]],
    alerts: list[dict[str, Any]],
    alert_tests: list[dict[str, Any]],
) -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for test in alert_tests:
        asked = {case["alertname"] for case in test["alert_rule_test"]}
        (name,) = asked
        is_silent = not any(case.get("exp_alerts") for case in test["alert_rule_test"])
        (silent if is_silent else fires).add(name)
        for given in test["input_series"]:
            check_that_it_is_served(served[0], given["series"])
    assert fires == silent == {alert["alert"] for alert in alerts}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_alerts_fire_and_queries_parse_as_promtool_has_it(
    dashboard: dict[str, Any], tmp_path: Path
) -> None:
    """Queries of the dashboard are checked as rules, with values in place of Grafana's words."""
    queries = [re.sub(r"\$__rate_interval", "1m", each) for each in expressions(dashboard)]
    rules = [{"record": f"query:{n}", "expr": each} for n, each in enumerate(queries)]
    asked = tmp_path / "queries.yml"
    asked.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for command in (
        ("check", "rules", str(GRAFANA / "alerts.yml"), str(asked)),
        ("test", "rules", str(GRAFANA / "alerts_test.yml")),
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


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
        assert labels == series[name].keys(), name
    for name in re.findall(r"\bfanin_(?!torch|cli|controller)\w+", text):
        assert name in series, f"{name} in docs/operations.md"


def test_the_manual_has_the_events_and_words_that_metrics_name(
    served: tuple[Series, dict[str, str]],
) -> None:
    series, _ = served
    shown = (DOCS / "page.md").read_text().split("\n## What it shows\n")[1].split("\n## ")[0]
    words = set(re.findall(r"^\| `(\w+)` \|", shown, re.M))
    assert words == series["fanin_words"]["word"]
    told = re.search(r"\*\*Events\*\* are the last 500: (.*?)\.\n", shown, re.S)
    assert told is not None
    assert set(re.findall(r"`(\w+)`", told[1])) == series["fanin_events_total"]["event"]
    contract = (ROOT / "page" / "src" / "contract.ts").read_text()
    for name in words | series["fanin_events_total"]["event"]:
        assert f'"{name}"' in contract, name


def test_the_manual_lists_every_alert(alerts: list[dict[str, Any]]) -> None:
    text = (DOCS / "operations.md").read_text()
    rows = re.findall(r"^\| `(Fanin\w+)` \| (\w+) \|", text, re.M)
    assert rows == [(alert["alert"], alert["labels"]["severity"]) for alert in alerts]


def listed_under(heading: str) -> set[str]:
    """The first column of the manual's table there."""
    section = (DOCS / "operations.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.M))


def test_the_manual_lists_every_error() -> None:
    assert listed_under("Errors") == set(fanin.errors.__all__) - {"Tensor"}
