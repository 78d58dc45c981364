"""`fanin reproduce PAPER --quick` runs to its end, and what the papers claim holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from fanin.reproduce import ReproduceError, command
from fanin.reproduce.atp import EXPERIMENTS, overflow
from fanin.reproduce.byteps import equations, goodput
from fanin.reproduce.finding import Experiment, Finding, Outcome, table
from fanin.reproduce.lab import Lab, Spread, doubts, toml
from test_netlab import needs_lab

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def reproduce(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "fanin", "reproduce", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reproduction")
    ended = reproduce("atp", "--quick", "--out", str(out))
    assert ended.returncode == 0, ended.stderr
    return out


def findings_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    document = json.loads((out / "results.json").read_text())
    return {name: of_one["findings"] for name, of_one in document["experiments"].items()}


@pytest.fixture(scope="module")
def findings(quick: Path) -> dict[str, list[dict[str, Any]]]:
    document = json.loads((quick / "results.json").read_text())
    assert document["command"].startswith("fanin reproduce atp --quick")
    assert document["seeds"] == [1]
    return findings_of(quick)


def ours(findings: dict[str, list[dict[str, Any]]], experiment: str, what: str) -> float:
    [found] = [one for one in findings[experiment] if what in one["what"]]
    return float(found["ours"]["median"])


def test_every_figure_has_a_row_and_a_plot(
    quick: Path, findings: dict[str, list[dict[str, Any]]]
) -> None:
    page = (quick / "README.md").read_text()
    assert set(findings) == {experiment.name for experiment in EXPERIMENTS}
    for experiment in EXPERIMENTS:
        assert (quick / f"{experiment.name}.png").read_bytes().startswith(SIGNATURE)
        assert f"({experiment.name}.png)" in page
        for finding in findings[experiment.name]:
            assert finding["what"] in page
            assert finding["agrees"] or finding["why"], f"no reason: {finding}"


# The figures' names and values are those of the ATP paper (NSDI 2021).


def test_two_levels_leave_a_third_of_the_traffic_into_the_server(
    findings: dict[str, list[dict[str, Any]]],
) -> None:
    assert ours(findings, "rack-scale", "rack-scale service by ATP") == pytest.approx(3, rel=0.1)


def test_sharing_aggregators_beats_static_parts_where_they_are_few(
    findings: dict[str, list[dict[str, Any]]],
) -> None:
    assert ours(findings, "sharing", "33 % of peak-throughput aggregators") >= 1
    assert ours(findings, "sharing", "while one job pauses") > 1


def test_hashing_beats_indices_in_sequence(findings: dict[str, list[dict[str, Any]]]) -> None:
    assert ours(findings, "hashing", "by that in sequence") >= 1


def test_congestion_control_is_worth_having(findings: dict[str, list[dict[str, Any]]]) -> None:
    assert ours(findings, "congestion", "on by off") > 1


def test_a_job_gets_its_fair_share_of_a_link(findings: dict[str, list[dict[str, Any]]]) -> None:
    share = ours(findings, "background", "by its fair share")
    assert share == pytest.approx(1, rel=0.2)
    assert ours(findings, "background", "VGG16 beside a flow") > 0.7


def test_losses_cost_atp_less_than_switchml(findings: dict[str, list[dict[str, Any]]]) -> None:
    assert ours(findings, "loss", "micro-benchmark at 1 % loss") > 1


def test_the_same_seed_gives_the_same_findings(tmp_path: Path, quick: Path) -> None:
    ended = reproduce("atp", "--quick", "--only", "rack-scale", "overflow", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    one, two = (json.loads((out / "results.json").read_text()) for out in (quick, tmp_path))
    for name, again in two["experiments"].items():
        assert again == one["experiments"][name]
    for result in (tmp_path / "results").iterdir():
        assert result.read_bytes() == (quick / "results" / result.name).read_bytes()


def test_another_seed_is_another_run(tmp_path: Path, quick: Path) -> None:
    arguments = ("--seed", "2", "--only", "overflow", "--out", str(tmp_path))
    assert reproduce("atp", "--quick", *arguments).returncode == 0
    again = json.loads((tmp_path / "results.json").read_text())
    first = json.loads((quick / "results.json").read_text())
    assert again["seeds"] == [2]
    assert again["experiments"]["overflow"] != first["experiments"]["overflow"]


def test_a_figure_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    ended = reproduce("atp", "--only", "latency", "--out", str(tmp_path))
    assert ended.returncode == 2
    assert "latency" in ended.stderr
    assert "rack-scale" in ended.stderr


# The figures' names and values are those of the BytePS paper (OSDI 2020).


def test_the_planner_is_theorem_1_of_byteps(tmp_path: Path) -> None:
    ended = reproduce(
        *("byteps", "--quick", "--only", "theorem", "acceleration", "--out", str(tmp_path))
    )
    assert ended.returncode == 0, ended.stderr
    found = findings_of(tmp_path)
    assert set(found) == {"theorem", "acceleration"}
    assert [one for of_one in found.values() for one in of_one if not one["agrees"]] == []
    # §4.1.1: "when n = 32 and k = 16"; the paper cuts 1.469 to 1.46.
    assert ours(found, "acceleration", "gamma_a") == pytest.approx(1504 / 1024)
    assert ours(found, "acceleration", "gamma_p") == pytest.approx(1504 / 992)
    for name in found:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(SIGNATURE)
    assert "rounds 1 to 1" in (tmp_path / "README.md").read_text()


def test_the_equations_of_byteps_are_consistent_with_its_proof() -> None:
    for n in (2, 3, 8, 32):
        for k in range(n + 1):
            gpu, cpu, time = (
                of(n, k) for of in (equations.gpu_share, equations.cpu_share, equations.optimal)
            )
            assert n * gpu + k * (cpu if k else 0) == pytest.approx(1)  # Eq. 5
            assert 1 + (n - 2) * gpu == pytest.approx(time)  # Eq. 3
            if k:
                assert n * cpu == pytest.approx(time)  # Eq. 4, with the n that it lacks in print
                servers = equations.parameter_server(n, k)
                assert equations.by_parameter_server(n, k) == pytest.approx(servers / time)
            assert equations.by_ring(n, k) == pytest.approx(equations.ring(n) / time)


def test_without_root_figure_12_is_refused_with_what_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ReproduceError, match="sudo; without Figure 12: --only theorem"):
        goodput.run(cast(Lab, None))


class Measured:
    """A laboratory of which every figure is known."""

    quick = False
    seeds = (1, 2)

    def __init__(self, slower: float) -> None:
        self.slower = slower
        """By how much the split takes longer than it must."""

    def bench(self, name: str, arguments: Sequence[str]) -> dict[str, Any]:
        assert name.rpartition("-")[2] in ("1", "2"), "one file a round"
        n, k = (int(arguments[arguments.index(option) + 1]) for option in ("--workers", "--spares"))
        unit_s = 0.2 * 1482 / 1408
        own = "--own-services" in arguments
        units = equations.optimal(n, k) * self.slower if own else equations.parameter_server(n, k)
        times = {"fanin": units * unit_s, "gloo": equations.ring(n) * unit_s}
        backends = {name: {"median_s": time_s} for name, time_s in times.items()}
        return {"payload_bytes": 25_000_000, "backends": backends}


@needs_lab
@pytest.mark.parametrize(("slower", "below"), [(1.0, 0.0), (1.05, 4.8), (1.2, 16.7)])
def test_figure_12_is_held_to_the_optimum(slower: float, below: float) -> None:
    outcome = goodput.run(cast(Lab, Measured(slower)))
    first = outcome.findings[0]
    assert first.ours.median == pytest.approx(below, abs=0.1)
    assert first.agrees == (below <= 9)  # §7.1: "1-9% difference"
    by_ring = [one.ours.median for one in outcome.findings if "by a ring" in one.what]
    expected = [equations.by_ring(4, k) / slower for k in range(5)]
    assert by_ring == pytest.approx(expected)
    by_servers = [one.ours.median for one in outcome.findings if "alone (PS)" in one.what]
    assert by_servers[0] == pytest.approx(equations.by_parameter_server(4, 1) / slower)
    assert [one for one in outcome.findings if not (one.agrees or one.why)] == []


def test_what_measures_runs_alone_and_last() -> None:
    before: dict[str, set[str]] = {}

    class Stub:
        def stop(self) -> None:
            pass

    def experiment(name: str, measures: bool) -> Experiment:
        def run(_: Lab) -> Outcome:
            before[name] = set(before)
            return Outcome([], lambda _: None, {"name": name})

        return Experiment(name, name, run, measures)

    chosen = [experiment("one", True), experiment("two", False), experiment("three", True)]
    outcomes = command._run_all(chosen, cast(Lab, Stub()))
    assert [outcome.series["name"] for outcome in outcomes] == ["one", "two", "three"]
    assert before["one"] == {"two"}
    assert before["three"] == {"two", "one"}


def test_throughputs_that_were_not_measured_are_told() -> None:
    enough = {"window_s": 0.002, "completed": 6, "needed": 6, "enough": True}
    measured = {"name": "a", "unfinished": None, "measurement": enough}
    late = {**measured, "name": "b", "unfinished": "tensors completed by each worker: 3"}
    few = {**measured, "name": "c", "measurement": {**enough, "completed": 5, "enough": False}}
    assert doubts({"jobs": [measured]}) == []
    assert doubts({"jobs": [late, few]}) == [
        "b has not finished",
        "c is not measured: 5 completed in 2 ms, 6 needed",
    ]


def test_a_scenario_is_written_as_toml() -> None:
    import tomllib

    scenario = {
        "title": 'with "quotes"',
        "network": {"hosts": 9, "ecn": "100kB"},
        "job": [{"workers": ["h0", "h1"]}, {"workers": 2, "congestion_control": False}],
        "background": [],
    }
    assert tomllib.loads(toml(scenario)) == scenario


def test_a_finding_is_within_a_fifth_or_gives_its_reason() -> None:
    def row(ours: float, paper: float | str, holds: bool | None = None) -> str:
        spread = Spread(ours, ours, ours)
        found = Finding("Fig. 1", "x", paper, spread, holds, unit="Gbit/s", why="because")
        return table([found]).splitlines()[-1]

    assert row(11.9, 10.0).endswith("| 10 Gbit/s | 11.9 Gbit/s | 1.19 | yes |")
    assert row(12.1, 10.0).endswith("| 1.21 | no: because |")
    assert row(2, "more than 1", True).endswith("| more than 1 | 2 Gbit/s |  | holds |")
    assert row(0.5, "more than 1", False).endswith("|  | does not hold: because |")


def test_the_bound_of_the_proactive_mechanism_is_the_papers() -> None:
    # §B.2: "With 100 workers and a scaling factor of 10^8, the value of B is 0.2."
    assert overflow.bound(100) == pytest.approx(0.2, rel=0.1)
