"""`make bench`: the document that it writes, from rows that run. Nothing here is about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import against
import collectives
import document
import kernels
import performance
import pytest
import rows
from document import BEGIN, END, Measured
from fanin_lab.bench import stage
from fanin_lab.bench.command import parser, resolve
from fanin_lab.bench.measure import has_switch, links_of
from fanin_lab.bench.plan import planned
from fanin_lab.netlab import NetlabError
from rows import Check, Command

PROGRAM = Path(__file__).parents[2] / "benches" / "performance.py"
WHERE = {
    "commit": "0123456789abcdef-dirty",
    "began": "2026-01-02T03:04:05+00:00",
    "machine": {
        "cpu": "a CPU",
        "cores": 2,
        "kernel": "Linux 6.1.0-mine",
        "load_average": [0.0, 0.0, 0.0],
    },
    "versions": {"fanin": "0.1.0", "python": "3.11", "torch": "2.15.0"},
}
ONE = Command("one", 2, 4_000, "--rate 1gbit")
OTHER = Command("other", 2, 4_000, "--rate 1gbit --loss 0")
BESIDE = Command("beside", 2, 4_000, "--rate 1gbit --background tcp")


def run(fanin_s: float, gloo_s: float = 1.0, digest: str = "same") -> dict[str, Any]:
    """What a command's JSON says, as far as the document reads it."""
    sample = {"digest": digest, "retransmissions": 1}
    cpu = {"ranks_cpu_s_per_gb": 1.0, "switch_cpu_s_per_gb": 1.0, "cores_a_machine": 0.5}
    found = {"samples": [sample], "bulk_bps": 600_000_000, **cpu}
    return {
        "bound_s": 0.2,
        "switch_peak_bytes": 19_000_000,
        "bulk_alone_bps": 900_000_000,
        "links": {"rate_bps": 10**9},
        "backends": {
            "fanin": {"median_s": fanin_s, **found},
            "alone": {"median_s": fanin_s / 2, **found},
            "gloo": {"median_s": gloo_s, **found},
        },
    }


def program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--into", str(folder), *arguments]
    return subprocess.run(command, timeout=280, check=False, capture_output=True, text=True)


def test_every_row_runs_and_what_is_hand_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    path.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\n## Also mine\n")
    done = program(tmp_path, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert text.startswith(f"# Mine\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\n## Also mine\n")
    assert "\nold\n" not in text
    written = json.loads((tmp_path / "performance.json").read_text())
    assert len(written["checks"]) == len(rows.CHECKS)
    verdicts = {check["verdict"] for check in written["checks"] if check["figures"]}
    assert verdicts <= {"met", "missed"}
    for check in written["checks"]:
        assert check["figures"] or check["verdict"].startswith("skipped: ")
    (ran,) = written["rounds"]
    commands = rows.commands(rows.quick(rows.CHECKS)) + [row.quick() for row in rows.FAST]
    for command in commands:
        assert f"| {command.what} |" in text
        assert command.links or command.what in ran
    assert (tmp_path / "performance.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_document_without_marks_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    path.write_text("# All mine\n")
    done = program(tmp_path, "--quick")
    assert done.returncode == 1
    assert "the marks are missing" in done.stderr
    assert path.read_text() == "# All mine\n"


def test_without_root_the_laboratory_rows_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse() -> None:
        raise NetlabError("needs root")

    def bench(arguments: Any, **_: Any) -> Any:
        assert "--rate" not in arguments
        return {"runs": [run(0.1)]}

    monkeypatch.setattr(performance, "require_root", refuse)
    monkeypatch.setattr(performance, "bench", bench)
    checks = [Check(ONE, 1.1, "bound"), Check(Command("third", 2, 4_000), 2.0, "gloo")]
    measured = Measured(where=WHERE, checks=checks, quick=True)
    performance._measure(measured, tmp_path)
    assert [measured.verdict(check) for check in checks] == ["skipped: needs root", "met"]
    assert "| skipped: needs root |" in document.generated(measured)


def test_a_row_whose_option_is_not_there_is_skipped_and_names_it() -> None:
    command = Command("new", 2, 4_000, options="--unheard-of 1")
    assert performance._missing(command, "--workers --size --repeat") == (
        "fanin bench allreduce has no --unheard-of"
    )
    assert performance._missing(Command("old", 2, 4_000), "--workers --size --repeat") is None


def test_a_row_without_offload_is_skipped_where_no_tool_turns_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def require_tools(*tools: str) -> None:
        if "ethtool" in tools:
            raise NetlabError("missing: ethtool")

    monkeypatch.setattr(performance, "require_root", lambda: None)
    monkeypatch.setattr(performance, "require_tools", require_tools)
    usage = "--workers --size --repeat --rate --no-udp-offload --baseline"
    assert performance._missing(rows.UNCUT, usage) == "missing: ethtool"
    assert performance._missing(rows.CUT, usage) is None


def test_cpu_time_is_held_against_gloo_or_another_row() -> None:
    against_gloo = Check(ONE, 1.15, "gloo", cpu=True)
    found = {ONE: run(0.1), OTHER: run(0.1)}
    found[ONE]["backends"]["fanin"]["ranks_cpu_s_per_gb"] = 0.25
    # fanin's CPU time includes that of its switches.
    assert against_gloo.figure(found) == pytest.approx(1.25)
    assert against_gloo.asked() == "at most 1.15 times Gloo's CPU s/GB"
    assert (against_gloo.met(1.15), against_gloo.met(1.16)) == (True, False)
    against_other = Check(ONE, 1.0, OTHER, "the other's", cpu=True)
    assert against_other.figure(found) == pytest.approx(1.25 / 2)
    assert against_other.asked() == "at most 1 times the other's CPU s/GB"
    assert against_other.needs() == [OTHER, ONE]


def test_tcp_and_fanin_each_keep_their_share() -> None:
    found = {ONE: run(0.2)}
    tcp, ours = Check(ONE, 0.4, "tcp"), Check(ONE, 0.4, "alone")
    assert tcp.figure(found) == pytest.approx(0.6)
    assert ours.figure(found) == pytest.approx(0.5)
    assert tcp.asked() == "TCP has at least 40% of the link"
    assert ours.asked() == "fanin keeps at least 40% of its rate"
    for check in (tcp, ours):
        assert (check.met(0.39), check.met(0.4)) == (False, True)
    assert BESIDE.links.endswith("--background tcp")
    measured = Measured(WHERE, [Check(BESIDE, 0.4, "tcp")], rounds=[{BESIDE: run(0.2)}])
    measured.kernels_broken = "skipped: a test"
    text = document.generated(measured)
    line = "| beside | 900mbit | 600mbit | 600mbit | 100.0 ms | 200.0 ms |"
    assert line in text


def test_sums_with_a_loss_bound_are_held_against_those_without() -> None:
    lossy = Command("lossy", 2, 4_000, "--rate 1gbit --loss 1%", "--loss-bound 0.04")
    found = run(0.2, 0.5)
    for name, p99_s in (("fanin", 0.4), ("gloo", 0.8)):
        found["backends"][name]["p99_s"] = p99_s
    found["backends"]["bounded"] = {"median_s": 0.1, "p99_s": 0.3, "lost_share": 0.01}
    median, tail = (Check(lossy, 0.5, "reliable", p99=p99) for p99 in (False, True))
    assert median.figure({lossy: found}) == pytest.approx(0.5)
    assert tail.figure({lossy: found}) == pytest.approx(0.75)
    assert (tail.met(0.5), tail.met(0.51)) == (True, False)
    assert tail.asked() == "with the bound, at most 0.5 times the 99th percentile without"
    assert median.asked() == "with the bound, at most 0.5 times the median without"
    measured = Measured(WHERE, [tail], rounds=[{lossy: found}], kernels_broken="skipped: a test")
    text = document.generated(measured)
    times = "100.0 ms | 300.0 ms | 200.0 ms | 400.0 ms | 500.0 ms | 800.0 ms"
    assert f"| lossy | {times} | 1.00% |" in text
    measured.broken[lossy] = "skipped: needs root"
    assert "With a loss bound" not in document.generated(measured)


def test_what_goat_brings_where_ranks_are_late_is_what_its_program_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(performance, "no_laboratory", lambda *_: None)
    monkeypatch.setattr(performance, "_output", lambda said: f"{said[2:3]}: fast\ngoat takes 0.9\n")
    measured = Measured(WHERE, [], kernels_broken="skipped: a test")
    performance._late(measured, lambda _: None)
    said = document.generated(measured)
    assert "`python benches/goat.py`:\n\n- []: fast\n- goat takes 0.9\n" in said
    jobs = "`python benches/goat.py --jobs 3 --own-link --steps 8`"
    assert f"{jobs}:\n\n- ['--jobs']: fast\n- goat takes 0.9\n" in said
    monkeypatch.setattr(performance, "no_laboratory", lambda *_: "needs root")
    performance._late(measured, lambda _: None)
    assert "`python benches/goat.py`: skipped: needs root." in document.generated(measured)


def test_links_above_a_gigabit_say_how_many_cores_they_need() -> None:
    fast = Command("fast", 2, 4_000, "--rate 10gbit")
    measured = Measured(WHERE, [], fast=[fast], rounds=[{fast: run(0.4 * rows.HEADERS, 0.2)}])
    measured.kernels_broken = "skipped: a test"
    text = document.generated(measured)
    # Half of the rate, with half a core of each machine; Gloo is faster than the links here.
    assert "| fast | 50% | 0.50 | 1.00 | 105% | 0.50 | 0.48 |" in text
    assert "the 2 cores of one" in text
    measured.broken[fast] = "skipped: needs root"
    assert "Above 1 Gbit/s" not in document.generated(measured)


def test_open_mpi_has_columns_where_it_took_turns() -> None:
    found = run(0.1)
    found["backends"]["openmpi"] = {**found["backends"]["gloo"], "median_s": 0.3}
    checks = [Check(ONE, 1.0, "gloo"), Check(OTHER, 1.0, "gloo")]
    measured = Measured(WHERE, checks, rounds=[{ONE: found, OTHER: run(0.1)}])
    measured.kernels_broken = "skipped: a test"
    text = document.generated(measured)
    head = "| one | 200.0 ms | 100.0 ms | 1000.0 ms |"
    assert f"{head} 300.0 ms | 1.0 | 1.0 | 1.0 | 1.0 | 19 MB | 1 |" in text
    assert f"{head.replace('one', 'other')} - | 1.0 | 1.0 | 1.0 | - | 19 MB | 1 |" in text


def test_a_row_says_who_takes_turns() -> None:
    both = replace(ONE, peers="gloo,openmpi").arguments()
    assert both == [*ONE.arguments(), "--baseline", "gloo,openmpi"]
    assert parser().parse_args(both).baseline == ("gloo", "openmpi")
    for check in rows.CHECKS:
        peers = parser().parse_args(check.command.arguments()).baseline
        assert check.against != "gloo" or "gloo" in peers


def test_a_command_that_fails_says_why_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def bench(arguments: list[str], **_: Any) -> Any:
        if "40KB" in arguments:
            raise performance.FailedError("rank 1 died")
        return {"runs": [run(0.1)]}

    monkeypatch.setattr(performance, "bench", bench)
    checks = [
        Check(Command("bad", 2, 40_000), 2.0, "gloo"),
        Check(Command("good", 2, 4_000), 2.0, "gloo"),
    ]
    measured = Measured(where=WHERE, checks=checks, quick=True)
    performance._measure(measured, tmp_path)
    assert [measured.verdict(check) for check in checks] == ["failed: rank 1 died", "met"]


def test_verdicts_are_of_the_median_over_rounds_of_what_was_compared_within_each() -> None:
    checks = [
        Check(ONE, 1.5, "bound"),
        Check(ONE, 3.0, "gloo"),
        Check(ONE, 0.5, OTHER, "the other's time"),
    ]
    # The machine grows twice as slow, and both times with it.
    found = [
        {ONE: run(0.2, 0.8), OTHER: run(0.5)},
        {ONE: run(0.4, 1.6), OTHER: run(1.0)},
        {ONE: run(0.4, 1.0), OTHER: run(0.5)},
    ]
    measured = Measured(WHERE, checks, rounds=list(found), kernels_broken="skipped: a test")
    assert measured.figures(checks[0]) == pytest.approx([1.0, 2.0, 2.0])
    assert measured.figures(checks[1]) == pytest.approx([4.0, 4.0, 2.5])
    assert measured.figures(checks[2]) == pytest.approx([0.4, 0.4, 0.8])
    assert [measured.verdict(check) for check in checks] == ["missed", "met", "met"]
    text = document.generated(measured)
    assert "commit `0123456789ab` with uncommitted changes" in text
    assert "2 cores, Linux 6.1.0, load" in text
    assert "| at least 3 times as fast as Gloo | 4.00 (2.50 to 4.00); 400.0 ms | **met** |" in text


def test_the_bounds_of_the_rows_are_the_equations_and_what_is_asked_says_which_time() -> None:
    asked = {(check.command.what, check.against): check for check in rows.CHECKS}

    def words(what: str) -> str:
        return asked[what, "bound"].asked()

    # BytePS, Eq. 6, for 8 machines at 1 Gbit/s that sum 25 MB, and k more.
    assert words("8, 1 Gbit/s, own services, 25 MB") == "at most 1.09 times the bound: 381.5 ms"
    with_headers = "at most 1.08 times the bound with headers: "
    for k, limit in ((1, "363.8 ms"), (2, "335.0 ms"), (4, "289.4 ms"), (8, "227.4 ms")):
        assert words(f"8, 1 Gbit/s, own services, {k} more, 25 MB") == with_headers + limit
    forced = "8, 1 Gbit/s, one switch behind a link such as theirs, 25 MB"
    assert words(forced) == "at most 1.12 times the bound: 1792.0 ms"
    assert words("2 machines of 4, 1 Gbit/s, own services, 25 MB").endswith("headers: 235.8 ms")
    unequal = "4, 1 Gbit/s, one of them 500 Mbit/s, 1 more of 2.5 Gbit/s, 25 MB"
    assert words(unequal) == "at most 1.1 times the bound: 440.0 ms"


def test_the_bound_of_a_row_is_that_of_the_plan_that_its_bench_is_held_to() -> None:
    for command in {check.command for check in rows.CHECKS if check.against == "bound"}:
        args = parser().parse_args(command.arguments())
        resolve(args)
        links = links_of(args)
        assert links is not None
        lab = stage.laboratory(command.workers // args.ranks_per_machine, links)
        machines = stage.cluster(lab, args.settings, has_switch(args))
        assert machines is not None
        plan = planned(machines, command.size_bytes, args.settings.plan)
        assert plan.time_s == pytest.approx(command.bound_s()), command.what


def test_what_allows_for_headers_is_held_to_the_bound_with_them() -> None:
    check = Check(ONE, 1.08, "bound", headers=True)
    assert check.figure({ONE: run(0.2 * 1.08 * 1482 / 1408)}) == pytest.approx(1.08)
    assert replace(check, headers=False).figure({ONE: run(0.216)}) == pytest.approx(1.08)


def test_other_bits_are_no_success_however_fast() -> None:
    check = Check(ONE, 2.0, OTHER, "the other's time", same_bits=True)
    found = {ONE: run(0.1), OTHER: run(0.2)}
    assert Measured(where=WHERE, checks=[check], rounds=[found]).verdict(check) == "met"
    found[ONE] = run(0.1, digest="another")
    measured = Measured(where=WHERE, checks=[check], rounds=[found])
    assert measured.verdict(check) == "missed: other bits"
    trusting = replace(check, same_bits=False)
    assert measured.verdict(trusting) == "met"


def test_the_kernels_table_is_what_cargo_bench_prints_last() -> None:
    printed = """
kernels/memcpy/before   time:   [1.0 ms 1.1 ms 1.2 ms]

kernel                                   GB/s  share of memcpy
memcpy/before                           27.50             98 %
Avx2/path_f32_train/352                 23.10             84 %
Scalar/path_f32_train/352                2.00              7 %
memcpy/after                            28.00            100 %
"""
    found = kernels.parse(printed)
    assert [kernel.memcpy_percent for kernel in found] == [98, 84, 7, 100]
    measured = Measured(where=WHERE, checks=[], kernels=found)
    text = document.generated(measured)
    assert "28 GB/s" in text
    assert "| kernel | elements a block | Avx2 | Scalar |" in text
    assert "| `path_f32_train` | 352 | 84 | 7 |" in text
    with pytest.raises(ValueError, match="no table"):
        kernels.parse("kernels/memcpy/before   time:   [1.0 ms 1.1 ms 1.2 ms]")


def test_two_checkouts_take_turns_and_the_ratio_within_a_round_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for tree in (here, there):
        (tree / ".venv" / "bin").mkdir(parents=True)
        (tree / ".venv" / "bin" / "fanin").touch()
    asked: list[str] = []
    # In the second round the machine takes twice as long, for both.
    times = {"there": [0.1, 0.2, 0.1], "here": [0.2, 0.4, 0.2]}

    def bench(_: list[str], fanin: list[str]) -> dict[str, Any]:
        asked.append(Path(fanin[0]).parents[2].name)
        whole = run(times[asked[-1]].pop(0))
        whole["backends"]["fanin"]["ranks_cpu_s_per_gb"] = {"there": 1.0, "here": 5.0}[asked[-1]]
        return {"runs": [whole]}

    monkeypatch.setattr(performance, "bench", bench)
    monkeypatch.setattr(performance, "ROOT", here)
    command = ["against.py", str(there), "--only", "4, loopback, 25 MB", "--rounds", "3"]
    monkeypatch.setattr(sys, "argv", command)
    assert against.main() == 0
    assert asked == ["there", "here", "here", "there", "there", "here"]
    (row,) = capsys.readouterr().out.splitlines()[1:]
    line = "4, loopback, 25 MB 100.0 ms 200.0 ms 2.00 (2.00 to 2.00) 3.00 (3.00 to 3.00)"
    assert " ".join(row.split()) == line


def test_the_other_collectives_have_a_table_of_their_own(tmp_path: Path) -> None:
    program = PROGRAM.with_name("collectives.py")
    done = subprocess.run(
        [sys.executable, str(program), "--quick", "--into", str(tmp_path / "page.md")],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "| allgather | 2, loopback | 4 kB |" in page
    assert collectives.BEGIN in (PROGRAM.parents[1] / "docs" / "performance.md").read_text()
