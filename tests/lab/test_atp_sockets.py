"""`make bench-atp`: tiny experiments that run, and the document. Nothing here is about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import atp_sockets
import pytest
import sharing
from laboratory import needs_lab
from ranks import DEADLINE

PROGRAM = Path(__file__).parents[2] / "benches" / "atp_sockets.py"


@needs_lab
def test_the_experiments_run_and_what_is_hand_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "reproduction-sockets.md"
    path.write_text(f"# Mine\n\n{atp_sockets.BEGIN}\nold\n{atp_sockets.END}\n\n## Also mine\n")
    command = [sys.executable, str(PROGRAM), "--quick", "--into", str(tmp_path)]
    done = subprocess.run(
        command, timeout=4 * DEADLINE, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert text.startswith(f"# Mine\n\n{atp_sockets.BEGIN}\n")
    assert text.endswith(f"{atp_sockets.END}\n\n## Also mine\n")
    assert "\nold\n" not in text
    written = json.loads((tmp_path / "reproduction-sockets.json").read_text())
    assert set(written["loss"]) == {system.name for system in atp_sockets.SYSTEMS}
    for of_system in written["loss"].values():
        assert [runs[0]["links"]["loss"] for runs in of_system.values()] == [0, 1e-2]
    racks = [
        run["links"]["racks"] for of_row in written["beside"].values() for run in of_row["atp"]
    ]
    assert racks == [2]
    assert set(written["sharing"]) == set(atp_sockets.WAYS)
    for of_way in written["sharing"].values():
        for share, ((_, _, both),) in of_way.items():
            assert both["aggregators"] == written["windows"] * int(share) // 100
            for figures in both["jobs"].values():
                if share == "0":
                    assert figures["at_switch"] == 0
                    assert figures["at_server"] >= sharing.WORKERS
                else:
                    assert figures["at_switch"] > 0


def test_a_job_that_ends_later_counts_only_what_it_did_beside_the_other() -> None:
    # Two ranks; calls end with the slower one, at 2, 4 and 8 s; the other job ends at 6 s.
    ends = [[2.0, 3.0, 8.0], [1.0, 4.0, 7.0]]
    assert sharing.throughput(ends, 0.0, 6.0) == pytest.approx(2.5 / 6)
    assert sharing.throughput(ends, 0.0, 8.0) == pytest.approx(3 / 8)


def test_jobs_with_static_parts_ask_processes_of_their_own_and_others_the_same() -> None:
    load = sharing.Load(rate_bps=1, elements=1, calls=1, servers=sharing.SPREAD)
    shared = load.switches
    assert shared["A"] == shared["B"]
    assert len(set(shared["A"])) == len(sharing.SPREAD)
    parts = replace(load, parts=True).switches
    assert not set(parts["A"]) & set(parts["B"])


def test_a_rank_whose_sum_is_wrong_is_named() -> None:
    class Lab:
        def popen(self, member: str, _: list[str], **pipes: Any) -> subprocess.Popen[str]:
            assert member == "w3"
            return subprocess.Popen(["echo", '{"ends": [1.0], "wrong": 7}'], **pipes)

    rank = sharing.Rank(Lab(), "10.0.0.1:4800", "B", 1)  # type: ignore[arg-type]
    with pytest.raises(sharing.SharingError, match=r"rank 1 of job B: 7 elements"):
        rank.hear()
    with pytest.raises(sharing.SharingError, match=r"rank 1 of job B ended with status 0"):
        rank.hear()
    rank.close()
