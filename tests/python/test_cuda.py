"""CUDA tensors, on a GPU. All ranks share one GPU where there is but one.

`test_staging.py` tries the same logic without a GPU.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import fanin.torch
import pytest
import test_all_reduce
import test_collectives
import test_compression
import test_debug_modes
import test_delegated
import test_distributed_optimizer
import test_horovod
import test_layouts
import torch
import torch.distributed as dist
import wire_dtypes
from conftest import Launch
from fanin import errors
from fanin.torch.compression import Compressor, RandomK
from fanin.torch.device import cuda, staging
from ranks import DEADLINE, Me, wait_until
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: test_staging.py tries the logic with a stand-in for the copies",
)

# More segments than there are buffers, and a last one that is not full.
LENGTH = staging.SEGMENT_BYTES // 4 * (staging.BUFFERS_MAX + 2) + 17


def device_of(me: Me, other: int = 0) -> torch.device:
    device = torch.device("cuda", (me.rank + other) % torch.cuda.device_count())
    if other == 0:
        torch.cuda.set_device(device)
    return device


def every_dtype(me: Me, dtype: torch.dtype, lengths: list[int], average: bool) -> Any:
    device = device_of(me)
    me.init()
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    results = []
    for length in lengths:
        tensor = wire_dtypes.values(dtype, length, me.rank).to(device)
        dist.all_reduce(tensor, op=op)
        results.append(tensor.cpu())
    return results


@pytest.mark.parametrize("average", [False, True], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", [*test_all_reduce.FLOATS, torch.int32], ids=str)
def test_every_dtype_is_within_the_bound_and_the_same_on_all_ranks(
    launch: Launch, dtype: torch.dtype, average: bool
) -> None:
    segment = staging.SEGMENT_BYTES // dtype.itemsize
    lengths = [1, 257, segment, 2 * segment + 3]
    by_rank = launch(every_dtype, wire_dtypes.WORLD_SIZE, dtype, lengths, average).results()
    test_all_reduce.are_right(by_rank, lengths, dtype, average)


def streams(me: Me) -> None:
    """Producers and consumers on streams of the user's; results of each round feed the next."""
    device = device_of(me)
    me.init()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
    expected = torch.arange(LENGTH, dtype=torch.int32, device=device)
    for _ in range(5):
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # torch's
            tensor = torch.arange(LENGTH, dtype=torch.int32, device=device)  # after the sleep
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            doubled = tensor * 2  # on the stream that waited
            del tensor
        other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        other.wait_stream(side)
        with torch.cuda.stream(other):
            doubled.record_stream(other)
            assert torch.equal(doubled, expected * 2 * me.world_size)


def test_streams_are_waited_for_and_wait(launch: Launch) -> None:
    launch(streams, 2).results()


def futures(me: Me) -> None:
    device = device_of(me)
    me.init()
    n = me.world_size

    def future_of(tensor: torch.Tensor) -> Any:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future()

    def nested(future: Any) -> Any:
        return future_of(future.value()[0]).wait()[0]

    for _ in range(5):
        tensor = torch.arange(LENGTH, dtype=torch.int32, device=device)
        chained = future_of(tensor).then(lambda f: f.value()[0] + 1)
        expected = n * torch.arange(LENGTH, dtype=torch.int32, device=device) + 1
        assert torch.equal(chained.wait(), expected)
        twice = future_of(torch.ones(7, device=device)).then(nested).wait()
        assert twice.tolist() == [n * n] * 7
    work = dist.all_reduce(torch.ones(3, device=device), async_op=True)
    assert work is not None
    work.wait()
    assert work.get_future().wait()[0].tolist() == [n] * 3
    torch.cuda.synchronize(device)
    assert work.is_completed()
    assert work.is_success()


def test_futures_and_callbacks(launch: Launch) -> None:
    launch(futures, 2).results()


def awkward(me: Me) -> None:
    device = device_of(me)
    me.init()
    n = me.world_size
    square = torch.arange(12, dtype=torch.int32, device=device).reshape(3, 4)
    dist.all_reduce(square.t())
    assert torch.equal(square.cpu(), n * torch.arange(12, dtype=torch.int32).reshape(3, 4))
    large = torch.ones(3000, 1001, device=device)
    dist.all_reduce(large[:, ::2])
    assert large[:, ::2].eq(n).all()
    assert large[:, 1::2].eq(1).all()
    expanded = torch.full((3, 1), me.rank + 1.0, device=device).expand(3, 4)
    dist.all_reduce(expanded)
    assert expanded.tolist() == [[n * (n + 1) / 2] * 4] * 3
    whole = torch.zeros(1000, device=device)
    dist.all_reduce(whole[100:200].add_(1))  # an offset into the storage
    assert whole.sum().item() == 100 * n
    for empty in (torch.empty(0, device=device), torch.empty(3, 0, device=device)):
        dist.all_reduce(empty)
    scalar = torch.tensor(2.0, device=device)
    dist.all_reduce(scalar)
    assert scalar.item() == 2 * n
    leaf = torch.ones(5, device=device, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.tolist() == [n] * 5
    with torch.inference_mode():
        inference = torch.ones(3, 5, device=device)
        dist.all_reduce(inference.t())
    assert inference.sum().item() == 15 * n
    # Between tensors on the host, in the order of the calls.
    mixed = [torch.ones(LENGTH // 3, device=device), torch.ones(5000), torch.ones(3, device=device)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in mixed]
    for work, tensor in zip(works, mixed, strict=True):
        assert work is not None
        work.wait()
        assert tensor.eq(n).all()
    # None of the switch's: Gloo has them.
    doubles = torch.ones(4, dtype=torch.float64, device=device)
    dist.all_reduce(doubles)
    assert doubles.tolist() == [n] * 4
    maximum = torch.tensor([float(me.rank)], device=device)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    assert maximum.item() == n - 1
    dist.broadcast(maximum.fill_(me.rank), src=0)
    assert maximum.item() == 0
    # The other collectives, of slices whose segments lie apart.
    scattered = torch.empty(LENGTH, device=device)
    dist.reduce_scatter_single(scattered, torch.ones(n * LENGTH, device=device) * (me.rank + 1))
    assert scattered.eq(n * (n + 1) / 2).all()
    gathered = torch.empty(n * 3000, device=device)
    dist.all_gather_single(gathered, torch.full((3000,), float(me.rank), device=device))
    assert gathered.view(n, -1).t().eq(torch.arange(n, device=device)).all()
    dist.reduce(scattered.fill_(1.0), 1)
    assert scattered.eq(n if me.rank == 1 else 1).all()
    dist.broadcast(scattered, 1)
    assert scattered.eq(n).all()
    dist.barrier()


def test_awkward_tensors_and_what_goes_to_gloo(launch: Launch) -> None:
    launch(awkward, 2).results()


def dropped(me: Me) -> int:
    """Memory of tensors that nobody holds must not be handed on while copies run."""
    device = device_of(me)
    me.init()
    for _ in range(20):
        dist.all_reduce(torch.ones(LENGTH // 8, device=device), async_op=True)
        torch.full((LENGTH // 8,), 1e9, device=device)
    kept = torch.ones(LENGTH, dtype=torch.int32, device=device)
    dist.all_reduce(kept)
    return int(kept.sum().item())


def test_works_that_nobody_waits_for(launch: Launch) -> None:
    assert launch(dropped, 2).results() == [2 * LENGTH] * 2


def behind(me: Me) -> list[float]:
    """The host is done with a callback long before the device is."""
    device = device_of(me)
    me.init()
    device_copies: Any = cuda.CudaCopies
    complete = device_copies.complete

    def late(copies: Any, future: Any, tensors: list[torch.Tensor], marks: Any) -> None:
        with torch.cuda.stream(copies._of(device).into):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # torch's
        complete(copies, future, tensors, marks)

    def hook(state: Any, bucket: Any) -> Any:
        averaged = fanin.torch.compression_hook(state, bucket)
        wait_until(averaged.done, "the callbacks")
        # As large as the indices: on this stream, which has not waited for the callbacks'.
        numbers = bucket.buffer().numel() // 2
        taken.extend(torch.full((numbers,), 1 << 40, device=device) for _ in range(8))
        return averaged

    device_copies.complete = late  # in this process alone
    hook.__annotations__ = {}  # torch looks at them
    taken: list[torch.Tensor] = []
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False, device=device))
    state = fanin.torch.CompressionState(RandomK(0.5), error_feedback=False, min_bytes=0)
    model.register_comm_hook(state, hook)
    sums = []
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(1, 64, device=device)).sum().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        sums.append(parameter.grad.sum().item())
    return sums


def test_what_a_callback_reads_is_kept_until_the_device_has_read_it(launch: Launch) -> None:
    assert launch(behind, 2).results() == [[64.0 * 64] * 4] * 2


def coalesced(me: Me) -> None:
    device = device_of(me)
    me.init()
    tensors = [torch.ones(n, dtype=torch.int32, device=device) for n in (3, 0, LENGTH)]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    sums: Any = manager.works[0].get_future().then(lambda future: torch.cat(future.value()))
    assert sums.wait().eq(me.world_size).all()
    manager.wait()
    future: Any = dist.all_reduce_coalesced(tensors, async_op=True)
    assert torch.cat(future.wait()).eq(me.world_size**2).all()


def test_coalescing_regions(launch: Launch) -> None:
    launch(coalesced, 2).results()


def another_device(me: Me) -> None:
    device_of(me)
    device = device_of(me, other=1)
    me.init()
    assert torch.cuda.current_device() != device.index
    tensor = torch.arange(LENGTH, dtype=torch.int32, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    value = work.get_future().then(lambda f: f.value()[0] * 2).wait()
    assert torch.equal(value, 2 * me.world_size * torch.arange(LENGTH, device=device).int())
    assert torch.equal(value, 2 * tensor)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_tensor_on_another_device_than_the_current_one(launch: Launch) -> None:
    launch(another_device, 2).results()


def captured(me: Me) -> float:
    device = device_of(me)
    me.init()
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        dist.all_reduce(tensor)
    torch.cuda.synchronize(device)
    dist.all_reduce(tensor)
    return tensor.sum().item()


def test_capture_into_a_graph_is_refused(launch: Launch) -> None:
    assert launch(captured, 2).results() == [12.0, 12.0]


def beside_gloo(me: Me) -> list[float]:
    device = device_of(me)
    me.init("cpu:gloo,cuda:fanin")
    tensors = [torch.ones(3), torch.ones(3, device=device)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    names = [t.name for t in threading.enumerate()]
    assert "fanin-copy-out" in names
    return [tensor.sum().item() for tensor in tensors]


def test_beside_gloo_for_host_tensors(launch: Launch) -> None:
    assert launch(beside_gloo, 2).results() == [[6.0, 6.0]] * 2


def train(me: Me, backend: str, hook: bool) -> list[torch.Tensor]:
    device = device_of(me)
    me.init(backend)
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))
    model = DistributedDataParallel(network.to(device), bucket_cap_mb=0.01)
    state = fanin.torch.HookState() if hook else None
    if state is not None:
        model.register_comm_hook(state, fanin.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dice = torch.Generator().manual_seed(me.rank)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(16, 32, generator=dice).to(device)).square().mean().backward()
        optimizer.step()
    if state is not None:
        state.close()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("hook", [False, True], ids=["backend", "hook"])
def test_ddp_trains_as_on_gloo(launch: Launch, hook: bool) -> None:
    ours = launch(train, 2, "gloo" if hook else "fanin", hook).results()
    gloo = launch(train, 2, "gloo", False).results()
    for mine, theirs, reference in zip(ours[0], ours[1], gloo[0], strict=True):
        assert torch.equal(mine, theirs)
        assert (mine - reference).abs().max().item() <= 1e-6


def killed(me: Me) -> list[str]:
    device = device_of(me)
    me.init(timeout=timedelta(seconds=DEADLINE))
    tensor = torch.ones(LENGTH, device=device)
    dist.all_reduce(tensor)
    me.say("ready")
    me.hear()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError, match="RankLost"):
        work.get_future().wait()
    with pytest.raises(errors.RankLost):
        work.wait()
    dist.destroy_process_group()
    return [t.name for t in threading.enumerate() if t.name.startswith("fanin")]


def test_a_killed_rank_fails_the_others_and_leaves_no_thread(launch: Launch) -> None:
    ranks = launch(killed, 3)
    for rank in range(3):
        assert ranks.hear(rank) == "ready"
    ranks.kill(2)
    for rank in (0, 1):
        ranks.tell(rank, "go")
    assert [ranks.result(rank) for rank in (0, 1)] == [[], []]


def in_the_machine(me: Me, machines: str, holders: list[int] | None) -> Any:
    device = device_of(me)
    os.environ["FANIN_MACHINE"] = machines[me.rank]
    me.init("nccl")
    state = fanin.torch.MachineState(holders=holders, switch=me.switch)
    kept = [torch.empty(length, device=device) for length in (64, 65, LENGTH)]
    found = []
    for step in range(2):
        for flat in kept:
            flat.fill_(me.rank + step)
        for future in [state.average(flat) for flat in kept]:
            future.wait()
        found += [torch.unique(flat).tolist() for flat in kept]
    dist.barrier()
    return found


@pytest.mark.parametrize("holders", [None, [1]], ids=["all hold", "one holds"])
@pytest.mark.parametrize("machines", ["aa", "aabb"])
def test_sums_in_the_machine_go_by_nccl(
    launch: Launch, machines: str, holders: list[int] | None
) -> None:
    size = len(machines)
    if torch.cuda.device_count() < size:
        pytest.skip(f"NCCL wants a GPU for each rank, and here are {torch.cuda.device_count()}")
    mean = (size - 1) / 2
    for found in launch(in_the_machine, size, machines, holders).results():
        assert found == [[mean]] * 3 + [[mean + 1]] * 3


# Other suites, with all of their tensors on a device.


def all_there(me: Me, body: Any, args: tuple[Any, ...]) -> Any:
    torch.set_default_device(device_of(me))
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, body(me, *args))


@pytest.fixture
def on_cuda(launch: Launch, switch: str) -> Launch:
    """`launch`, where bodies make their tensors on a CUDA device."""
    return lambda body, size, *args, at=switch: launch(all_there, size, body, args, at=at)


@pytest.mark.parametrize("machines", ["a", "aab", "abc"])
def test_where_a_tensor_lies_makes_no_difference(on_cuda: Launch, machines: str) -> None:
    test_layouts.test_where_a_tensor_lies_makes_no_difference(on_cuda, machines)


@pytest.mark.parametrize("others", test_layouts.OTHERS)
def test_nor_where_switches_leave_much_to_others(on_cuda: Launch, atp: str, others: str) -> None:
    test_layouts.test_nor_where_switches_leave_much_to_others(on_cuda, atp, others)


def test_send_and_receive(on_cuda: Launch) -> None:
    test_delegated.test_send_and_receive(on_cuda)


@pytest.mark.parametrize("machines", ["aaa", "abaab"])
def test_what_is_only_moved_keeps_its_bits(on_cuda: Launch, machines: str) -> None:
    test_collectives.test_what_is_only_moved_keeps_its_bits_whatever_they_are(on_cuda, machines)


@pytest.mark.parametrize("way", test_debug_modes.WAYS)
@pytest.mark.parametrize("mode", test_debug_modes.MODES)
def test_every_way_to_train_does(
    on_cuda: Launch, parameter_service: str, mode: str, way: str
) -> None:
    test_debug_modes.test_every_way_to_train_does(on_cuda, parameter_service, mode, way)


@pytest.mark.parametrize(("compressor", "mode"), test_compression.CASES, ids=str)
def test_ranks_that_compress_train_with_the_same_bits(
    on_cuda: Launch, compressor: Compressor, mode: str
) -> None:
    test_compression.test_ranks_train_with_the_same_bits(on_cuda, compressor, mode)


@pytest.mark.parametrize("passes", ["one", "clipped", "added up"])
def test_overlapped_steps_are_those_of_ddp(on_cuda: Launch, passes: str) -> None:
    # A device does not add up in the same order twice.
    same = test_distributed_optimizer.test_parameters_are_those_of_ddp
    same(on_cuda, "sgd", None, passes, 1e-5)


def test_horovods_names_in_any_order(on_cuda: Launch) -> None:
    test_horovod.test_names_in_any_order_and_every_collective(on_cuda, 2)
