"""The collectives that are halves of an all-reduce, on the switches and not on Gloo."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin import errors
from fanin.torch import Options
from ranks import Failure, Me
from torch.distributed.distributed_c10d import _coalescing_manager

# No switch: the ranks sum themselves.
ALONE = ""
# The tensors have few enough bytes that the services gather them.
LENGTHS = (1, 300, 5_000, 20_003)


def init(me: Me, machines: str | None = None, **said: Any) -> None:
    """Each rank is a machine of its own; or on the one whose letter stands at its place."""
    name = me.rank if machines is None else machines[me.rank]
    me.init(pg_options=Options(machine=f"machine {name}", **said))


def on_switch() -> int:
    """How many collectives that are no all-reduces this rank has done on the switch."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return int(backend._channel._client.statistics()["others_completed"])


def on_gloo() -> int:
    """How many collectives this rank has done on Gloo."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return int(backend._gloo._get_sequence_number_for_group())


def mine(me: Me, length: int, dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
    """Bits that no other rank has."""
    generator = torch.Generator().manual_seed(length * 100 + (me.rank if rank is None else rank))
    size = dtype.itemsize
    shape = (length * size,)
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device="cpu")
    noise = noise.to(torch.get_default_device())
    return (noise % 2).bool() if dtype == torch.bool else noise.view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


MOVED = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int32,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def moves(me: Me, machines: str | None = None) -> int:
    init(me, machines)
    n = me.world_size
    done = 0
    for dtype in MOVED:
        for length in LENGTHS:
            expected = [mine(me, length, dtype, rank) for rank in range(n)]
            own = expected[me.rank].clone()
            outputs = [torch.empty_like(own) for _ in range(n)]
            dist.all_gather(outputs, own)
            assert all(map(same, outputs, expected))
            whole = torch.empty(n * length, dtype=dtype)
            dist.all_gather_single(whole, own)
            assert same(whole, torch.cat(expected))
            root = length % n
            tensor = own.clone()
            dist.broadcast(tensor, root)
            assert same(tensor, expected[root])
            assert same(own, expected[me.rank]), "what is sent stays"
            done += 3
            assert on_gloo() == 0
    return done if on_switch() >= done else 0


def sums(me: Me, machines: str, said: dict[str, Any]) -> list[str]:
    """Every reduction beside the all-reduce of the same numbers: the very bits."""
    init(me, machines, **said)
    n = me.world_size
    # A machine's sums are rounded for the wire by what stands beside them: unlike in a slice.
    coarse = "wire_dtype" in said and len(set(machines)) < n
    done, bits = 0, []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float64):
        for length in (*LENGTHS, 200_003):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                generator = torch.Generator().manual_seed(length + me.rank)
                whole = torch.randn(n * length, generator=generator).mul(50).to(dtype)
                before, slices = whole.clone(), list(whole.chunk(n))
                # Slice by slice, as blocks that are scaled together do not cross slices.
                reference = [part.clone() for part in slices]
                for part in reference:
                    dist.all_reduce(part, op=op)
                output = torch.empty(length, dtype=dtype)
                dist.reduce_scatter_single(output, whole, op=op)
                close(output, reference[me.rank], coarse)
                listed = torch.empty(length, dtype=dtype)
                dist.reduce_scatter(listed, slices, op=op)
                assert same(listed, output), "lists or not"
                assert same(whole, before), "what is sent stays"
                root = length % n
                tensor = slices[root].clone()
                dist.reduce(tensor, root, op=op)
                if me.rank == root:
                    close(tensor, reference[root], coarse)
                else:
                    assert same(tensor, slices[root]), "the others keep what they had"
                done += 3
                assert on_gloo() == 0
                assert on_switch() >= done
                bits.append(str(torch.hash_tensor(reference[0].to(torch.float64)).item()))
    return bits


def close(one: torch.Tensor, other: torch.Tensor, coarse: bool) -> None:
    """The same sums; slices of several machines travel in other chunks than a whole tensor does."""
    if one.dtype.is_floating_point:
        error = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 0.5}.get(one.dtype, 4.0)
        if coarse and one.dtype != torch.float64:
            error = 4.0
        assert (one.to(torch.float64) - other.to(torch.float64)).abs().max() <= error
    else:
        assert same(one, other)


@pytest.mark.parametrize("machines", ["ab", "abc", "aaa", "abaab"])
def test_what_is_only_moved_keeps_its_bits_whatever_they_are(launch: Launch, machines: str) -> None:
    n = len(machines)
    assert launch(moves, n, machines, at=ALONE).results() == [3 * len(MOVED) * len(LENGTHS)] * n


def test_one_switch_moves_as_well(launch: Launch) -> None:
    assert launch(moves, 3).results() == [3 * len(MOVED) * len(LENGTHS)] * 3


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ("abc", {}),
        ("abc", {"wire_dtype": "bfloat16"}),
        ("abc", {"wire_dtype": "shared_exponent"}),
        ("aaa", {}),
        ("aab", {}),
        ("baba", {"wire_dtype": "bfloat16"}),
        ("aab", {"wire_dtype": "shared_exponent"}),
    ],
)
def test_slices_are_summed_as_a_whole_is(
    launch: Launch, machines: str, said: dict[str, Any]
) -> None:
    results = launch(sums, len(machines), machines, said, at=ALONE).results()
    assert all(bits == results[0] for bits in results)


def odd_memory(me: Me, machines: str) -> None:
    init(me, machines)
    n, length = me.world_size, 1000
    expected = [mine(me, length, torch.float32, rank) for rank in range(n)]
    # Gathered in place, as FSDP2 does it.
    whole = torch.zeros(n * length)
    own = whole.narrow(0, me.rank * length, length)
    own.copy_(expected[me.rank])
    dist.all_gather_single(whole, own)
    assert same(whole, torch.cat(expected))
    # From where another rank's slice is to come.
    whole = torch.zeros(n * length)
    other = whole.narrow(0, (me.rank + 1) % n * length, length)
    other.copy_(expected[me.rank])
    dist.all_gather_single(whole, other)
    assert same(whole, torch.cat(expected))
    # Transposed.
    transposed = [torch.zeros(40, 25).t() for _ in range(n)]
    dist.all_gather(transposed, expected[me.rank].view(25, 40))
    assert all(same(a.reshape(-1), b) for a, b in zip(transposed, expected, strict=True))
    # The sum in place of this rank's slice, of another's, and of rows and columns.
    for at in range(n):
        whole = torch.arange(n * length, dtype=torch.int32)
        place = (me.rank + at) % n
        output = whole.narrow(0, place * length, length)
        dist.reduce_scatter_single(output, whole)
        begin = me.rank * length
        assert output.tolist() == [n * i for i in range(begin, begin + length)]
    strided = torch.zeros(25, 40).t()
    dist.reduce_scatter(strided, [torch.full((40, 25), float(r)) for r in range(n)])
    assert strided.tolist() == [[float(n * me.rank)] * 25] * 40
    columns = torch.zeros(40, n * 25).t()
    dist.all_gather_single(columns, torch.full((40, 25), float(me.rank)).t())
    assert columns.tolist() == [[float(r)] * 40 for r in range(n) for _ in range(25)]
    rows = torch.arange(float(n * 25)).expand(40, n * 25).t()
    summed = torch.zeros(25, 40)
    dist.reduce_scatter_single(summed, rows)
    assert summed[:, 7].tolist() == [n * float(i) for i in range(25 * me.rank, 25 * me.rank + 25)]
    # A tensor in many places, and memory at odd addresses.
    x = torch.full((20_000,), float(me.rank + 1))
    dist.reduce_scatter(x, [x] * n)
    assert (x == n * (n + 1) / 2).all()
    y, z = torch.full((50,), float(me.rank)), torch.zeros(50)
    dist.reduce_scatter(z, [y] * n)
    assert (z == n * (n - 1) / 2).all()
    odd = torch.frombuffer(bytearray(4 * 10 * n + 2), dtype=torch.float32, offset=2, count=10 * n)
    odd.fill_(1.0)
    z = torch.zeros(10)
    dist.reduce_scatter_single(z, odd)
    assert z.tolist() == [float(n)] * 10
    # Ranks need not have their tensors in memory alike.
    alike = torch.full((n * 25, 40), float(me.rank))
    mixed = alike if me.rank == 0 else torch.full((40, n * 25), float(me.rank)).t()
    z = torch.zeros(25, 40)
    dist.reduce_scatter_single(z, mixed)
    assert (z == n * (n - 1) / 2).all()
    # Leaves, and what was made for inference.
    leaf = torch.full((5,), float(me.rank), requires_grad=True)
    dist.broadcast(leaf, 1)
    assert leaf.tolist() == [1.0] * 5
    with torch.inference_mode():
        made = torch.full((5,), float(me.rank))
    dist.broadcast(made, 1)
    assert made.tolist() == [1.0] * 5
    empty = [torch.zeros(0) for _ in range(n)]
    dist.all_gather(empty, torch.zeros(0))
    dist.broadcast(torch.zeros(0), 0)
    dist.barrier()


@pytest.mark.parametrize("machines", ["abc", "aaa", "aba"])
def test_memory_of_any_shape(launch: Launch, machines: str) -> None:
    launch(odd_memory, 3, machines, at=ALONE).results()


def from_read_only_memory(me: Me, machines: str, file: str) -> list[float]:
    init(me, machines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that cannot be written
        kept = torch.from_numpy(np.load(file, mmap_mode="r"))
    tensor = kept if me.rank == 0 else torch.zeros(len(kept))
    dist.broadcast(tensor, 0)
    outputs = [kept if other == me.rank else torch.zeros(len(kept)) for other in range(2)]
    dist.all_gather(outputs, kept)
    return [tensor.sum().item(), outputs[1 - me.rank].sum().item()]


@pytest.mark.parametrize("machines", ["ab", "aa"])
def test_what_a_rank_says_may_be_in_read_only_memory(
    launch: Launch, tmp_path: Path, machines: str
) -> None:
    numbers = np.arange(1000, dtype=np.float32)
    np.save(tmp_path / "numbers.npy", numbers)
    file = str(tmp_path / "numbers.npy")
    found = launch(from_read_only_memory, 2, machines, file, at=ALONE).results()
    assert found == [[float(numbers.sum())] * 2] * 2


def asynchronous(me: Me, machines: str) -> None:
    init(me, machines)
    n = me.world_size
    gathered = torch.empty(n * 10_000)
    works: list[Any] = [
        dist.all_gather_single(gathered, torch.full((10_000,), 1.0 + me.rank), async_op=True)
    ]
    tensor = torch.full((10_000,), float(me.rank))
    works.append(dist.broadcast(tensor, 2, async_op=True))
    scattered = torch.empty(10_000)
    works.append(dist.reduce_scatter_single(scattered, torch.ones(n * 10_000), async_op=True))
    # A barrier comes after all of them.
    dist.barrier()
    assert tensor[0] == 2
    assert scattered[0] == n
    assert gathered.view(n, -1)[:, 0].tolist() == [float(r + 1) for r in range(n)]
    assert all(work.is_completed() for work in works)
    assert works[1].get_future().wait()[0] is tensor
    with _coalescing_manager(async_ops=True) as manager:
        parts = [torch.empty(n * 3), torch.empty(n * 5)]
        for part in parts:
            dist.all_gather_single(part, torch.full((part.numel() // n,), float(me.rank)))
    manager.wait()
    expected = [[float(r) for r in range(n) for _ in range(length)] for length in (3, 5)]
    assert [part.tolist() for part in parts] == expected
    # Objects of any kind are sent as bytes.
    said: list[Any] = [{"rank": me.rank}, None] if me.rank == 1 else [None, None]
    dist.broadcast_object_list(said, src=1)
    assert said[0] == {"rank": 1}
    everybody: list[Any] = [None] * n
    dist.all_gather_object(everybody, "x" * me.rank)
    assert everybody == ["x" * r for r in range(n)]


@pytest.mark.parametrize("machines", ["abc", "aaa", "aba"])
def test_works_futures_and_batches_are_as_for_all_reduces(launch: Launch, machines: str) -> None:
    launch(asynchronous, 3, machines, at=ALONE).results()


def not_served(me: Me) -> int:
    """What the switch does not have goes to Gloo, and is right."""
    init(me)
    n = me.world_size
    tensor = torch.tensor([float(me.rank)])
    dist.reduce(tensor, 0, op=dist.ReduceOp.MAX)
    assert me.rank != 0 or tensor.item() == n - 1
    output = torch.zeros(2, dtype=torch.complex64)
    try:
        dist.reduce_scatter_single(output, torch.ones(2 * n, dtype=torch.complex64))
        assert output.tolist() == [n, n]
    except RuntimeError:
        pass  # as on Gloo
    gathered = [torch.zeros(3) for _ in range(n)] if me.rank == 0 else None
    dist.gather(torch.full((3,), float(me.rank)), gathered)
    assert gathered is None or [t[0].item() for t in gathered] == list(range(n))
    return on_switch()


def test_what_the_switch_has_not_goes_to_gloo(launch: Launch) -> None:
    assert launch(not_served, 3, at=ALONE).results() == [0] * 3


def in_large(me: Me, machines: str) -> tuple[int, int]:
    init(me, machines)
    gathered = torch.empty(me.world_size * 300_000)
    dist.all_gather_single(gathered, torch.full((300_000,), float(me.rank)))
    assert gathered[::300_000].tolist() == list(range(me.world_size))
    return on_switch(), on_gloo()


@pytest.mark.parametrize(("machines", "lanes"), [("aa", 1), ("abab", 1), ("ab", 0), ("aab", 0)])
def test_in_large_the_ranks_gather_where_several_of_each_machine_speak(
    launch: Launch, machines: str, lanes: int
) -> None:
    n = len(machines)
    assert launch(in_large, n, machines, at=ALONE).results() == [(lanes, 1 - lanes)] * n


def unlike(me: Me, machines: str) -> None:
    init(me, machines)
    dist.broadcast(torch.ones(5 + me.rank), 0)


def another_root(me: Me, machines: str) -> None:
    init(me, machines)
    dist.broadcast(torch.ones(5), me.rank)


@pytest.mark.parametrize("machines", ["ab", "aa"])
def test_ranks_that_call_unlike_collectives_are_told_both(launch: Launch, machines: str) -> None:
    for body, one, other in (
        (unlike, "broadcast of 20 uint8", "broadcast of 24 uint8"),
        (another_root, "of rank 0", "of rank 1"),
    ):
        ranks = launch(body, 2, machines, at=ALONE)
        for rank in range(2):
            outcome = ranks.outcome(rank)
            assert isinstance(outcome, Failure)
            assert outcome.kind == "CollectiveMismatch"
            assert one in outcome.message
            assert other in outcome.message


def late(me: Me, machines: str) -> str:
    init(me, machines)
    if me.rank == 0:
        me.hear()
        return ""
    work: Any = dist.all_gather_single(torch.empty(8), torch.ones(4), async_op=True)
    with pytest.raises(errors.AllReduceTimeout) as caught:
        work.wait(timedelta(seconds=0.2))
    me.say("late")
    assert caught.value.tensor is not None
    return f"{caught.value.tensor.collective} {caught.value.missing_ranks}"


@pytest.mark.parametrize("machines", ["ab", "aa"])
def test_a_rank_that_does_not_come_is_named(launch: Launch, machines: str) -> None:
    ranks = launch(late, 2, machines, at=ALONE)
    assert ranks.hear(1) == "late"
    ranks.tell(0, "go")
    assert ranks.outcome(1) == "all_gather [0]"


def until_told(me: Me) -> int:
    """Sums for one, and back to all, of numbers that no other round has."""
    me.init(pg_options=Options(machine=f"machine {me.rank}", rate="1gbit"))
    n, done = me.world_size, 0
    while True:
        root = done % n
        ramp = torch.arange(200_000, dtype=torch.int32) + done
        tensor = ramp * (me.rank + 1)
        dist.reduce(tensor, root)
        total = ramp * (n * (n + 1) // 2)
        assert torch.equal(tensor, total if me.rank == root else ramp * (me.rank + 1))
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, total)
        scattered = torch.empty(200_000 // n, dtype=torch.int32)
        dist.reduce_scatter_single(scattered, tensor[: scattered.numel() * n].clone())
        assert torch.equal(scattered, n * total.narrow(0, me.rank * len(scattered), len(scattered)))
        done += 1
        me.say(done)
        if me.hear() == "stop":
            assert on_switch() == 3 * done
            return done


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_service_that_is_killed_costs_no_sum(launch: Launch, comes_back: bool) -> None:
    with SwitchProcess("--rate", "1gbit", "--shards", "1") as spare:
        ranks = launch(until_told, 3, at=spare.address)
        for round_ in range(12):
            for rank in range(3):
                assert ranks.hear(rank) == round_ + 1
            for rank in range(3):
                ranks.tell(rank, "stop" if round_ == 11 else "go")
            # In the midst of the next ones.
            if round_ in ((2, 5, 8) if comes_back else (3,)):
                spare.kill()
                if comes_back:
                    spare.start()
        assert ranks.results() == [12] * 3
