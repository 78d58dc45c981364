"""`fanin sim --sweep` and `--seeds`: many runs of a scenario, here and on a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fanin
import fanin_lab
import psutil
import pytest
from fanin._simulation import StoppedError
from fanin_lab.sweep import SweepError, cluster
from fanin_lab.sweep.figures import rows
from fanin_lab.sweep.parameter import Parameter, points
from fanin_lab.sweep.scenario import toml
from ranks import DEADLINE, wait_until

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SMALL = """\
title = "small"
[network]
topology = "rack"
hosts = 4
[[loss]]
loss = "1%"
[[job]]
name = "train"
system = "atp"
workers = 2
tensor = "40kB"
tensors = 3
"""


def sim(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "fanin", "sim", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def swept(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return document


def results(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "results").glob("*.json")}


def digests(out: Path) -> list[str]:
    return [run["digest"] for point in swept(out)["points"] for run in point["runs"]]


# What --sweep says.

FILE = {
    "network": {"hosts": 4},
    "job": [{"name": "a", "workers": 2}, {"workers": 2, "atp": {"window": 9}}],
}


@pytest.mark.parametrize(
    ("text", "path", "values"),
    [
        ("network.queue=100kB,1MB", ["network", "queue"], ["100kB", "1MB"]),
        ("until=10ms", ["until"], ["10ms"]),
        ("switch.aggregators=64, 128", ["switch", "aggregators"], [64, 128]),
        ("job.0.workers=1..3,8", ["job", 0, "workers"], [1, 2, 3, 8]),
        ("job.a.atp.window=3", ["job", 0, "atp", "window"], [3]),
        ("job.1.atp.window=3", ["job", 1, "atp", "window"], [3]),
        ('job.0.workers=["h0","h1"],["h2"]', ["job", 0, "workers"], [["h0", "h1"], ["h2"]]),
        ("job.0.atp={window=3},{}", ["job", 0, "atp"], [{"window": 3}, {}]),
        ('title="1, 2",3', ["title"], ["1, 2", 3]),
        ("job.0.congestion=true,false", ["job", 0, "congestion"], [True, False]),
        ("title=2026-01-01", ["title"], ["2026-01-01"]),
    ],
)
def test_a_sweep_is_a_key_and_its_values(
    text: str, path: list[str | int], values: list[Any]
) -> None:
    found = []
    for point in points(FILE, [Parameter.parse(text)]):
        value: Any = tomllib.loads(toml(point.scenario))
        for key in path:
            value = value[key]
        found.append(value)
    assert found == values
    assert FILE["network"] == {"hosts": 4}, "the file's own values stay"


def test_a_star_is_every_entry_and_sweeps_are_multiplied() -> None:
    sweeps = [Parameter.parse("job.*.workers=1,2"), Parameter.parse("network.mtu=1500,9000")]
    found = points(FILE, sweeps)
    assert [list(point.values.values()) for point in found] == [
        ["1", "1500"],
        ["1", "9000"],
        ["2", "1500"],
        ["2", "9000"],
    ]
    assert [job["workers"] for job in found[-1].scenario["job"]] == [2, 2]
    assert len({point.name for point in found}) == 4


def test_points_that_look_alike_as_files_have_names_of_their_own() -> None:
    found = points(FILE, [Parameter.parse('title="a/b","a:b",a_b')])
    assert len({point.name for point in found}) == 3
    assert not any("/" in point.name for point in found)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["network.queue"], "write a key of the scenario file and its values"),
        (["=3"], "write a key"),
        (["network..queue=3"], "write a key"),
        (["network.queue=1,"], "a value is empty"),
        (["network.queue=1,1"], "1 is there twice"),
        (["job.0.workers=8..1"], "counts upwards"),
        (["until=1s", "until=2s"], "swept twice"),
        (["job.2.workers=1"], r"the file has 2 of \[\[job\]\], numbered from 0"),
        (["job.b.workers=1"], r"no \[\[job\]\] is called b; give its number"),
        (["loss.0.loss=1%"], r"the file has no \[\[loss\]\]"),
        (["network.hosts.more=1"], "network.hosts is no table"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_reason(texts: list[str], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        points(FILE, [Parameter.parse(text) for text in texts])


def test_a_key_that_is_none_is_told_as_the_scenario_file_tells_it(
    small: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = sim(small, "--sweep", "job.train.atp.windw=3,4", "--out", out)
    assert ended.returncode == 1
    assert "unknown key `windw`; did you mean `window`?" in ended.stderr
    place, line, *_ = ended.stderr.removeprefix("fanin sim: ").split(":")
    assert Path(place).read_text().splitlines()[int(line) - 1] == "windw = 3"
    assert not results(out)
    ended = sim(small, "--sweep", "job.train.workers=2,40", "--out", out)
    assert "40 workers, and only 4 hosts" in ended.stderr
    assert not results(out), "all points are looked at before any is played"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "2"], "give --sweep or --seeds as well"),
        (["--seeds", "0"], "at least 1"),
        (["--seeds", "2", "--json", "x"], "--json is of a single run"),
        (["--seeds", "2", "--pcap=x"], "--pcap is of a single run"),
        (["--sweep", "until=1s", "--plots"], "--plots"),
        (["--seeds", "2", "--ray", ""], "--ray needs the address of a cluster"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    small: Path, arguments: list[str], message: str
) -> None:
    ended = sim(small, *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "fanin sim --help" in ended.stderr


def test_help_is_one_for_a_run_and_for_many(small: Path) -> None:
    for arguments in (["--help"], [small, "--sweep", "until=1s", "--help"]):
        ended = sim(*arguments)
        assert ended.returncode == 0
        for option in ("--sweep", "--seeds", "--jobs", "--out", "--ray", "--pcap"):
            assert option in ended.stdout


# What comes of it.


def test_what_is_not_counted_or_not_over_is_no_figure() -> None:
    times = {"count": 2, "mean_s": 0.002, "p99_s": 0.003}
    job = {
        "name": "a",
        "aggregation_gbps": 9.0,
        "measurement": {"enough": False},
        "training": None,
        "tensor_times": times,
        "retransmissions": None,
        "finished": False,
        "finished_s": None,
    }
    over = {**job, "retransmissions": 4, "finished": True, "finished_s": 0.5}
    drops = [{"count": 3}, {"count": 4}]
    report = {"jobs": [job, over], "parameter_servers": [], "background": [], "drops": drops}
    first, second = rows(report)
    same = {"gbps": 9.0, "time_mean_ms": 2.0, "time_p99_ms": 3.0, "dropped": 7}
    assert first.figures == same
    assert second.figures == {**same, "sent_again": 4, "ended_ms": 500.0}
    assert not first.enough


SWEEP = ("--sweep", "job.train.atp.window=4,8", "--sweep", "network.queue=100kB,1MB")


def test_a_table_a_file_and_a_plot_come_of_every_combination(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = sim(small, *SWEEP, "--seeds", "2", "--out", out)
    assert ended.returncode == 0, ended.stderr
    head, *lines = ended.stdout.splitlines()
    for column in ("job.train.atp.window", "network.queue", "Gbit/s", "99 % ms", "sent again"):
        assert column in head
    assert [line.split()[:3] for line in lines[:4]] == [
        ["4", "100kB", "train"],
        ["4", "1MB", "train"],
        ["8", "100kB", "train"],
        ["8", "1MB", "train"],
    ]
    assert "medians of 2 seeds, least and most in brackets" in ended.stdout
    assert (out / "sweep.png").read_bytes().startswith(SIGNATURE)
    document = swept(out)
    assert document["seeds"] == [1, 2]
    assert document["sweep"]["network.queue"] == ["100kB", "1MB"]
    assert len(document["points"]) == 4
    [row] = document["points"][0]["rows"]
    of_seeds = [run["rows"][0]["gbps"] for run in document["points"][0]["runs"]]
    assert row["gbps"]["median"] == pytest.approx(sum(of_seeds) / 2)
    assert row["gbps"]["interval"] == sorted(of_seeds)
    assert len(set(digests(out))) >= 4, "windows and seeds matter"


def test_runs_at_a_time_alone_and_one_by_one_give_the_same_bytes(
    small: Path, tmp_path: Path
) -> None:
    many, few = tmp_path / "many", tmp_path / "few"
    for out, jobs in ((many, "4"), (few, "1")):
        ended = sim(small, *SWEEP, "--jobs", jobs, "--out", out)
        assert ended.returncode == 0, ended.stderr
    assert len(results(many)) == 4
    assert results(many) == results(few)
    [scenario, *_] = sorted((many / "scenarios").iterdir())
    single = tmp_path / "single.json"
    assert sim(scenario, "--seed", "1", "--json", single).returncode == 0
    assert single.read_bytes() == results(many)[f"{scenario.stem}.json"]


def test_seeds_alone_play_the_file_as_it_is(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = sim(small, "--seeds", "6", "--seed", "3", "--out", out)
    assert ended.returncode == 0, ended.stderr
    assert "medians of 6 seeds, their 95 % intervals in brackets" in ended.stdout
    assert swept(out)["seeds"] == [3, 4, 5, 6, 7, 8]
    single = tmp_path / "single.json"
    assert sim(small, "--seed", "5", "--json", single).returncode == 0
    assert single.read_bytes() in results(out).values()
    assert (out / "sweep.png").read_bytes().startswith(SIGNATURE)


def test_nodes_and_links_of_a_file_go_where_the_scenario_is_played(tmp_path: Path) -> None:
    rack = """
[[node]]
kind = "switch"
name = "s0"
[[node]]
kind = "host"
name = "h"
count = COUNT
[[link]]
link = ["h*", "s0"]
"""
    for name, count in (("four", 4), ("six", 6)):
        (tmp_path / f"{name}.toml").write_text(rack.replace("COUNT", str(count)))
    file = tmp_path / "small.toml"
    inside = SMALL.replace('topology = "rack"\nhosts = 4', 'topology = "own"\nfile = "four.toml"')
    assert "four.toml" in inside
    file.write_text(inside)
    out = tmp_path / "out"
    ended = sim(file, "--sweep", "network.file=four.toml,six.toml", "--out", out)
    assert ended.returncode == 0, ended.stderr
    # Links are told of that carried anything; ATP's server is the last host.
    hosts = {
        frozenset(link["from"] for link in json.loads(found)["result"]["links"]) - {"s0"}
        for found in results(out).values()
    }
    assert hosts == {frozenset({"h0", "h1", "h3"}), frozenset({"h0", "h1", "h5"})}
    for scenario in (out / "scenarios").glob("*.toml"):
        assert sim(scenario).returncode == 0, "it needs no file beside it"
    ended = sim(file, "--seeds", "2", "--out", tmp_path / "seeds")
    assert ended.returncode == 0, ended.stderr
    lost = sim(file, "--sweep", "network.file=fuor.toml", "--out", out)
    assert lost.returncode == 1
    assert "cannot read" in lost.stderr
    assert "fuor.toml" in lost.stderr


def test_flows_have_rows_as_jobs_have(tmp_path: Path) -> None:
    file = tmp_path / "flows.toml"
    flow = 'from = "h0"\nto = "h1"\nkind = "tcp"\nsize = "50kB"\ncount = 3\nevery = "20us"\n'
    file.write_text(
        f'until = "5ms"\n[network]\ntopology = "rack"\nhosts = 2\n[[background]]\n{flow}'
    )
    ended = sim(file, "--sweep", "background.0.size=50kB,500kB", "--out", tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    short, long = (point["rows"][0] for point in swept(tmp_path / "out")["points"])
    assert short["name"] == "h0 to h1"
    assert short["time_mean_ms"]["median"] < long["time_mean_ms"]["median"]


def test_what_was_played_is_not_played_again(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert sim(small, *SWEEP, "--out", out).returncode == 0

    def played() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (out / "results").glob("*.json")}

    before = played()
    [gone, *_] = (out / "results").glob("*.key")
    gone.unlink()  # as where it was stopped
    more = ("--sweep", "job.train.atp.window=4,8,16", "--sweep", "network.queue=100kB,1MB")
    assert sim(small, *more, "--out", out).returncode == 0
    after = played()
    again = {name for name in before if after[name] != before[name]}
    assert again == {f"{gone.stem}.json"}
    assert len(after) == 6
    small.write_text(SMALL.replace("1%", "2%"))
    assert sim(small, *SWEEP, "--out", out).returncode == 0
    assert all(played()[name] != after[name] for name in before), "another scenario"


def test_runs_that_fail_are_named_with_the_command_that_shows_it_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    file, out = tmp_path / "faults.toml", tmp_path / "out"
    fault = 'at = "1us"\nkind = "link-fails"\nlink = ["h0", "s0"]\ndown = "1us"\n'
    file.write_text(f'stall = "1s"\n{SMALL}[[fault]]\n{fault}')
    sweeps = ("--sweep", "fault.0.down=2us,5s", "--sweep", "until=20us,10s")
    for _ in ("played", "resumed"):
        ended = sim(file, *sweeps, "--out", out)
        assert ended.returncode == 1
        assert "3 runs failed" in ended.stderr
        assert "fault.0.down=5s until=10s seed 1: " in ended.stderr
        assert "no progress" in ended.stderr
        assert "fault.0.down=2us until=20us seed 1: the run ended at" in ended.stderr
        assert ended.stdout.splitlines()[2].split()[:3] == ["2us", "10s", "train"]
        assert ended.stdout.splitlines()[2].endswith("0 of 1")
        assert "1 of 1" in ended.stdout.splitlines()[4]
    commands = [line.removeprefix("replay: ") for line in ended.stderr.splitlines()]
    replays = [shlex.split(line) for line in commands if line.startswith("fanin sim /")]
    assert len(replays) == 3
    for line in replays:
        again = sim(*line[2:])
        assert again.returncode == 1
        assert again.stderr.splitlines()[0].removeprefix("fanin: ")[:20] in ended.stderr
    wrong = [run["wrong"] for point in swept(out)["points"] for run in point["runs"]]
    assert [one is None for one in wrong] == [False, True, False, False]


def test_a_sweep_of_which_all_fails_has_a_table_nevertheless(small: Path, tmp_path: Path) -> None:
    fault = 'at = "1us"\nkind = "link-fails"\nlink = ["h0", "s0"]\ndown = "5s"\n'
    small.write_text(f'stall = "10ms"\n{SMALL}[[fault]]\n{fault}')
    ended = sim(small, "--seeds", "2", "--out", tmp_path / "out")
    assert ended.returncode == 1
    assert "2 runs failed" in ended.stderr
    assert ended.stdout.splitlines()[1].split() == ["2", "of", "2"]
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(SIGNATURE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_ends_its_processes(
    small: Path, tmp_path: Path, number: signal.Signals
) -> None:
    small.write_text(SMALL.replace("tensors = 3\n", "").replace("title", 'until = "1000s"\ntitle'))
    line = [sys.executable, "-m", "fanin", "sim", str(small), "--seeds", "3", "--jobs", "2"]
    with subprocess.Popen([*line, "--out", str(tmp_path / "out")], stderr=subprocess.PIPE) as sweep:
        children = psutil.Process(sweep.pid).children
        wait_until(lambda: len(children()) == 2, "two simulations run")
        running = children()
        sweep.send_signal(number)
        _, said = sweep.communicate(timeout=DEADLINE)
        assert sweep.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert (b"the same command goes on" in said) == (number == signal.SIGINT)
        _, alive = psutil.wait_procs(running, timeout=DEADLINE)
        assert not alive
    assert not results(tmp_path / "out")


# On a cluster.

NODES = """
import os, sys, tempfile
# Its sockets lie there, whose names must be short.
with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
    # temp_dir is not enough: Ray writes the address to /tmp/ray then, and ends where that is not.
    os.environ["RAY_TMPDIR"] = folder
    from ray.cluster_utils import Cluster
    head = {"include_dashboard": False, "num_cpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()
"""


SEEDS = ("--sweep", "job.train.atp.window=4,8", "--seeds", "2")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes of one core each, on this machine."""
    command = [sys.executable, "-c", NODES]
    # Ray gives its workers the lowest share of a busy processor (niceness 15), else.
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as nodes:
        assert nodes.stdout is not None
        address = nodes.stdout.readline().strip()
        assert address, "the cluster did not start"
        yield address
        belonging = psutil.Process(nodes.pid).children(recursive=True)
        nodes.communicate(timeout=DEADLINE)
        _, alive = psutil.wait_procs(belonging, timeout=DEADLINE)
        assert not alive, "something of the cluster is left"


def test_a_cluster_of_two_nodes_finds_the_same(small: Path, tmp_path: Path, two_nodes: str) -> None:
    # What is over before the second node has started a process is all played by the first.
    # More do not end before the scenario does.
    for tensors in (5_000, 20_000, 40_000):
        small.write_text(f'payload = "sample"\n{SMALL}'.replace("= 3\n", f"= {tensors}\n"))
        there = tmp_path / f"there-{tensors}"
        ended = sim(small, *SEEDS, "--out", there, "--ray", two_nodes)
        assert ended.returncode == 0, ended.stderr
        if "4 runs on 2 nodes of the cluster" in ended.stdout:
            break
    else:
        pytest.fail(f"one node played all: {ended.stdout}")
    here = tmp_path / "here"
    assert sim(small, *SEEDS, "--out", here).returncode == 0
    assert len(set(digests(here))) == 4
    assert digests(there) == digests(here)
    assert results(there) == results(here)
    ended = sim(small, *SEEDS, "--out", there, "--ray", two_nodes)
    assert "0 runs on 0 nodes" in ended.stdout, "they were played"


def test_what_fails_on_a_cluster_is_named_as_it_is_here(
    small: Path, tmp_path: Path, two_nodes: str
) -> None:
    out = tmp_path / "out"
    ended = sim(small, "--sweep", "until=20us,10s", "--out", out, "--ray", two_nodes)
    assert ended.returncode == 1
    assert "1 runs failed" in ended.stderr
    assert "until=20us seed 1: the run ended at 0.000020 s with unfinished jobs" in ended.stderr


def test_a_node_with_another_build_is_refused(
    small: Path, tmp_path: Path, two_nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = tmp_path / "another"
    here = Path(fanin.__file__).parent
    shutil.copytree(here, another / "fanin", ignore=shutil.ignore_patterns("__pycache__"))
    (binding,) = (another / "fanin").glob("_fanin*.so")
    with binding.open("ab") as file:
        file.write(b"another")
    # The nodes, which run already, keep what is installed.
    laboratory = Path(fanin_lab.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (another, laboratory))))
    out = tmp_path / "out"
    ended = sim(small, "--seeds", "2", "--out", out, "--ray", two_nodes)
    assert ended.returncode == 1, ended.stdout
    name = re.escape(socket.gethostname())
    assert re.search(rf"{name}/[0-9a-f]{{8}} has another build of fanin; install", ended.stderr)
    assert "every node needs the same fanin as this machine" in ended.stderr
    assert not results(out)


def test_an_address_where_no_cluster_answers_is_told_in_bounded_time(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        ended = sim(small, "--seeds", "2", "--out", tmp_path / "out", "--ray", address)
        assert ended.returncode == 1
        assert f"no Ray cluster answers at {address}" in ended.stderr
        assert "Connection refused" in ended.stderr
        listening.listen()
        monkeypatch.setattr(cluster, "ANSWER_S", 2.0)
        with pytest.raises(SweepError, match=r"answers at .* \(waited 2 s\)"):
            cluster.Cluster(address)


@pytest.mark.parametrize("ends", [False, True], ids=["never", "by itself"])
def test_a_cluster_is_left_once_nobody_waits_and_only_what_does_not_end_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    waits, submitted, seen = threading.Event(), object(), []

    def wait(
        tasks: list[object], *, num_returns: int = 1, timeout: float, fetch_local: bool = True
    ) -> tuple[list[object], list[object]]:
        if fetch_local:
            waits.set()
            threading.Event().wait(timeout)
            seen.append("waited")
            return [], tasks
        assert num_returns == len(tasks)
        return (tasks, []) if ends else ([], tasks)

    def cancel(task: object, *, force: bool) -> None:
        assert task is submitted
        assert force
        seen.append("cancelled")

    task: Any = SimpleNamespace(remote=lambda *_: submitted, options=lambda **_: task)
    ray = SimpleNamespace(
        init=lambda *_, **__: None,
        remote=lambda _: task,
        wait=wait,
        cancel=cancel,
        exceptions=SimpleNamespace(RayError=OSError),
        shutdown=lambda: seen.append("shut down"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "_answers", lambda _: None)
    place = cluster.Cluster("127.0.0.1:6379")
    with ThreadPoolExecutor() as pool:
        simulated = pool.submit(place.simulate, "small", SMALL, 1)
        assert waits.wait(DEADLINE)
        place.stop()
        with pytest.raises(StoppedError):
            simulated.result(DEADLINE)
    assert seen[-1] == "shut down"
    assert seen.count("shut down") == 1
    assert seen.count("cancelled") == (0 if ends else 1)


def test_without_ray_a_cluster_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda _: None)
    with pytest.raises(SweepError, match="pip install ray"):
        cluster.Cluster("127.0.0.1:6379")
