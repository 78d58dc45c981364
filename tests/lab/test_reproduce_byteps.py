"""`fanin reproduce byteps`: the figures of the BytePS paper (OSDI 2020), and what it claims."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
from fanin import _fanin
from fanin_lab.papers import ReproduceError
from fanin_lab.papers.byteps import equations, goodput, machine, scalability, training
from fanin_lab.papers.byteps.cluster import Cluster
from fanin_lab.papers.byteps.training import FAST, USUAL, Case, Trained, rates
from fanin_lab.papers.lab import Lab
from fanin_lab.sweep.progress import progress
from laboratory import needs_lab
from test_reproduce import SIGNATURE, findings_of, ours, reproduce


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


def test_machines_inside_are_as_in_byteps(tmp_path: Path) -> None:
    ended = reproduce("byteps", "--quick", "--only", "machine", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = findings_of(tmp_path)["machine"]
    # Whether root = all is poorer hangs on which of the paper's two rates a NIC has (100 or 90).
    disagreeing = [one["what"] for one in found if not one["agrees"]]
    assert [
        what for what in disagreeing if "root = all by" not in what and "iteration" not in what
    ] == []
    assert ours({"machine": found}, "machine", "x* of the example") == pytest.approx(0.2, abs=1e-6)
    assert ours({"machine": found}, "machine", "J_ca below J_ar") == pytest.approx(23.66, abs=0.01)
    # The machines that were asked about can be asked about again.
    assert (tmp_path / "machines" / "nvlink-100.toml").read_text().startswith("peer_rate")


def test_an_iteration_hides_communication_or_adds_it() -> None:
    assert machine.iteration(2.0, 3.0, overlap=True) == 3.0
    assert machine.iteration(2.0, 3.0, overlap=False) == 5.0


def test_table_1_of_byteps_is_what_packets_take(tmp_path: Path) -> None:
    ended = reproduce("byteps", "--quick", "--only", "communication", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = findings_of(tmp_path)
    rows = found["communication"]
    by_formula = [one["ours"]["median"] for one in rows if "the formula's" in one["what"]]
    # Short tensors: filling pipelines is some of their time, and nobody is faster than can be.
    assert len(by_formula) == 4
    assert all(0.99 < ratio < 1.2 for ratio in by_formula), by_formula
    ours_by_servers = ours(found, "communication", "gamma_p")
    assert ours_by_servers == pytest.approx(equations.by_parameter_server(8, 4), rel=0.15)
    assert (tmp_path / "communication.png").read_bytes().startswith(SIGNATURE)


def test_services_of_a_scenario_have_the_shares_of_the_plan() -> None:
    cluster = Cluster(4, 2, gbps=60.0)
    job = cluster.byteps(equations.gpu_share(4, 2), equations.cpu_share(4, 2))
    assert job["services"] == ["h0", "h1", "h2", "h3", "h4", "h5"]
    assert job["shares"] == pytest.approx([0.1] * 4 + [0.3] * 2)
    # Machines that only sum have a NIC without GPUs before it.
    scenario = cluster.play("", job)
    assert scenario["link"] == [{"link": [host, "s0"], "rate": "90Gbit"} for host in ("h4", "h5")]
    spares = ["h4", "h5", "h6", "h7"]
    assert Cluster(4, 4).byteps(0.0, 0.25)["services"] == spares
    assert Cluster(4, 4).servers(1e6)["servers"] == spares


def _lab(out: Path) -> Lab:
    with progress() as bar:
        return Lab(out, [1], 2, True, bar)


def test_the_inside_of_machines_leaves_a_ring_less_of_the_network_than_byteps(
    tmp_path: Path,
) -> None:
    lab = _lab(tmp_path)
    nvlink = rates(lab, "test", "nvlink", [(8, 0), (8, 8)])
    # Figure 8: reducing to GPU 2 leaves the NIC the limit; a ring passes P0 - CPU0 three times.
    assert nvlink[8, 0].byteps == pytest.approx(90)
    assert nvlink[8, 8].byteps == pytest.approx(90)
    assert nvlink[8, 0].ring == pytest.approx(8 * 1.75 / 0.3, rel=1e-3)
    pcie = rates(lab, "test", "pcie-only", [(8, 8)])[8, 8]
    # Eq. 9: 7/4 of the gradients over a GPU's link of 105 Gbit/s, for one over the NIC.
    assert pcie.byteps == pytest.approx(105 / 1.75)


def test_an_iteration_takes_what_is_computed_and_what_is_not_hidden(tmp_path: Path) -> None:
    usual, slow_link, alike = (
        Case("vgg16", "byteps", 2, 2, gbps, USUAL) for gbps in (90.0, 1.0, 90.0)
    )
    overlapping = Case("vgg16", "byteps", 2, 2, 1.0, USUAL, overlap=True)
    ring = Case("vgg16", "ring", 2, gbps=1.0, computing=FAST)
    trained = Trained(_lab(tmp_path), "test", [usual, slow_link, alike, overlapping, ring])
    assert trained.efficiency(usual) == pytest.approx(1, abs=0.02)
    # 64 images, 15.47 G multiply-adds each, three times two operations, 10 TFLOP/s.
    computed_s, sent_s = 6 * 64 * 15.47e9 / 1e13, 32 * 138.4e6 / 1e9
    assert trained.efficiency(slow_link) == pytest.approx(computed_s / sent_s, rel=0.15)
    assert trained.gain(overlapping, slow_link) > 1
    assert trained.gain(usual, slow_link) == pytest.approx(
        trained.efficiency(usual) / trained.efficiency(slow_link)
    )
    # A ring of two carries as much as each of two servers.
    hidden = training.unhidden_s(computed_s / 4, ring)
    assert hidden == pytest.approx(computed_s / 4 + sent_s)


@pytest.mark.parametrize("name", ["spares", "scalability"])
def test_training_on_bytepss_machines_is_compared_with_all_reduce(
    tmp_path: Path, name: str
) -> None:
    ended = reproduce("byteps", "--quick", "--only", name, "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = findings_of(tmp_path)
    for one in found[name]:
        assert one["ours"]["median"] > 0, one["what"]
    words = "k = 8 by k = 0, UGATIT" if name == "spares" else "UGATIT, of which the paper has"
    assert ours(found, name, words) > 1
    assert (tmp_path / f"{name}.png").read_bytes().startswith(SIGNATURE)


def test_reasons_are_of_rows_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without playing anything: every iteration takes a second."""

    class Alike:
        def __init__(self, *_: object) -> None: ...

        def efficiency(self, _: Case) -> float:
            return 0.5

        def gain(self, *_: Case) -> float:
            return 1.0

    def told(*asked: Any) -> dict[Any, Any]:
        return {of: training.Rates(90.0, 50.0, 84.0) for of in asked[-1]}

    def computed(*asked: Any) -> dict[Any, float]:
        return dict.fromkeys(asked[-1], 1.0)

    monkeypatch.setattr(scalability, "Trained", Alike)
    monkeypatch.setattr(training, "rates", told)
    monkeypatch.setattr(scalability, "computing_s", computed)
    lab = cast(Lab, Measured(1.0))
    rows = {one.what: one for one in scalability.run(lab).findings}
    reasons = scalability.why(lab)
    assert len(reasons) == 7
    assert {reason.of for reason in reasons} <= set(rows)
    # What is not hidden is lost, with 50 and with 90 Gbit/s.
    lost = next(one for one in reasons if "ResNet-50, all-reduce" in one.of).ours
    sent_s = 32 * 25.6e6 * 2 * 31 / 32 / 1e9
    assert lost.most == pytest.approx(100 * (1 - 1 / (1 + sent_s / 50)))
    assert lost.least == pytest.approx(100 * (1 - 1 / (1 + sent_s / 90)))


def test_a_service_sums_what_numpy_does() -> None:
    dice = numpy.random.default_rng(1)
    for dtype, kind in (("float32", numpy.float32), ("float16", numpy.float16)):
        # A whole number of packets and a part of one.
        values = dice.standard_normal((8, 5 * 704 + 64)).astype(kind)
        summed = _fanin.summed([one.tobytes() for one in values], cast(Any, dtype))
        expected = values.astype(numpy.float64).sum(0).astype(kind)
        assert numpy.array_equal(numpy.frombuffer(summed, kind), expected)
    for contributions, dtype, words in (
        ([], "float32", "0 contributions"),
        ([b""] * 65, "float32", "65 contributions"),
        ([bytes(128), bytes(256)], "float32", "as many bytes each"),
        ([bytes(100)], "float32", "multiples of 128"),
        ([bytes(128)], "int32", "one of float32"),
    ):
        with pytest.raises(ValueError, match=words):
            _fanin.summed(contributions, cast(Any, dtype))


def test_what_a_service_sums_is_measured(tmp_path: Path) -> None:
    ended = reproduce("byteps", "--quick", "--only", "summation", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert all(one["ours"]["median"] > 0 for one in findings_of(tmp_path)["summation"])


def test_without_root_figure_12_is_refused_with_what_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ReproduceError, match=r"sudo .*; without Figure 12: --only theorem"):
        goodput.run(cast(Lab, None))


class Measured:
    """A laboratory of which every figure is known."""

    quick = False
    seeds = (1, 2)

    def __init__(self, slower: float) -> None:
        self.slower = slower
        """By how much the split takes longer than it must."""

    def bench(
        self, name: str, arguments: Sequence[str], settings: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        self.settings = dict(settings or {})
        assert name.rpartition("-")[2] in ("1", "2"), "one file a round"
        said = dict(zip(arguments[::2], arguments[1::2], strict=True))
        n, k = int(said["--workers"]), int(said.get("--spares", 0))
        unit_s = 0.2 * 1482 / 1408
        own = said.get("--plan") != "switch"
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


@needs_lab
@pytest.mark.parametrize(("slower", "holds"), [(1.05, True), (1.2, False)])
def test_windows_of_one_length_are_held_to_the_optimum(slower: float, holds: bool) -> None:
    lab = Measured(slower)
    [reason] = goodput.why(cast(Lab, lab))
    assert lab.settings == {"FANIN_IN_FLIGHT": "32"}
    first = goodput.run(cast(Lab, lab)).findings[0]
    assert reason.of == first.what
    assert reason.explains(first) == holds
