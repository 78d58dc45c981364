"""`fanin sim --report`: one file, which a browser opens without a network."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reports
from browser import browsing

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "page" / "fixtures" / "report.toml"
FANIN = [sys.executable, "-m", "fanin"]
Open = Callable[[Path], Any]


pytestmark = pytest.mark.skipif(not reports.are_built(), reason="fanin was built without its pages")


def fanin(*arguments: str | Path, status: int = 0) -> str:
    command = [*FANIN, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a.html and a.json: the fixture's scenario with seed 3."""
    folder = tmp_path_factory.mktemp("report")
    files = ("--report", folder / "a.html", "--json", folder / "a.json")
    fanin("sim", SCENARIO, "--seed", "3", *files)
    return folder


def test_a_report_has_what_the_json_has_and_its_scenario_can_be_played_again(
    played: Path, tmp_path: Path
) -> None:
    (run,) = reports.data(played / "a.html")["runs"]
    document = json.loads((played / "a.json").read_text())
    assert run["name"] == "report.toml, seed 3"
    assert run["recording"] == document["result"]["recording"]
    assert run["result"]["digest"] == document["result"]["digest"]
    assert [job["name"] for job in run["result"]["jobs"]] == ["training", "sums"]
    again = tmp_path / "again.toml"
    again.write_text(run["toml"])
    assert f"digest {run['result']['digest']}" in fanin("sim", again, "--seed", str(run["seed"]))


def test_a_run_is_shown_beside_a_report_or_a_json(played: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    for other in ("a.html", "a.json"):
        beside = ("--against", played / other)
        fanin("sim", SCENARIO, "--seed", "4", "--report", out, *beside)
        this, that = reports.data(out)["runs"]
        assert (this["seed"], that["seed"]) == ("4", "3")
        assert this["result"]["digest"] != that["result"]["digest"]
        assert that["recording"] is not None
    alone = tmp_path / "figures.json"
    fanin("sim", SCENARIO, "--seed", "3", "--json", alone)
    fanin("sim", SCENARIO, "--seed", "4", "--report", out, "--against", alone)
    assert reports.data(out)["runs"][1]["recording"] is None, "it was not asked to record"


def test_mistakes_are_named_before_anything_is_played(tmp_path: Path) -> None:
    out, nowhere = tmp_path / "out.html", tmp_path / "none" / "out.html"
    said = fanin("sim", SCENARIO, "--report", nowhere, status=1)
    assert f"cannot write {nowhere}" in said
    said = fanin("sim", SCENARIO, "--report", out, "--against", SCENARIO, status=1)
    assert f"{SCENARIO} has no run to show beside this one" in said
    assert "--record --json OUT.json" in said
    assert "--report" in fanin("sim", SCENARIO, "--against", SCENARIO, status=2)
    assert "--json" in fanin("sim", SCENARIO, "--record", status=2)
    assert "a terminal" in fanin("sim", SCENARIO, "--watch", status=1)
    sweep = ("--sweep", "job.1.tensors=2,4", "--out", tmp_path / "sweep")
    assert f"cannot write the report {nowhere}" in fanin(
        "sim", SCENARIO, *sweep, "--report", nowhere, status=1
    )
    assert "--against is of a single run" in fanin(
        "sim", SCENARIO, *sweep, "--against", SCENARIO, status=2
    )
    assert not out.exists()


def test_a_watched_run_draws_jobs_and_links(tmp_path: Path) -> None:
    # As much as the fastest machine plays for seconds: the watcher is ended when it was seen.
    scenario = tmp_path / "long.toml"
    scenario.write_text(
        '[network]\ntopology = "rack"\nhosts = 9\n[[job]]\nname = "watched"\nsystem = "switchml"\n'
        'workers = 8\ntensor = "4MB"\ntensors = 100000\n'
    )
    main, terminal = pty.openpty()
    command = [*FANIN, "sim", str(scenario), "--watch"]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        said = b""
        try:
            while said.count(b"\x1b[J") < 2:
                said += os.read(main, 1 << 16)
        finally:
            process.kill()
    os.close(main)
    picture = said.decode().split("\x1b[J")[1]
    assert "virtual time" in picture
    assert re.search(r"watched +[█░]{24} \d+ of 100000 tensors", picture), picture
    assert re.search(r"(h\d to s0|s0 to h\d) +[█░]+ +\d+\.\d %", picture), picture


@pytest.fixture(scope="module")
def open_report() -> Iterator[Callable[[Path], Any]]:
    """A report in a headless browser. It gets nothing from any network."""
    with browsing("report.html") as opened:

        def shown(report: Path) -> Any:
            page = opened(report.as_uri(), offline=True)
            page.get_by_role("heading", name="Network", exact=True).first.wait_for()
            return page

        yield shown


def test_the_page_says_what_happened_in_the_network(open_report: Open, played: Path) -> None:
    page = open_report(played / "a.html")
    (run,) = reports.data(played / "a.html")["runs"]
    text = page.locator("main").inner_text()
    assert "Two racks, two jobs and a burst" in page.title()
    assert "fanin sim report.toml --seed 3" in text
    assert "training" in text
    assert "sums" in text
    links = run["result"]["links"]
    busiest = max(links, key=lambda link: float(link["load"]))
    assert f"busiest link was {busiest['from']} to {busiest['to']}" in text
    # The scenario has a burst that one port drops.
    page.get_by_label("Colour by").select_option("dropped")
    table = page.get_by_role("table").filter(has_text="Drops").first
    first = table.locator("tbody tr").first.inner_text()
    lossy = max(links, key=lambda link: int(link["dropped"]))
    assert f"{lossy['from']} → {lossy['to']}" in first
    assert first.endswith(f"{lossy['dropped']}")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save report.toml").click()
    assert Path(saved.value.path()).read_text() == run["toml"]


def test_two_runs_are_compared(open_report: Open, played: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    fanin("sim", SCENARIO, "--seed", "4", "--report", out, "--against", played / "a.html")
    page = open_report(out)
    this, that = reports.data(out)["runs"]
    assert page.get_by_role("heading", name="Compared").is_visible()
    text = page.locator("main").inner_text()
    assert this["result"]["digest"] in text
    assert that["result"]["digest"] in text


def test_a_sweep_is_one_report_of_all_its_runs(open_report: Open, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "sweep.html"
    options = ("--sweep", "job.1.tensors=2,4", "--seeds", "2", "--out", tmp_path / "runs")
    fanin("sim", SCENARIO, *options, "--report", out)
    shown = reports.data(out)
    assert [run["seed"] for run in shown["runs"]] == ["1", "2", "1", "2"]
    assert [point["values"] for point in shown["sweep"]["points"]] == [
        {"job.1.tensors": "2"},
        {"job.1.tensors": "4"},
    ]
    assert [run["run"] for point in shown["sweep"]["points"] for run in point["runs"]] == [
        *range(4)
    ]
    assert all(run["recording"] for run in shown["runs"])
    page = open_report(out)
    assert page.get_by_role("heading", name="Sweep").is_visible()
    assert "job.1.tensors" in page.locator("main").inner_text()


def test_a_name_with_markup_is_a_name(open_report: Open, tmp_path: Path) -> None:
    scenario, out = tmp_path / "x.toml", tmp_path / "x.html"
    title = "</script><img src=x onerror=alert(1)>"
    scenario.write_text(f"title = '{title}'\n" + SCENARIO.read_text().split("\n", 2)[2])
    fanin("sim", scenario, "--report", out)
    page = open_report(out)
    assert title in page.locator("body").inner_text()
    assert page.locator("img").count() == 0
