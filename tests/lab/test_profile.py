"""`fanin profile loss-tolerance`: what is lost, what is trained on, and what is concluded."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fanin.profile
import pytest
import torch
from fanin.profile import Metric
from fanin_lab.profiler import ProfileError
from fanin_lab.profiler.command import Profile, refuse_without_use
from fanin_lab.profiler.drops import AMONG, Among, Losses, Packets, mean_of_received
from fanin_lab.profiler.tolerance import MARGIN, bound, cost, epochs_to, verdict
from fanin_lab.profiler.trials import Training, Trials
from fanin_lab.sweep.spread import Spread

LAYERS = 10
SIZES = [700, 10, 1000, 350, 1, 349, 351, 2000, 64, 100]


def received(losses: Losses, message: torch.Tensor, seed: int = 1) -> torch.Tensor:
    packets = Packets(SIZES, range(LAYERS))
    return packets.received(message, losses, LAYERS, torch.Generator().manual_seed(seed))


def test_a_packet_has_1400_bytes_of_one_tensor() -> None:
    packets = Packets([700, 10, 351], [0, 1, 2])
    assert packets.of_element.bincount().tolist() == [350, 350, 10, 350, 1]
    halves = Packets([1400], [0], element_bytes=2)
    assert halves.of_element.bincount().tolist() == [700, 700]


@pytest.mark.parametrize(
    ("among", "sizes"), [("front", [700, 10]), ("middle", [1, 349]), ("back", [64, 100])]
)
def test_a_fifth_of_the_layers_is_lost_and_no_other(among: Among, sizes: Sequence[int]) -> None:
    first = {"front": 0, "middle": 4, "back": 8}[among]
    before = len(Packets(SIZES[:first], range(first))) if first else 0
    here = len(Packets(sizes, range(len(sizes))))
    lost = ~received(Losses(among, 1.0), torch.ones(sum(SIZES)))
    assert lost.nonzero().flatten().tolist() == list(range(before, before + here))


@pytest.mark.parametrize(("among", "at"), [("small", 0), ("medium", 4), ("large", 8)])
def test_a_fifth_of_the_packets_by_magnitude_is_lost_and_no_other(among: Among, at: int) -> None:
    packets = Packets([3500], [0])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    signs = torch.tensor([1.0, -1.0]).repeat(175)
    message = torch.cat([(1 + order[packet]) * signs for packet in range(10)])
    came = packets.received(message, Losses(among, 1.0), 1, torch.Generator().manual_seed(1))
    assert sorted(order[~came].tolist()) == [at, at + 1]


@pytest.mark.parametrize("among", AMONG)
def test_packets_are_lost_with_the_probability_and_with_none_at_all(among: Among) -> None:
    message = torch.arange(sum(SIZES), dtype=torch.float32)
    assert received(Losses(among, 0.0), message).all()
    certain = int((~received(Losses(among, 1.0), message)).sum())
    found = [int((~received(Losses(among, 0.3), message, seed)).sum()) for seed in range(400)]
    deviation = math.sqrt(0.3 * 0.7 / (400 * certain))
    assert abs(sum(found) / (400 * certain) - 0.3) < 5 * deviation


def test_the_mean_is_over_those_whose_block_came() -> None:
    total, workers_in = torch.tensor([6.0, 5.0, 0.0]), torch.tensor([3.0, 1.0, 0.0])
    assert mean_of_received(total, workers_in).tolist() == [2.0, 5.0, 0.0]


@pytest.mark.parametrize(
    ("curve", "metric", "epochs"),
    [
        ([0.5, 0.7, 0.9], "accuracy", 2.5),
        ([3.0, 2.0, 0.4], "loss", 2.75),
        ([0.9], "accuracy", 1.0),
        ([math.inf, 0.4], "loss", 2.0),
        ([math.nan, 0.9], "accuracy", 2.0),
        ([0.5, 0.79, math.nan], "accuracy", math.inf),
    ],
)
def test_epochs_are_counted_to_where_the_curve_meets_the_target(
    curve: list[float], metric: Metric, epochs: float
) -> None:
    assert epochs_to(0.8, curve, metric) == pytest.approx(epochs)


def spread(low: float, high: float) -> Spread:
    return Spread((low + high) / 2, low, high, (low, high))


def test_a_verdict_heeds_the_whole_interval_of_costs() -> None:
    assert verdict(spread(-0.5, MARGIN)) == "as without loss"
    assert verdict(spread(0, MARGIN + 0.01)) == "cannot tell"
    assert verdict(spread(MARGIN + 0.01, 1)) == "costs epochs"
    assert verdict(cost([math.inf, math.inf], [2.0, 3.0])) == "costs epochs"
    assert cost([3.0, 2.0], [2.0, 2.0]).interval == (0.0, 0.5)


def test_the_bound_is_not_raised_past_what_is_not_known() -> None:
    none, unclear, much = spread(0, 0), spread(0, 1), spread(1, 2)
    assert bound({0.1: none, 0.01: none, 0.3: much}) == (0.1, 0.3)
    assert bound({0.01: none, 0.1: unclear, 0.2: none, 0.3: much}) == (0.01, 0.3)
    assert bound({0.01: unclear}) == (0.0, math.inf)


def test_a_report_is_heard_by_nobody_in_a_script_by_itself() -> None:
    fanin.profile.report(accuracy=0.5)
    with pytest.raises(ValueError, match="either accuracy"):
        fanin.profile.report()
    with pytest.raises(ValueError, match="either accuracy"):
        fanin.profile.report(accuracy=1, loss=1)


# One step on a gradient of 1 (rank 0) or 2 (rank 1): what is left of it is written down.
ONE_STEP = """
import atexit, os, pathlib, sys, torch, fanin.profile
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ.get("RANK", "0"))
model = torch.nn.Linear(1000, 4, bias=False)
torch.nn.init.zeros_(model.weight)
trained = model
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
    trained = DistributedDataParallel(model)
    left = pathlib.Path(sys.argv[1], f"{rank}-left")
    atexit.register(lambda: left.write_text(str(torch.distributed.is_initialized())))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
seen = torch.full((1, 1000), 1.0 + rank)
for value in (0.1, 0.2):
    optimizer.zero_grad()
    loss = trained(seen).sum()
    (loss * float(sys.argv[2])).backward()
    optimizer.step()
    torch.save(model.weight.detach().clone(), f"{sys.argv[1]}/{rank}-{value}")
    fanin.profile.report(accuracy=value)
sys.exit()
"""


def one_step(tmp_path: Path, losses: Losses, processes: int | None, factor: str = "-1") -> None:
    script = tmp_path / "one_step.py"
    script.write_text(ONE_STEP)
    arguments = [str(script), str(tmp_path), factor]
    trials = Trials(arguments, processes, target=1.0, jobs=1, out=tmp_path / "out")
    training = trials.run(losses, seed=3)
    assert training.curve == [0.1, 0.2]
    assert training.epochs == math.inf
    assert training.sent == 2 * 12


def packets_of(file: Path) -> list[float]:
    """The value of each packet, which is one for all of it."""
    weights = torch.load(file).flatten()
    found = [torch.unique(part) for part in torch.split(weights, 350)]
    assert [len(values) for values in found] == [1] * 12
    return [float(values) for values in found]


def test_what_the_only_worker_loses_is_no_step(tmp_path: Path) -> None:
    one_step(tmp_path, Losses("all", 0.5), None)
    assert set(packets_of(tmp_path / "0-0.1")) == {0.0, 1.0}
    assert set(packets_of(tmp_path / "0-0.2")) == {0.0, 1.0, 2.0}


def test_without_loss_a_script_trains_as_by_itself(tmp_path: Path) -> None:
    one_step(tmp_path, Losses(), None)
    assert packets_of(tmp_path / "0-0.2") == [2.0] * 12


def test_what_is_lost_is_gone_also_where_it_is_no_number(tmp_path: Path) -> None:
    one_step(tmp_path, Losses("all", 1.0 - 1e-9), None, "nan")
    assert packets_of(tmp_path / "0-0.2") == [0.0] * 12


SEEDS = """
import random, numpy, torch, fanin.profile
drawn = [random.random(), numpy.random.random(), float(torch.rand(()))]
for seed in (torch.manual_seed, torch.random.manual_seed, random.seed, numpy.random.seed):
    seed(7)
drawn += [random.random(), numpy.random.random(), float(torch.rand(()))]
weight = torch.ones(1, requires_grad=True)
weight.grad = torch.ones(1)
torch.optim.SGD([weight]).step()
for value in drawn:
    fanin.profile.report(loss=value)
"""


def test_each_training_has_random_numbers_of_its_own_and_seeds_make_them_again(
    tmp_path: Path,
) -> None:
    script = tmp_path / "seeds.py"
    script.write_text(SEEDS)
    trials = Trials([str(script)], None, target=-1.0, jobs=1, out=tmp_path / "out")
    first, again, other = (trials.run(Losses(), seed).curve for seed in (1, 1, 2))
    assert first == again
    assert len({*first, *other}) == 12


def test_ranks_lose_packets_of_their_own_and_train_on_the_mean_of_what_came(tmp_path: Path) -> None:
    one_step(tmp_path, Losses("all", 0.5), 2)
    of_ranks = [packets_of(tmp_path / f"{rank}-0.1") for rank in range(2)]
    assert of_ranks[0] == of_ranks[1]
    # PyTorch may abort a process that ends with a group.
    assert [(tmp_path / f"{rank}-left").read_text() for rank in range(2)] == ["False", "False"]
    assert set(of_ranks[0]) == {0.0, 1.0, 2.0, 1.5}


# What is kept to the end, as PyTorch's threads keep tensors, aborts whoever takes it apart.
ABORTS = """
import atexit, io, os, pathlib, sys, threading, torch, fanin.profile
sys.stdout = io.TextIOWrapper(sys.stdout.detach())
model = torch.nn.Linear(2, 1)
model(torch.ones(2)).sum().backward()
torch.optim.SGD(model.parameters(), lr=1.0).step()
class Kept:
    def __del__(self, abort=os.abort):
        abort()
sys.kept = Kept()
sys.log = open(sys.argv[1] + "/log", "w")
sys.log.write("not flushed")
atexit.register(pathlib.Path(sys.argv[1], "exit").touch)
def late():
    threading.main_thread().join()
    pathlib.Path(sys.argv[1], "thread").touch()
threading.Thread(target=late).start()
fanin.profile.report(accuracy=0.5)
"""


def test_a_process_that_aborts_when_it_is_taken_apart_has_trained(tmp_path: Path) -> None:
    script = tmp_path / "aborts.py"
    script.write_text(ABORTS)
    trials = Trials([str(script), str(tmp_path)], None, target=1.0, jobs=1, out=tmp_path / "out")
    assert trials.run(Losses(), seed=1).curve == [0.5]
    assert (tmp_path / "log").read_text() == "not flushed"
    assert (tmp_path / "exit").exists()
    assert (tmp_path / "thread").exists()


# Learns the sign of a random plane's side.
PLANE = """
import sys, torch, fanin.profile
torch.manual_seed(int(sys.argv[1]))
seen = torch.randn(600, 400)
right = (seen @ torch.randn(400) > 0).float()
model = torch.nn.Linear(400, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(int(sys.argv[2])):
    for part in torch.randperm(600).split(20):
        optimizer.zero_grad()
        out = model(seen[part]).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(out, right[part]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(seen).squeeze(1), right)
    fanin.profile.report(loss=float(loss))
"""


def profile(tmp_path: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(source)
    command, own = arguments[:-1], arguments[-1].split()
    line = [sys.executable, "-m", "fanin", "profile", "loss-tolerance", *command]
    line += ["--out", str(tmp_path / "out"), str(script), *own]
    return subprocess.run(line, capture_output=True, text=True, timeout=250)


def test_a_profile_finds_what_costs_and_says_the_setting(tmp_path: Path) -> None:
    options = ["--target", "0.3", "--seeds", "2", "--jobs", "2", "--among", "all"]
    ended = profile(tmp_path, PLANE, *options, "--loss", "60%,1%", "7 12")
    assert ended.returncode == 0, ended.stderr
    document = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert document["metric"] == "loss"
    of_all = document["found"]["all"]
    assert [loss["probability"] for loss in of_all["losses"]] == [0.01, 0.6]
    low, high = (loss["cost"] for loss in of_all["losses"])
    assert low[2] < 0.2
    # A lost step is a step later: with 60 % lost it takes about 2.5 times as many.
    assert 0.7 < high[0] < 3
    assert of_all["losses"][1]["verdict"] == "costs epochs"
    assert of_all["bound"][1] == 0.6
    lost = [one["lost"] / one["sent"] for one in of_all["losses"][1]["trainings"]]
    assert all(0.5 < part < 0.7 for part in lost)
    page = (tmp_path / "out" / "README.md").read_text()
    assert f"The loss bound to use: {of_all['bound'][0]:g}" in page
    assert page in ended.stdout
    assert (tmp_path / "out" / "profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("print(1)", "has reported nothing: let it call fanin.profile.report"),
        ("raise SystemExit('no data')", "ends:\nno data"),
        ("import fanin.profile\nfanin.profile.report(loss=2)", "has handed no gradients"),
    ],
)
def test_a_script_that_is_no_use_is_refused_with_the_cure(
    tmp_path: Path, source: str, complaint: str
) -> None:
    ended = profile(tmp_path, source, "--target", "1", "")
    assert ended.returncode == 1
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


def training(*curve: float) -> Training:
    return Training(curve, "accuracy", epochs_to(0.8, curve, "accuracy"), sent=100, lost=0)


@pytest.mark.parametrize(
    ("curves", "complaint"),
    [
        ([(0.5, 0.81), (0.5, 0.7, 0.6)], "the best of each: 0.81, 0.7; take an easier --target"),
        ([(0.5, 0.81), (0.9,)], "in its first epoch"),
        ([(0.5, 0.81), (0.5, 0.81)], "trains the same with every seed"),
    ],
)
def test_trainings_that_cannot_be_compared_with_are_refused(
    curves: list[tuple[float, ...]], complaint: str
) -> None:
    with pytest.raises(ProfileError, match=complaint):
        refuse_without_use([training(*curve) for curve in curves])
    refuse_without_use([training(0.5, 0.81), training(0.5, 0.6, 0.9)])


def test_a_loss_at_which_nothing_was_lost_says_nothing() -> None:
    unhurt, hurt = training(0.5, 0.81), replace(training(0.5, 0.81), lost=1)
    found = Profile([unhurt, unhurt], {"back": {0.01: [unhurt, hurt], 0.1: [hurt, hurt]}})
    assert list(found.costs("back")) == [0.1]
    assert found.bound("back") == (0.1, math.inf)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--loss", "0"], "'0' is no probability; write 1% or 0.01"),
        (["--loss", "1%,200%"], "'200%' is no probability"),
        (["--among", "front,top"], "top: no such group; choose from all, front"),
        (["--seeds", "1"], "at least 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    ended = profile(tmp_path, "", "--target", "1", *arguments, "")
    assert ended.returncode == 2
    assert complaint in ended.stderr
