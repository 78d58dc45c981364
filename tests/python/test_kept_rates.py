"""Rates of links that were measured, kept over processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fanin import _fanin, _kept_rates, _rates, _services, errors
from fanin._cli import main
from fanin._kept_rates import LIFE, LINKS_MAX, Figure, forget, keep, read
from fanin._rates import measured
from fanin._services import Links
from places import GIGABIT, place

PLACES = [place(i, address=f"127.0.0.{i + 1}") for i in range(2)]
NAMES = ["m0 127.0.0.1", "m1 127.0.0.2"]


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rates, "_known", {})
    monkeypatch.setattr(_kept_rates, "_said", set())
    # Loopback's links, which are not measured else.
    monkeypatch.setattr(_rates, "untold", lambda _: [0, 1])


def figure(rate: int = GIGABIT, ago_s: float = 0) -> Figure:
    return Figure(rate, int(time.time() - ago_s))


# The file


def test_figures_are_kept_for_a_day(kept_rates: Path) -> None:
    keep({"a": figure(ago_s=LIFE - 60), "b": figure(ago_s=LIFE + 60), "c": figure(ago_s=-3600)})
    assert set(read()) == {"a"}
    keep({"d": figure(2 * GIGABIT)})
    assert {name: at.rate_bps for name, at in read().items()} == {"a": GIGABIT, "d": 2 * GIGABIT}
    assert [entry.name for entry in kept_rates.parent.iterdir()] == ["rates.json"]
    forget()
    assert read() == {}
    forget()


def test_a_link_that_could_not_be_measured_is_not_kept() -> None:
    keep({"a": figure(), "b": figure()})
    keep({"a": Figure(None, int(time.time()))})
    assert set(read()) == {"b"}


def test_the_oldest_links_leave() -> None:
    keep({f"{i}": figure(ago_s=i) for i in range(LINKS_MAX)})
    keep({"new": figure()})
    kept = read()
    assert len(kept) == LINKS_MAX
    assert "new" in kept
    assert f"{LINKS_MAX - 1}" not in kept


NOW = int(time.time())


@pytest.mark.parametrize(
    "said",
    [
        {"rate_bps": 10, "measured_at": NOW},
        {"rate_bps": 10**14, "measured_at": NOW},
        {"rate_bps": -GIGABIT, "measured_at": NOW},
        {"rate_bps": True, "measured_at": NOW},
        {"rate_bps": 1e9, "measured_at": NOW},
        {"rate_bps": GIGABIT, "measured_at": float("nan")},
        {"rate_bps": GIGABIT},
        [GIGABIT, NOW],
        None,
    ],
    # The moment is in no name: xdist's processes begin at different ones.
    ids=["slow", "fast", "negative", "true", "float", "no moment", "no time", "list", "null"],
)
def test_a_figure_that_cannot_be_is_not_taken(kept_rates: Path, said: Any) -> None:
    kept_rates.parent.mkdir(exist_ok=True)
    good = {"rate_bps": GIGABIT, "measured_at": NOW}
    kept_rates.write_text(json.dumps({"links": {"a": said, "b": good}}))
    assert read() == {"b": Figure(GIGABIT, NOW)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"links": []}',
        b'{"links": 7}',
        b"[" * 100_000,
        b" " * ((1 << 20) + 1),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_of_nonsense_is_named_once_and_replaced(
    kept_rates: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    kept_rates.parent.mkdir(exist_ok=True)
    kept_rates.write_bytes(content)
    assert read() == {}
    assert read() == {}
    (said,) = caplog.messages
    assert said.startswith(f"[fanin] {kept_rates} has no rates of links that can be read (")
    assert said.endswith("so links are measured; delete the file if it is not replaced then")
    keep({"a": figure()})
    assert set(read()) == {"a"}


@pytest.mark.parametrize("obstacle", ["a file for a folder", "a folder for the file", "a pipe"])
def test_what_cannot_be_read_or_written_raises_nothing(
    obstacle: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if obstacle == "a file for a folder":
        (tmp_path / "fanin").write_text("")
    elif obstacle == "a folder for the file":
        (tmp_path / "fanin" / "rates.json").mkdir(parents=True)
    else:
        (tmp_path / "fanin").mkdir()
        os.mkfifo(tmp_path / "fanin" / "rates.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read() == {}
    keep({"a": figure()})
    if obstacle == "a pipe":
        assert set(read()) == {"a"}
        return
    keep({"a": figure()})
    (said,) = caplog.messages
    file = tmp_path / "fanin" / "rates.json"
    assert said.startswith(f"[fanin] {file} cannot be written (")
    assert said.endswith("make its folder writable, or name another one (XDG_CACHE_HOME)")
    left = list((tmp_path / "fanin").iterdir()) if (tmp_path / "fanin").is_dir() else []
    assert left == ([file] if left else []), "no file is left half-written"


def test_a_user_without_a_home_has_no_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", homeless)
    keep({"a": figure()})
    assert read() == {}
    forget()
    assert caplog.messages == []


def test_the_file_is_in_the_home_where_no_cache_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    keep({"a": figure()})
    assert (tmp_path / ".cache" / "fanin" / "rates.json").is_file()


def _keeps(number: int, folder: str) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    for i in range(50):
        keep({f"{number} {i}": figure(), "all": figure()})


def test_processes_that_write_at_once_break_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep({"all": figure()})
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=_keeps, args=(i, str(tmp_path))) for i in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert "all" in read(), "there is a whole file at each moment"
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(read()) >= 50, "the last one's"
    assert caplog.messages == []
    assert [entry.name for entry in (tmp_path / "fanin").iterdir()] == ["rates.json"]


# Ranks that join


class Ranks:
    """Rank 0 of two, whose links carry `rate_bps`, and what the other one says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.rate_bps: int = GIGABIT
        monkeypatch.setattr(_rates, "PHASE", 0.0)
        monkeypatch.setattr(_fanin, "fill", lambda *_: self.rate_bps)
        self.other_reads_the_same = True
        self.rounds: list[str] = []

    def join(self, *, anew: bool = False) -> Links:
        """Join as a new process does, unless the group is planned anew."""
        if not anew:
            self.monkeypatch.setattr(_rates, "_known", {})
        self.rounds.clear()

        def gather(name: str, text: str) -> list[str]:
            self.rounds.append(name)
            if name == "rates known":
                return [text, text if self.other_reads_the_same else "0123456789abcdef 7"]
            flow = [1, 0, self.rate_bps, "" if self.rate_bps else "no answer"]
            return [text, "{}" if name == "gauges" else json.dumps([flow])]

        found = measured(PLACES, 0, "127.0.0.1", _fanin.Trust(), gather, anew)
        assert found is not None
        return found.links

    @property
    def measured(self) -> bool:
        return self.rounds == ["rates known", "gauges", "rates 0"]


def test_the_next_process_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    first = ranks.join()
    assert ranks.measured
    again = ranks.join()
    assert ranks.rounds == ["rates known"]
    assert again.machines == first.machines == [GIGABIT] * 2
    # Later groups know it, whatever becomes of the file.
    assert set(_rates._known) == set(NAMES)


def test_ranks_whose_files_differ_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.join()
    ranks.other_reads_the_same = False
    ranks.join()
    assert ranks.measured


def test_what_is_planned_anew_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.join()
    ranks.rate_bps *= 3
    assert ranks.join(anew=True) == Links([3 * GIGABIT] * 2, [])
    assert ranks.measured
    assert {at.rate_bps for at in read().values()} == {3 * GIGABIT}
    assert ranks.join().machines == [3 * GIGABIT] * 2
    assert ranks.rounds == ["rates known"]


def test_a_failure_is_measured_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any) -> int:
        raise OSError("no answer")

    ranks = Ranks(monkeypatch)
    ranks.join()
    assert set(read()) == set(NAMES)
    ranks.rate_bps = 0
    monkeypatch.setattr(_fanin, "fill", silent)
    ranks.join(anew=True)
    assert ranks.join().machines == [None, None]
    # As no link was measured, all were tried twice.
    assert ranks.rounds == ["rates known", "gauges", "rates 0", "rates 1"]
    assert read() == {}


def test_only_a_machine_s_first_rank_writes(
    monkeypatch: pytest.MonkeyPatch, kept_rates: Path
) -> None:
    monkeypatch.setattr(_fanin, "fill", lambda *_: GIGABIT)
    places = [PLACES[0], PLACES[0], PLACES[1]]

    flows = json.dumps([[0, 1, GIGABIT, ""], [1, 0, GIGABIT, ""]])

    def gather(name: str, _: str) -> list[str]:
        return {"rates known": [""] * 3, "gauges": ["{}"] * 3}.get(name, [flows, "[]", "[]"])

    for rank in range(3):
        monkeypatch.setattr(_rates, "_known", {})
        kept_rates.unlink(missing_ok=True)
        measured(places, rank, "127.0.0.1", _fanin.Trust(), gather)
        assert kept_rates.exists() == (rank != 1)


@pytest.mark.parametrize(
    ("ago_s", "said"),
    [
        (0, "measured, 1 Gbit/s"),
        (150, "measured 2 min ago, 1 Gbit/s"),
        (3 * 3600 + 60, "measured 3 h ago, 1 Gbit/s"),
    ],
    ids=str,
)
def test_a_plan_says_how_old_figures_are(
    monkeypatch: pytest.MonkeyPatch, ago_s: int, said: str
) -> None:
    # The newer one does not count.
    keep({NAMES[0]: figure(ago_s=ago_s), NAMES[1]: figure(ago_s=ago_s // 2)})
    planned = _services.split(PLACES, Ranks(monkeypatch).join())
    assert planned is not None
    assert planned.links == f"all links were {said}"


def test_the_rest_is_kept_where_a_switch_opens_no_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> tuple[int, int]:
        raise errors.FaninError("no port is open there")

    said: dict[str, Any] = {"switches": ["10.0.1.1:4800"], "switch_rates": [None]}
    places = [replace(each, **said) for each in PLACES]
    monkeypatch.setattr(_rates, "untold", lambda _: [0, 1, 2])
    monkeypatch.setattr(_rates, "PHASE", 0.0)
    monkeypatch.setattr(_fanin, "gauge_at", refuses)
    monkeypatch.setattr(_fanin, "fill", lambda *_: GIGABIT)

    def gather(name: str, text: str) -> list[str]:
        other = {"rates known": "", "gauges": "{}", "rates 0": json.dumps([[1, 0, GIGABIT, ""]])}
        return [text, other.get(name, "[]")]

    found = measured(places, 0, "127.0.0.1", _fanin.Trust(), gather)
    assert found is not None
    assert found.links.switches == [None]
    assert set(read()) == set(NAMES)


# The doctor


def test_the_doctor_has_ranks_measure_anew(
    caplog: pytest.LogCaptureFixture, switch: str, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    keep({"a": figure()})
    main(["doctor", "--switch", switch])
    assert set(read()) == {"a"}
    main(["doctor", "--switch", switch, "--measure"])
    assert read() == {}
    assert "arrive at" in capfd.readouterr().out
