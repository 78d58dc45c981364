"""Horovod's sums overlap: tensors in two of them, errors at their ends, their times."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import fanin.horovod as hvd
import pytest
import torch
from conftest import Launch
from fanin._elastic_members import ELASTIC
from fanin.horovod import execution
from fanin.horovod.world import world
from ranks import Me
from torch import nn, optim

ALONE = ""  # for `launch`: no switch is named


def values_of(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.tolist()))


def one_tensor_in_two_sums(_: Me) -> None:
    # Nothing is fused: what is in one sum is read at once.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "1"
    hvd.init()
    for _step in range(30):
        there, other = torch.ones(50_000), torch.ones(200_000)
        handles = [
            hvd.allreduce_async_(there, name="first", op=hvd.Sum),
            hvd.allreduce_async_(other, name="other", op=hvd.Sum),
        ]
        # The first two are to be under way, and mostly are by then; the sums are right in any case.
        time.sleep(0.003)
        handles.append(hvd.allreduce_async_(there, name="second", op=hvd.Sum))
        for handle in handles:
            hvd.synchronize(handle)
        assert values_of(there) == [4]
        assert values_of(other) == [2]
    hvd.shutdown()


def test_a_tensor_that_is_summed_twice_is_summed_one_after_the_other(launch: Launch) -> None:
    launch(one_tensor_in_two_sums, 2, at=ALONE).results()


def many_at_once(me: Me) -> None:
    # Small batches: many are under way.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "1000000"
    hvd.init()
    for step in range(15):
        tensors = [torch.full((1 + 7919 * k,), float(me.rank + k + step)) for k in range(40)]
        order = torch.randperm(40, generator=torch.Generator().manual_seed(me.rank)).tolist()
        handles = {k: hvd.allreduce_async_(tensors[k], name=f"t{k}", op=hvd.Sum) for k in order}
        for k in range(40):
            hvd.synchronize(handles[k])
            assert values_of(tensors[k]) == [3 * (k + step) + 3]
    hvd.shutdown()


def test_sums_that_overlap_do_not_meet(launch: Launch) -> None:
    launch(many_at_once, 3, at=ALONE).results()


LONG = execution.ALONE_BYTES // 4


def long_beside_short(me: Me) -> None:
    hvd.init()
    for step in range(5):
        given = [torch.full((n,), float(me.rank + step)) for n in (LONG, 5, LONG + 1, 7)]
        # Long ones are summed where they are; that of rank 1 does not lie in one piece.
        wide = torch.full((2, LONG), float(me.rank))
        given.append(wide.t() if me.rank == 1 else wide.t().contiguous())
        hvd.grouped_allreduce_(given, name="in place", op=hvd.Average)
        assert [values_of(one.flatten()) for one in given] == [[1.0 + step]] * 4 + [[1.0]]
        kept = torch.full((LONG,), float(me.rank))
        halves = hvd.grouped_allreduce(
            [kept, kept], name="halves", op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0
        )
        assert [values_of(one) for one in [kept, *halves]] == [[float(me.rank)], [4.5], [4.5]]
        counts = hvd.allreduce(torch.full((LONG,), me.rank), name="counts", op=hvd.Average)
        assert values_of(counts) == [1]
    if me.rank != 2:
        two = hvd.allreduce(torch.full((LONG,), 3.0), name="two of three", op=hvd.Average)
        assert values_of(two) == [2.0]
    hvd.join()
    hvd.shutdown()


def test_long_tensors_are_summed_where_they_are(launch: Launch) -> None:
    launch(long_beside_short, 3, at=ALONE).results()


def parts_of_one(me: Me) -> None:
    hvd.init()
    for step in range(20):
        whole = torch.full((3 * LONG,), float(me.rank + step))
        parts = [whole, whole[:LONG], whole[LONG : LONG + 9], whole[LONG - 1 :: 2]]
        hvd.grouped_allreduce_(parts, name="parts", op=hvd.Sum)
        assert values_of(whole) == [2 * step + 1]
    hvd.shutdown()


def test_tensors_of_one_memory_are_each_summed_as_they_were(launch: Launch) -> None:
    launch(parts_of_one, 2, at=ALONE).results()


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 3))


def under_the_next_forward_pass(me: Me, default: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    if default is not None:
        me.init(default)
    hvd.init()
    ours, theirs = network(), network()
    steps = [
        hvd.DistributedOptimizer(optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), overlap=ours),
        hvd.DistributedOptimizer(
            optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9), theirs.named_parameters()
        ),
    ]
    generator = torch.Generator().manual_seed(me.rank)
    for step in range(6):
        x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
        for model, optimizer in zip((ours, theirs), steps, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            if step == 3:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
    with pytest.raises(ValueError, match="make it without overlap"):
        hvd.elastic.TorchState(ours, steps[0])
    done = [
        torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (ours, theirs)
    ]
    hvd.shutdown()
    return done[0], done[1]


@pytest.mark.parametrize("default", [None, "gloo"])
def test_a_step_overlaps_with_the_next_forward_pass(launch: Launch, default: str | None) -> None:
    for ours, theirs in launch(under_the_next_forward_pass, 2, default, at=ALONE).results():
        assert torch.equal(ours, theirs)


def in_a_set_that_is_made_anew(me: Me) -> None:
    hvd.init()
    both = hvd.add_process_set([0, 1])
    model = nn.Linear(3, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=both
    )
    for step in range(4):
        if step == 2:
            hvd.remove_process_set(both)
            hvd.add_process_set(both)
        optimizer.zero_grad()
        model(torch.full((1, 3), float(me.rank))).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        assert values_of(model.weight.grad.flatten()) == [0.5 if both.included() else 2.0]
    hvd.barrier()
    hvd.shutdown()


def test_a_process_set_that_is_made_anew_is_asked_for_anew(launch: Launch) -> None:
    launch(in_a_set_that_is_made_anew, 3, at=ALONE).results()


def asks_for_more(_: Me) -> None:
    model = nn.Linear(2, 2)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="not initialized"):
        hvd.DistributedOptimizer(sgd, overlap=model)
    hvd.init()
    unlike: dict[str, Any] = {
        "compression": hvd.Compression.fp16,
        "backward_passes_per_step": 2,
        "op": hvd.Sum,
        "gradient_predivide_factor": 2.0,
        "groups": 1,
        "sparse_as_dense": True,
    }
    for name, value in unlike.items():
        with pytest.raises(ValueError, match=rf"leave out {name}, or overlap"):
            hvd.DistributedOptimizer(sgd, overlap=model, **{name: value})
    os.environ[ELASTIC] = "1"
    with pytest.raises(ValueError, match="not for elastic jobs"):
        hvd.DistributedOptimizer(sgd, overlap=model)
    del os.environ[ELASTIC]
    hvd.shutdown()


def test_what_does_not_overlap_is_told(launch: Launch) -> None:
    launch(asks_for_more, 1, at=ALONE).results()


def fails_at_its_end(me: Me) -> str:
    hvd.init()
    hvd.allreduce(torch.ones(3), name="good")
    ended = execution._Sum.end
    if me.rank == 1:

        def end(self: Any, size: int) -> None:
            ended(self, size)
            raise RuntimeError("the memory is gone")

        execution._Sum.end = end  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        _ = [hvd.allreduce(torch.ones(3), name=f"step {step}") for step in range(1000)]
    assert time.monotonic() - began < 20
    engine = world().engine
    hvd.shutdown()
    # Nothing writes into the program's tensors any more.
    assert not engine._ender.is_alive()
    execution._Sum.end = ended  # type: ignore[method-assign]
    return str(caught.value)


def test_an_error_at_the_end_of_a_sum_ends_all_engines(launch: Launch) -> None:
    _, told = launch(fails_at_its_end, 2, at=ALONE).results()
    assert "the memory is gone" in told


def with_times(_: Me, path: str) -> None:
    hvd.init()
    hvd.start_timeline(path)
    for _step in range(3):
        hvd.allreduce(torch.ones(4_000_000), name="large")
    hvd.stop_timeline()
    hvd.shutdown()


def test_the_timeline_has_the_whole_time_of_a_sum(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    launch(with_times, 2, str(path), at=ALONE).results()
    events = json.loads(path.read_text())
    sums = [event["dur"] for event in events if event["name"] == "ALLREDUCE"]
    assert len(sums) == 3
    # 16 MB are copied and added in no less than a millisecond.
    assert min(sums) > 1000


def cannot_write(me: Me, path: str) -> str:
    hvd.init()
    hvd.start_timeline(path)

    def add(*_: Any) -> None:
        raise OSError("no space left")

    if me.rank == 0:
        world().timeline.add = add  # type: ignore[assignment, method-assign]
    with pytest.raises(hvd.HorovodInternalError) as caught:
        _ = [hvd.allreduce(torch.ones(3), name=f"step {step}") for step in range(100)]
    hvd.shutdown()
    return str(caught.value)


def test_a_timeline_that_cannot_be_written_is_an_error(launch: Launch, tmp_path: Path) -> None:
    first, _ = launch(cannot_write, 2, str(tmp_path / "timeline.json"), at=ALONE).results()
    assert "no space left" in first
