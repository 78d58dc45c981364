"""The live page: what it says is what was done to a real job, in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browsing
from conftest import SwitchProcess, free_address
from fanin_lab.netlab import SWITCH, SWITCH_ADDRESS, Netlab
from laboratory import NAME, needs_lab
from programs import BY_NUMPY, BY_TORCH, Program
from ranks import wait_until

# Rank 2 computes 60 ms longer than the others. A file ends it, or ends rank 1 by SIGKILL.
TRAINS = (
    BY_NUMPY
    + """
end, kill = sys.argv[1:]
with connect(job="train<marquee>", timeout=60) as group:
    say("joined", os.getpid())
    while not os.path.exists(end):
        time.sleep(0.07 if rank == 2 else 0.01)  # how long each computes
        group.all_reduce(np.ones(300_000, np.float32))
        if rank == 1 and os.path.exists(kill):
            os.kill(os.getpid(), signal.SIGKILL)
"""
)


def state(address: str, **headers: str) -> dict[str, Any]:
    asked = urllib.request.Request(f"http://{address}/page/state?since=0", headers=headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        told: dict[str, Any] = json.loads(answer.read())
        return told


# The ranks stop at the same sum.
SUMS = (
    BY_NUMPY
    + """
with connect(job="lossy", timeout=60, machine=f"m{rank}") as group:
    say("joined")
    while group.all_reduce(np.full(300_000, os.path.exists(sys.argv[1]), np.float32))[0] == 0:
        pass
"""
)


# A step has two collectives; the ranks stop at the same one.
ON_ONE_MACHINE = (
    BY_TORCH
    + """
dist.init_process_group("fanin")
say("joined")
ends = torch.zeros(1, dtype=torch.int64)
while not ends.item():
    dist.all_reduce(torch.ones(10_000))
    ends.fill_(os.path.exists(sys.argv[1]))
    dist.all_reduce(ends)
    time.sleep(0.01)  # a step computes, and a part of its time is in no sum
dist.destroy_process_group()
"""
)


class Training:
    """Four ranks that sum at a switch until they are ended."""

    def __init__(self, folder: Path, switch: str, *, page: str | None = None) -> None:
        self.end, self.kill = folder / "end", folder / "kill"
        command = [sys.executable, "-c", TRAINS, str(self.end), str(self.kill)]
        told = {"FANIN_SWITCH": switch, "WORLD_SIZE": "4", "FANIN_RATE": "1gbit"}
        if page is not None:
            told["FANIN_PAGE"] = page
        self.ranks = [
            Program(command, told | {"RANK": str(rank), "FANIN_MACHINE": f"gpu-{rank}"})
            for rank in range(4)
        ]

    def joined(self) -> None:
        for rank in self.ranks:
            rank.line("joined")

    def ended(self) -> None:
        self.end.touch()
        for rank in self.ranks:
            rank.wait()

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()


@pytest.fixture
def switch() -> Iterator[SwitchProcess]:
    switch = SwitchProcess()
    switch.start()
    yield switch
    switch.kill()


def words(told: dict[str, Any]) -> list[str]:
    return [word["name"] for job in told["jobs"] for word in job["words"]]


def events(told: dict[str, Any]) -> list[str]:
    return [event["name"] for event in told["events"]]


def test_a_switch_tells_who_is_late_and_what_became_of_the_job(
    switch: SwitchProcess, tmp_path: Path
) -> None:
    training = Training(tmp_path, switch.address)
    try:
        training.joined()
        wait_until(lambda: "late" in words(state(switch.address)), "rank 2 is late")
        told = state(switch.address)
        (job,) = told["jobs"]
        (word,) = [word for word in job["words"] if word["name"] == "late"]
        assert re.search(r"rank 2 on gpu-2 is \d\d+ ms later than the others", word["text"]), word
        assert job["name"] == "train<marquee>"
        (total,) = job["totals"]
        assert (total["collective"], total["dtype"]) == ("all_reduce", "float32")
        assert total["bytes"] == total["count"] * 1_200_000
        late = {rank["rank"]: rank["late"]["median"] for rank in job["ranks"]}
        assert min(late, key=lambda rank: -late[rank]) == 2
        assert late[2] > 0.03
        wait_until(lambda: bool(state(switch.address)["jobs"][0]["steps"]), "steps are told")
        service = told["services"][0]
        assert service["received"] > 1e5
        training.kill.touch()
        wait_until(lambda: "job_aborted" in events(state(switch.address)), "rank 1 died")
        lost = [e["text"] for e in state(switch.address)["events"] if e["name"] == "job_aborted"]
        assert lost == ["train<marquee> ended: rank 1 was lost"]
    finally:
        training.close()


def test_rank_0_serves_a_page_about_its_own_job(tmp_path: Path) -> None:
    page = free_address()
    switches = [SwitchProcess(), SwitchProcess()]
    for one in switches:
        one.start()
    training = Training(tmp_path, ",".join(one.address for one in switches), page=page)
    try:
        training.joined()
        # Ranks sum beside the switches.
        wait_until(lambda: len(state(page)["services"]) == 6, "all services are shown")
        wait_until(
            lambda: (
                [
                    share["measured"] is not None
                    for job in state(page)["jobs"]
                    for share in job["shares"]
                ]
                == [True] * 6
            ),
            "each service's share is measured",
        )
        told = state(page)
        assert told["server"] == "rank 0 of train<marquee>"
        switches[1].kill()
        wait_until(lambda: "service_silent" in events(state(page)), "one is silent")
    finally:
        training.close()
        for one in switches:
            one.kill()


def test_ranks_that_share_one_machine_have_a_page_though_no_service_knows_them(
    tmp_path: Path,
) -> None:
    page, end = free_address(), tmp_path / "end"
    program = tmp_path / "train.py"
    program.write_text(ON_ONE_MACHINE)
    asked = ["--nproc-per-node", "3", "--page", page, str(program), str(end)]
    training = Program([sys.executable, "-m", "fanin", "run", *asked], {})
    try:
        training.line("joined")

        def steps() -> bool:
            jobs = state(page)["jobs"]
            return bool(jobs) and bool(jobs[0]["steps"]) and len(jobs[0]["sums"]) > 5

        wait_until(steps, "steps are counted")
        told = state(page)
        (job,) = told["jobs"]
        (rank,) = job["ranks"]
        assert rank["ranks"] == [0, 1, 2]
        assert (job["state"], job["world_size"], job["sums_per_step"]) == ("running", 3, 2)
        by_dtype = {total["dtype"]: total for total in job["totals"]}
        assert by_dtype["float32"]["bytes"] == 40_000 * by_dtype["float32"]["count"] > 0
        assert 0 < job["in_sums"] <= 1
        assert {tuple(ranks[0] for ranks in each["ranks"]) for each in job["sums"]} == {(0,)}
        assert [service["protocol"] for service in told["services"]] == ["memory"]
        end.touch()
        training.wait()
    finally:
        training.end()


def test_a_page_elsewhere_needs_a_token_and_a_name_of_its_own(
    switch: SwitchProcess, tmp_path: Path
) -> None:
    fanin = [sys.executable, "-m", "fanin", "page", switch.address]
    refused = subprocess.run(
        [*fanin, "--listen", "0.0.0.0:0"], check=False, capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert "--token-file" in refused.stderr
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    page = Program([*fanin, "--listen", "0.0.0.0:0", "--token-file", str(token), "--json"], {})
    try:
        address = json.loads(page.line("listening").string)["address"].replace(
            "0.0.0.0", "127.0.0.1"
        )
        wait_until(lambda: bool(state(address)["services"]), "the switch is shown")
        assert state(address)["services"][0]["address"] == switch.address
        with pytest.raises(urllib.error.HTTPError) as foreign:
            state(address, Host="evil.example")
        assert foreign.value.code == 403
        assert state(address, Host="evil.example", Authorization="Bearer 0123456789abcdef")
        in_use = subprocess.run(
            [*fanin, "--listen", address], check=False, capture_output=True, text=True
        )
        assert in_use.returncode != 0
        assert "take another port" in in_use.stderr
    finally:
        page.end()


def test_top_wants_a_terminal(switch: SwitchProcess) -> None:
    top = subprocess.run(
        [sys.executable, "-m", "fanin", "top", switch.address],
        check=False,
        capture_output=True,
        text=True,
    )
    assert top.returncode != 0
    assert "fanin status" in top.stderr


@pytest.fixture(scope="module")
def open_page() -> Iterator[Callable[..., Any]]:
    """A page in a headless browser, whose errors fail the test."""
    with browsing("page.js") as opened:
        yield lambda address, **context: opened(f"http://{address}/", **context)


def test_a_browser_shows_what_was_done_to_the_job(
    open_page: Callable[..., Any], switch: SwitchProcess, tmp_path: Path
) -> None:
    training = Training(tmp_path, switch.address)
    try:
        training.joined()
        page = open_page(switch.address)
        page.get_by_text(re.compile("rank 2 on gpu-2 is .* ms later")).first.wait_for()
        # Markup in a name is text.
        page.get_by_text("train<marquee>").first.wait_for()
        assert page.locator("marquee").count() == 0
        training.kill.touch()
        page.get_by_text("ended: rank 1 was lost").first.wait_for()
        page.context.close()
    finally:
        training.close()


@needs_lab
def test_a_browser_shows_that_a_link_loses_packets(tmp_path: Path) -> None:
    with Netlab(2, rate_bps=200_000_000, loss=0.03, name=NAME) as lab:
        # Playwright talks with the browser by pipes, which pass from one namespace to the other.
        program = tmp_path / "chromium"
        inside = f"ip netns exec {lab.namespace(SWITCH)}"
        program.write_text(f'#!/bin/sh\nexec {inside} {CHROMIUM} "$@"\n')
        program.chmod(0o755)
        command = [sys.executable, "-m", "fanin"]
        switch = Program([*inside.split(), *command, "switch", "--listen", "0.0.0.0:4800"], {})
        ranks: list[Program] = []
        end = tmp_path / "end"
        try:
            switch.line("listens")
            told = {"FANIN_SWITCH": f"{SWITCH_ADDRESS}:4800", "WORLD_SIZE": "2"}
            for rank in range(2):
                entered = ["ip", "netns", "exec", lab.namespace(f"w{rank}")]
                sums = [sys.executable, "-c", SUMS, str(end)]
                ranks.append(Program(entered + sums, told | {"RANK": str(rank)}))
            for of_rank in ranks:
                of_rank.line("joined")
            with browsing("page.js", program) as opened:
                page = opened("http://127.0.0.1:4800/")
                lossy = re.compile(r"\d\.\d % of the packets of lossy .* are sent again")
                page.get_by_text(lossy).first.wait_for()
                page.context.close()
            end.touch()
            for of_rank in ranks:
                of_rank.wait()
        finally:
            for of_rank in [*ranks, switch]:
                of_rank.end()


def test_a_phone_shows_it_without_scrolling_sideways(
    open_page: Callable[..., Any], switch: SwitchProcess, tmp_path: Path
) -> None:
    training = Training(tmp_path, switch.address)
    try:
        training.joined()
        page = open_page(
            switch.address, viewport={"width": 375, "height": 700}, color_scheme="dark"
        )
        page.get_by_text("train<marquee>").first.wait_for()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 375
        page.context.close()
        training.ended()
    finally:
        training.close()
