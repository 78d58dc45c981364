"""Horovod's interface: names in any order, what ranks disagree about, and ranks that are gone."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from threading import Thread
from typing import Any

import fanin.horovod as hvd
import pytest
import torch
from conftest import Launch, free_address
from fanin import _connections as connections
from fanin import errors
from fanin.horovod.execution import TorchExecutor
from fanin.horovod.world import world
from layers import flat
from ranks import DEADLINE, Me, sums_on_switch
from torch import nn, optim
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

# One process.


def test_before_init_everything_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.join, hvd.barrier):
        with pytest.raises(ValueError, match=r"call hvd\.init\(\)"):
            call()
    with pytest.raises(ValueError, match=r"call hvd\.init\(\)"):
        hvd.allreduce(torch.ones(1))
    assert not hvd.is_initialized()
    hvd.shutdown()


class Engines(Thread):
    """Rank 0's connections, which wait for the others' in a thread."""

    def __init__(self, store: HashStore, size: int) -> None:
        super().__init__(daemon=True)
        self._store = store
        self._size = size
        self.followers: connections.Followers | None = None
        self.start()

    def run(self) -> None:
        self.followers = connections.Followers(self._store, self._size, lambda: "127.0.0.1")

    def all(self) -> connections.Followers:
        self.join(DEADLINE)
        assert self.followers is not None
        return self.followers


def test_a_stranger_is_no_rank() -> None:
    store = HashStore()
    engines = Engines(store, 2)
    family, address, port, _ = json.loads(store.get("words"))
    with socket.socket(family) as stranger:
        stranger.connect((address, port))
        stranger.sendall(bytes(1000))
    leader = connections.Leader(store, 1)
    followers = engines.all()
    leader.say("hello")
    assert list(followers.hear(DEADLINE)) == ["hello"]
    followers.tell("and you")
    assert leader.hear() == "and you"
    # A rank that vanishes with its machine says no last word: the kernels ask.
    for connection in (leader._connection, *followers._connections):
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            assert idle < connections.SILENT_SECONDS
            milliseconds = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert milliseconds == connections.SILENT_SECONDS * 1000
    leader.close()
    with pytest.raises(connections.Gone, match="rank 1"):
        list(followers.hear(DEADLINE))
    followers.close()


def test_an_init_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def refuse(*_: Any) -> None:
        raise OSError("no route to rank 0")

    with monkeypatch.context() as patched:
        patched.setattr(connections, "connect", refuse)
        with pytest.raises(hvd.HorovodInternalError, match="no route to rank 0"):
            hvd.init()
    assert not torch.distributed.is_initialized()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 1.0
    hvd.shutdown()
    assert not torch.distributed.is_initialized()


def test_a_group_of_several_dtypes_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    given = [torch.ones(1), torch.ones(2, dtype=torch.int64), torch.ones(3)]
    for got in (
        hvd.grouped_allreduce(given, op=hvd.Sum),
        hvd.grouped_allreduce_([each.clone() for each in given], op=hvd.Sum),
    ):
        assert [(each.dtype, len(each)) for each in got] == [
            (each.dtype, len(each)) for each in given
        ]
    hvd.shutdown()


# Several.


def group_of_engine() -> Any:
    executor = world().engine.executor
    assert isinstance(executor, TorchExecutor)
    return executor.world


def with_a_group_of_its_own(me: Me, address: str) -> float:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=me.rank, world_size=me.world_size
    )
    total = 0.0
    for _ in range(2):
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (me.rank, me.world_size)
        total += hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.shutdown()
    assert torch.distributed.is_initialized(), "it is the program's"
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return total


def test_ranks_of_a_group_that_no_launcher_made(launch: Launch) -> None:
    assert launch(with_a_group_of_its_own, 2, free_address()).results() == [4.0, 4.0]


def beside_the_engine(me: Me) -> tuple[float, float]:
    hvd.init()
    one, ten = torch.ones(1), torch.full((1,), 10.0)
    # Rank 0's own sum is under way while the engines sum; rank 1 begins its part after that.
    work = torch.distributed.all_reduce(one, async_op=True) if me.rank == 0 else None
    ten = hvd.allreduce(ten, op=hvd.Sum)
    if work is None:
        torch.distributed.all_reduce(one)
    else:
        work.wait()
    hvd.shutdown()
    assert not torch.distributed.is_initialized()
    return one.item(), ten.item()


def test_what_a_program_sums_itself_is_not_the_engine_s(launch: Launch) -> None:
    assert launch(beside_the_engine, 2).results() == [(2.0, 20.0), (2.0, 20.0)]


def in_any_order(me: Me) -> dict[str, Any]:
    hvd.init()
    order = list(range(40))
    if me.rank % 2:
        order.reverse()
    handles = {
        n: hvd.allreduce_async(torch.full((n + 1,), float(n + me.rank)), name=str(n), op=hvd.Sum)
        for n in order
    }
    sums = {n: hvd.synchronize(handle) for n, handle in handles.items()}
    gathered = hvd.allgather(torch.full((me.rank, 2), me.rank))
    splits = torch.tensor([r + 1 for r in range(me.world_size)])
    sent = torch.arange(int(splits.sum())) + 100 * me.rank
    exchanged, received = hvd.alltoall(sent, splits)
    scattered = hvd.reducescatter(torch.arange(10.0).view(5, 2), op=hvd.Sum)
    odd = torch.ones(3, 4).t()
    hvd.allreduce_(odd, op=hvd.Sum)
    result = {
        "sums": sums,
        "gathered": gathered,
        "exchanged": exchanged,
        "received": received,
        "scattered": scattered,
        "transposed": odd,
        "bools": hvd.broadcast(torch.tensor([me.rank == 1]), 1),
        "average": hvd.allreduce(torch.tensor([-3 * me.rank])),
        "least": hvd.allreduce(torch.tensor([5 - me.rank], dtype=torch.int16), op=hvd.Min),
        "short": hvd.allreduce(torch.tensor([me.rank], dtype=torch.int16), op=hvd.Sum),
        "object": hvd.broadcast_object({"rank": me.rank}, me.world_size - 1),
        "objects": hvd.allgather_object("x" * me.rank),
        "on the switch": sums_on_switch(group_of_engine()),
    }
    hvd.shutdown()
    return result


@pytest.mark.parametrize("n", [2, 4])
def test_names_in_any_order_and_every_collective(launch: Launch, n: int) -> None:
    results = launch(in_any_order, n).results()
    ranks = sum(range(n))
    for rank, got in enumerate(results):
        for number, summed in got["sums"].items():
            expected = torch.full((number + 1,), float(n * number + ranks))
            assert torch.equal(summed, expected), number
        assert got["gathered"].tolist() == [[r, r] for r in range(n) for _ in range(r)]
        begin = rank * (rank + 1) // 2
        exchanged = [100 * r + begin + i for r in range(n) for i in range(rank + 1)]
        assert got["exchanged"].tolist() == exchanged
        assert got["received"].tolist() == [rank + 1] * n
        assert torch.equal(got["transposed"], torch.full((4, 3), float(n)))
        assert got["bools"].item()
        assert got["on the switch"] > 3
        assert got["average"].item() == -(3 * ranks // n), "truncated, as Horovod does"
        assert got["least"].item() == 5 - (n - 1)
        assert got["short"].item() == ranks
        assert got["object"] == {"rank": n - 1}
        assert got["objects"] == ["x" * r for r in range(n)]
    rows = torch.cat([got["scattered"] for got in results])
    assert torch.equal(rows, n * torch.arange(10.0).view(5, 2))


def with_another_default_device(me: Me) -> dict[str, Any]:
    torch.set_default_device("meta")  # what is made there holds nothing
    hvd.init()
    own = torch.full((2,), float(me.rank), device="cpu")
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(2, 3), hvd.SyncBatchNorm(3), nn.Linear(3, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    hvd.broadcast_optimizer_state(optimizer, 0)
    model(own.repeat(4, 1)).square().mean().backward()
    optimizer.step()
    sampler = hvd.elastic.ElasticSampler(range(10), seed=3)
    sampler.record_indices([1, 2])
    sampler.reset()
    got = {
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "sum": hvd.allreduce(own, op=hvd.Sum).tolist(),
        "rows": hvd.alltoall(own).tolist(),
        "object": hvd.broadcast_object({"rank": me.rank}, 1),
        "objects": hvd.allgather_object("x" * me.rank),
        "indices": sorted(sampler),
        "last": hvd.join() >= 0,
    }
    hvd.shutdown()
    return got


def test_a_default_device_is_the_programs_alone(launch: Launch) -> None:
    zero, one = launch(with_another_default_device, 2).results()
    assert zero["weights"] == one["weights"]
    assert zero["sum"] == one["sum"] == [1.0, 1.0]
    assert zero["rows"] == one["rows"] == [0.0, 1.0]
    assert zero["object"] == one["object"] == {"rank": 1}
    assert zero["objects"] == one["objects"] == ["", "x"]
    assert len(zero["indices"]) + len(one["indices"]) >= 8
    assert zero["last"]
    assert one["last"]


def joining(me: Me) -> dict[str, Any]:
    hvd.init()
    sums = [
        hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum)[0].item()
        for step in range(me.rank + 1)
    ]
    last = hvd.join()
    after = hvd.allreduce(torch.ones(2), op=hvd.Average)[0].item()
    hvd.shutdown()
    return {"sums": sums, "last": last, "after": after}


def test_who_has_joined_adds_zeros(launch: Launch) -> None:
    results = launch(joining, 4).results()
    for rank, got in enumerate(results):
        assert got["sums"] == [4.0, 3.0, 2.0, 1.0][: rank + 1]
        assert got["last"] == 3
        assert got["after"] == 1.0


def in_sets(me: Me) -> dict[str, Any]:
    low = hvd.ProcessSet([1, 0])
    hvd.init(process_sets=[low])
    odd = hvd.add_process_set([1, 3])
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set([3, 1])
    got: dict[str, Any] = {"low": low.included(), "odd": odd.included()}
    for name, process_set in (("low", low), ("odd", odd)):
        if process_set.included():
            number = torch.tensor([10.0**me.rank])
            got[name] = [
                process_set.rank(),
                process_set.size(),
                hvd.allreduce(number, op=hvd.Sum, process_set=process_set).item(),
                hvd.broadcast(number, 1, process_set=process_set).item(),
            ]
        else:
            with pytest.raises(ValueError, match="not in"):
                hvd.allreduce(torch.ones(1), process_set=process_set)
    assert hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(odd)
    assert odd.process_set_id is None
    hvd.shutdown()
    assert low.process_set_id is None, "it was of that job"
    return got


def test_process_sets(launch: Launch) -> None:
    results = launch(in_sets, 4).results()
    assert results[0] == {"low": [0, 2, 11.0, 10.0], "odd": False}
    assert results[1] == {"low": [1, 2, 11.0, 10.0], "odd": [0, 2, 1010.0, 10.0]}
    assert results[2] == {"low": False, "odd": False}
    assert results[3] == {"low": False, "odd": [1, 2, 1010.0, 10.0]}


def network(seed: int, width: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(5, 6, generator=generator)
    return x, torch.randn(5, 3, generator=generator)


def beside_ddp(me: Me) -> tuple[torch.Tensor, torch.Tensor]:
    me.init()
    hvd.init()
    # The networks have more elements than cross the network as they are in any case.
    ours, theirs = network(me.rank, 2000), network(0, 2000)
    hvd.broadcast_parameters(ours.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), ours.named_parameters()
    )
    replicated = DistributedDataParallel(theirs)
    beside = optim.SGD(replicated.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        x, y = batch(me.rank, step)
        for model, each in ((ours, optimizer), (replicated, beside)):
            each.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            each.step()
    hvd.shutdown()
    return flat(ours), flat(theirs)


@pytest.mark.parametrize("n", [2, 4])
def test_a_distributed_optimizer_is_ddp_bit_for_bit(launch: Launch, n: int) -> None:
    results = launch(beside_ddp, n).results()
    for ours, theirs in results:
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, results[0][0])


def in_passes(me: Me, groups: int | None, compression: str) -> dict[str, Any]:
    hvd.init()
    model = network(0)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        backward_passes_per_step=2,
        gradient_predivide_factor=2.0,
        groups=groups,
        compression=getattr(hvd.Compression, compression),
    )
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            x, y = batch(me.rank, 2 * step + part)
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
    hvd.shutdown()
    return {"model": flat(model)}


@pytest.mark.parametrize(
    ("groups", "compression", "tolerance"),
    [(None, "none", 1e-6), (2, "none", 1e-6), (None, "fp16", 1e-2)],
)
def test_passes_are_added_up_before_they_are_reduced(
    launch: Launch, groups: int | None, compression: str, tolerance: float
) -> None:
    results = launch(in_passes, 2, groups, compression).results()
    model = network(0)
    alone = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        alone.zero_grad()
        for rank in range(2):
            for part in range(2):
                x, y = batch(rank, 2 * step + part)
                loss = nn.functional.mse_loss(model(x), y) / 2
                loss.backward()  # type: ignore[no-untyped-call]
        alone.step()
    for got in results:
        torch.testing.assert_close(got["model"], flat(model), atol=tolerance, rtol=tolerance)
        assert torch.equal(got["model"], results[0]["model"])


def with_an_embedding(me: Me, as_dense: bool) -> torch.Tensor:
    hvd.init()
    table = nn.Embedding(6, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense, op=hvd.Sum
    )
    table(torch.tensor([me.rank, 4, 4])).sum().backward()
    optimizer.step()
    hvd.shutdown()
    return table.weight.detach()[:, 0]


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_summed(launch: Launch, as_dense: bool) -> None:
    for column in launch(with_an_embedding, 2, as_dense).results():
        assert column.tolist() == [-1.0, -1.0, 0.0, 0.0, -4.0, 0.0]


def with_a_closure(me: Me) -> list[torch.Tensor]:
    hvd.init()
    one, two, unused = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(optim.SGD([one, unused], lr=1.0))
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.add_param_group({"params": [two]})

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (one + two) * (me.rank + 1)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for _ in range(2):
        optimizer.step(loss)
        schedule.step()
    hvd.shutdown()
    return [parameter.detach() for parameter in (one, two, unused)]


def test_closures_schedules_and_parameters_that_are_unused_or_added(launch: Launch) -> None:
    for one, two, unused in launch(with_a_closure, 2).results():
        assert (one.item(), two.item(), unused.item()) == (-2.25, -2.25, 0.0)


def by_adasum(me: Me) -> tuple[torch.Tensor, torch.Tensor]:
    hvd.init()
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Adasum
    )
    # The gradients of two ranks are alike first, then at right angles.
    for x in (torch.tensor([1.0, 0.0]), torch.eye(2)[me.rank]):
        optimizer.zero_grad()
        (-model(x)).sum().backward()
        optimizer.step()
    hvd.shutdown()
    return model.weight.detach(), torch.tensor(0)


def test_adasum_steps_first(launch: Launch) -> None:
    for weight, _ in launch(by_adasum, 2).results():
        torch.testing.assert_close(weight, torch.tensor([[2.0, 1.0]]))


def normalised(me: Me) -> dict[str, torch.Tensor]:
    hvd.init()
    layer = hvd.SyncBatchNorm(3)
    x = batch_of(me.rank).requires_grad_()
    y = layer(x)
    (y * weights_of(me.rank)).sum().backward()
    hvd.shutdown()
    assert x.grad is not None
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return {
        "y": y.detach(),
        "gradient": x.grad,
        "mean": layer.running_mean,
        "variance": layer.running_var,
    }


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(2 + rank, 3, 4, generator=torch.Generator().manual_seed(rank))


def weights_of(rank: int) -> torch.Tensor:
    return torch.randn(2 + rank, 3, 4, generator=torch.Generator().manual_seed(10 + rank))


def normalised_in_halves(me: Me) -> dict[str, torch.Tensor]:
    hvd.init()
    layer = hvd.SyncBatchNorm(1).to(torch.bfloat16)
    x = far_batch_of(me.rank).requires_grad_()
    y = layer(x)
    (y * y.detach().sign()).sum().backward()
    hvd.shutdown()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return {"y": y.detach(), "of weight": layer.weight.grad}


def far_batch_of(rank: int) -> torch.Tensor:
    values = torch.randn(4000, 1, generator=torch.Generator().manual_seed(rank))
    return (values + 16.0).bfloat16()


def test_statistics_of_halves_are_summed_in_float32(launch: Launch) -> None:
    results = launch(normalised_in_halves, 2).results()
    x = torch.cat([far_batch_of(0), far_batch_of(1)])
    expected = nn.BatchNorm1d(1)(x.float())
    got = torch.cat([each["y"] for each in results])
    assert got.dtype == torch.bfloat16
    # No more than the one rounding at the end.
    torch.testing.assert_close(got.float(), expected.detach(), rtol=2.0**-8, atol=1e-4)
    for each, own in zip(results, expected.split(4000), strict=True):
        assert each["of weight"].dtype == torch.bfloat16
        torch.testing.assert_close(
            each["of weight"].float(), own.detach().abs().sum()[None], rtol=2.0**-7, atol=0.0
        )


def normalised_beside_an_empty_batch(me: Me) -> dict[str, torch.Tensor]:
    hvd.init()
    layer = hvd.SyncBatchNorm(3)
    x = (batch_of(0) if me.rank == 0 else torch.empty(0, 3, 4)).requires_grad_()
    y = layer(x)
    (y * weights_of(0)[: len(x)]).sum().backward()
    result = {"y": y.detach(), "of bias": layer.bias.grad, **layer.state_dict()}
    assert x.grad is not None
    assert x.grad.shape == x.shape
    result["gradient"] = x.grad
    layer(torch.empty(0, 3, 4))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(layer, name), result[name], msg="nobody had a batch")
    hvd.shutdown()
    return {name: value.clone() for name, value in result.items()}


def test_a_rank_with_an_empty_batch_adds_nothing_to_the_statistics(launch: Launch) -> None:
    first, second = launch(normalised_beside_an_empty_batch, 2).results()
    layer = nn.BatchNorm1d(3)
    x = batch_of(0).requires_grad_()
    y = layer(x)
    (y * weights_of(0)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(first["y"], y.detach())
    torch.testing.assert_close(first["gradient"], x.grad)
    for got in (first, second):
        torch.testing.assert_close(got["running_mean"], layer.running_mean)
        torch.testing.assert_close(got["running_var"], layer.running_var)
    assert second["of bias"].tolist() == [0.0] * 3


def test_batches_of_all_ranks_are_normalised_as_one(launch: Launch) -> None:
    results = launch(normalised, 2).results()
    layer = nn.BatchNorm1d(3)
    x = torch.cat([batch_of(0), batch_of(1)]).requires_grad_()
    y = layer(x)
    (y * torch.cat([weights_of(0), weights_of(1)])).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([got["y"] for got in results]), y.detach())
    torch.testing.assert_close(torch.cat([got["gradient"] for got in results]), x.grad)
    for got in results:
        torch.testing.assert_close(got["mean"], layer.running_mean)
        torch.testing.assert_close(got["variance"], layer.running_var)


def with_a_timeline(_: Me, path: str) -> None:
    hvd.init()
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="gradients")
    hvd.stop_timeline()
    hvd.shutdown()


def test_a_timeline_shows_how_long_ranks_were_waited_for(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    launch(with_a_timeline, 2, str(path)).results()
    events = json.loads(path.read_text())
    seen = {event["name"] for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= seen
    assert any(event.get("args", {}).get("name") == "allreduce.gradients" for event in events)


def killed(me: Me) -> tuple[str, str]:
    hvd.init()
    hvd.allreduce(torch.ones(3))
    me.say("there")
    if me.rank == 1:
        me.hear()
    try:
        while True:
            hvd.allreduce(torch.ones(3))
    except hvd.HorovodInternalError as error:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.barrier()
        hvd.shutdown()
        return type(error.__cause__).__name__, str(error)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_killed_rank_is_an_error_on_all_others(launch: Launch, gone: int) -> None:
    ranks = launch(killed, 3)
    for rank in range(3):
        ranks.hear(rank)
    ranks.kill(gone)
    for rank in {0, 1, 2} - {gone}:
        if rank == 1:
            ranks.tell(rank, "go on")
        kind, text = ranks.result(rank)
        assert kind == "RankLost", (kind, text)
        assert issubclass(getattr(errors, kind), errors.FaninError)


def ending(me: Me) -> tuple[bool, float]:
    hvd.init()
    if me.rank == 1:
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 has called shutdown") as caught:
            hvd.allreduce(torch.ones(3))
        assert caught.value.__cause__ is None
    hvd.shutdown()
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return hvd.is_initialized(), total


def test_a_shutdown_is_told_to_who_still_waits_and_all_can_begin_anew(launch: Launch) -> None:
    assert launch(ending, 2).results() == [(False, 2.0)] * 2


def parted(me: Me) -> str:
    hvd.init()
    text = ""
    if me.rank == 1:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.add_process_set([0, 1])
        text = str(caught.value)
    hvd.shutdown()
    return text


def test_a_process_set_that_others_do_not_wait_for_is_no_wrong_set(launch: Launch) -> None:
    assert launch(parted, 2).results() == ["", "rank 0 has called shutdown"]


def some(me: Me) -> tuple[int, int] | str:
    if me.rank == 1:
        with pytest.raises(ValueError, match="this is rank 1"):
            hvd.init(comm=[0, 2])
        return "not in it"
    hvd.init(comm=[2, 0])
    total = hvd.allreduce(torch.tensor([me.rank]), op=hvd.Sum)
    result = hvd.rank(), int(total)
    hvd.shutdown()
    return result


def test_some_of_the_ranks_alone(launch: Launch) -> None:
    assert launch(some, 3).results() == [(1, 2), "not in it", (0, 2)]


def test_everything_that_horovod_torch_exports_is_there() -> None:
    exported = """
        init shutdown is_initialized rank size local_rank local_size cross_rank cross_size
        allreduce allreduce_ allreduce_async allreduce_async_ sparse_allreduce_async
        grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
        allgather allgather_async grouped_allgather grouped_allgather_async
        broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async
        reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
        join barrier poll synchronize start_timeline stop_timeline
        broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object
        DistributedOptimizer SyncBatchNorm Compression HorovodInternalError elastic
        ProcessSet global_process_set add_process_set remove_process_set
        Average Sum Adasum Min Max Product
        mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built
        ccl_built cuda_built rocm_built
        """
    for name in exported.split():
        assert getattr(hvd, name) is not None
    assert set(hvd.elastic.__all__) >= {"ElasticSampler", "ObjectState", "State", "TorchState"}
