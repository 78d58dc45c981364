"""Gradients in fewer bytes: what compressors promise, and DDP's hook with real ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin import errors
from fanin.torch.compression import Compressor, Dithering, OneBit, RandomK, TopK, TwoWay, codes
from fanin.torch.compression.compressors import check_gradient
from fanin.torch.compression.cut import Cut
from fanin.torch.compression.memory import Memory, Momentum, is_finite
from ranks import Failure, Me, sums_on_switch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
TWO_WAY: list[TwoWay] = [
    OneBit(),
    OneBit(scaling=False),
    TopK(0.05),
    TopK(40),
    Dithering(1),
    Dithering(7),
    Dithering(127),
    Dithering(5, partition="natural"),
    Dithering(64, normalize="l2"),
]
ALL: list[Compressor] = [*TWO_WAY, RandomK(0.05), RandomK(40)]
# Compressors that error feedback leaves in bounds; BytePS, too, warns of "l2" (and signs alone are
# no gradient).
STEADY = [OneBit(), TopK(0.1), Dithering(7), Dithering(5, partition="natural"), RandomK(0.1)]


def gradient(seed: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exchanged(
    compressor: Compressor, memories: Sequence[Memory], gradients: Sequence[Tensor], seed: int
) -> Tensor:
    """What the ranks make of their gradients, all of them in this process."""
    cut = memories[0].cut
    if isinstance(compressor, RandomK):
        drawn = [
            memory.drawn(each, compressor, dice(seed))
            for memory, each in zip(memories, gradients, strict=True)
        ]
        assert all(torch.equal(indices, drawn[0][0]) for indices, _ in drawn)
        average = torch.zeros(cut.elements)
        average[drawn[0][0]] = torch.stack([values for _, values in drawn]).mean(0)
        return average
    assert isinstance(compressor, TwoWay)
    sent = torch.stack(
        [
            memory.messages(each, compressor, dice(1000 * seed + rank))
            for rank, (memory, each) in enumerate(zip(memories, gradients, strict=True))
        ]
    )
    sums = [
        memory.sum_message(sent[:, rank].contiguous(), compressor, dice(1000 * seed + 500 + rank))
        for rank, memory in enumerate(memories)
    ]
    return memories[0].average(torch.cat(sums), compressor)


def memories_of(elements: int, world_size: int, feedback: bool) -> list[Memory]:
    cut = Cut.of(elements, world_size)
    return [Memory(cut, rank, CPU, feedback) for rank in range(world_size)]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_are_read_as_the_values_that_they_stand_for(bits: int) -> None:
    values = tuple(float(3 * code - 7) for code in range(2**bits))
    written = torch.randint(2**bits, (3, 2, 64), dtype=torch.uint8, generator=dice())
    packed = codes.pack(written, bits)
    assert packed.shape == (3, 2, 64 * bits // 8)
    assert torch.equal(codes.unpack(packed, values, bits), 3.0 * written - 7)
    if bits > 1:
        assert codes.unpack(codes.pack(written, bits), values[:-1], bits).isnan().any()


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("elements", [1000, 5003])
def test_nothing_is_lost_it_is_only_sent_later(compressor: Compressor, elements: int) -> None:
    """What was sent, and what is left at ranks and at the owners of sums: all that there was."""
    memories = memories_of(elements, 3, feedback=True)
    sent, given = torch.zeros(elements), torch.zeros(elements)
    for step in range(6):
        gradients = [gradient(10 * step + rank, elements) for rank in range(3)]
        given += torch.stack(gradients).mean(0)
        sent += exchanged(compressor, memories, gradients, step)
    unsent = [memory._unsent for memory in memories]
    left = torch.stack([each for each in unsent if each is not None]).mean(0)
    if isinstance(compressor, TwoWay):
        of_sums = [memory._unsent_of_sum for memory in memories]
        left += torch.cat([each for each in of_sums if each is not None]).view(-1)
    assert torch.equal(left[elements:], torch.zeros(len(left) - elements))
    size = max(1.0, *(each.abs().max().item() for each in unsent if each is not None))
    torch.testing.assert_close(sent + left[:elements], given, atol=1e-5 * size, rtol=0)


def test_what_is_largest_is_sent_first_and_exactly() -> None:
    values = gradient(1, 4000)
    memories = memories_of(4000, 4, feedback=False)
    average = exchanged(TopK(0.01), memories, [values] * 4, 0)
    for shard, all_of_it in zip(average.chunk(4), values.chunk(4), strict=True):
        kept = shard.nonzero().view(-1)
        assert torch.equal(shard[kept], all_of_it[kept])
        assert len(kept) == 10
        assert all_of_it[kept].abs().min() >= all_of_it[shard == 0].abs().max()


def test_a_sign_is_worth_the_mean_magnitude_of_its_block() -> None:
    cut = Cut.of(2048, 1)
    rows = torch.cat([gradient(1, 1024), 100 * gradient(2, 1024)]).view(1, -1)
    read = OneBit().decompress(OneBit().compress(rows, cut, dice()), cut)
    for half, of in zip(read.chunk(2, dim=1), rows.chunk(2, dim=1), strict=True):
        torch.testing.assert_close(half, of.sign() * of.abs().mean())


@pytest.mark.parametrize("rest", [1, 100])
def test_the_end_of_a_bucket_counts_as_much_as_the_rest_of_it(rest: int) -> None:
    elements = 2 * 1024 + rest
    for world_size in (1, 2):
        memories = memories_of(elements, world_size, feedback=False)
        average = exchanged(OneBit(), memories, [torch.ones(elements)] * world_size, 0)
        torch.testing.assert_close(average, torch.ones(elements))


@pytest.mark.parametrize("elements", [1, 9, 1000, 4097, 4810, 17_000, 70_000])
@pytest.mark.parametrize("world_size", [1, 2, 4, 16, 64])
def test_as_many_are_sent_as_were_asked_for_wherever_a_bucket_ends(
    elements: int, world_size: int
) -> None:
    cut = Cut.of(elements, world_size)
    filled = cut.padded - elements
    assert 0 <= filled < world_size * 8 * (cut.length // cut.block)
    for k in (1, 0.01, 0.3, elements):
        asked = k if isinstance(k, int) else max(1, round(k * elements))
        memories = memories_of(elements, world_size, feedback=False)
        average = exchanged(TopK(k), memories, [torch.ones(elements)] * world_size, 0)
        assert asked <= average.count_nonzero() <= asked + world_size


@pytest.mark.parametrize("compressor", [TopK(0.1), Dithering(7), RandomK(0.1)], ids=str)
def test_huge_gradients_that_are_finite_stay_so(compressor: Compressor) -> None:
    gradients = [torch.full((3000,), 1e37)] * 2
    average = exchanged(compressor, memories_of(3000, 2, feedback=True), gradients, 0)
    assert average.isfinite().all()
    assert average.any()


UNBIASED: list[Compressor] = [
    Dithering(3),
    Dithering(3, partition="natural"),
    Dithering(3, normalize="l2"),
    RandomK(0.25),
    RandomK(7),
]


@pytest.mark.parametrize("compressor", UNBIASED, ids=str)
def test_chance_is_right_in_the_mean(compressor: Compressor) -> None:
    """Seeds are fixed: the mean of so many draws is within five of its standard errors."""
    elements, draws = 64, 8000
    values = gradient(3, elements)
    values[:4] = torch.tensor([0.0, 0.05, -0.05, 2.5])
    cut, chance = Cut.of(elements, 1), dice()
    if isinstance(compressor, RandomK):
        found = torch.zeros(draws, elements)
        for draw in found:
            memory = Memory(cut, 0, CPU, feedback=False)
            indices, drawn = memory.drawn(values, compressor, chance)
            draw[indices] = drawn
    else:
        assert isinstance(compressor, TwoWay)
        messages = compressor.compress(values.repeat(draws, 1), cut, chance)
        found = compressor.decompress(messages, cut)
    allowed = 5 * found.double().std(0) / draws**0.5 + 1e-4 * values.abs().max()
    assert ((found.double().mean(0) - values).abs() <= allowed).all()


@pytest.mark.parametrize("k", [1, 7, 0.3, 999, 1000])
def test_each_element_is_drawn_as_often_and_none_twice(k: int | float) -> None:
    counted = torch.zeros(1000)
    for seed in range(50):
        indices, lengths = RandomK(k).draw(1000, dice(seed))
        assert lengths.sum() == 1000
        assert (indices.diff() > 0).all()
        assert indices[0] >= 0
        assert indices[-1] < 1000
        counted[indices] += lengths
    assert counted.sum() == 50 * 1000


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_what_is_not_finite_stays_so_and_is_over_in_the_next_step(
    compressor: Compressor, feedback: bool, poison: float
) -> None:
    memories = memories_of(5000, 3, feedback)
    for step in range(4):
        gradients = [gradient(10 * step + rank, 5000) for rank in range(3)]
        if step == 1:
            gradients[1][2500] = poison
        average = exchanged(compressor, memories, gradients, step)
        assert bool(is_finite(average)) == bool(average.isfinite().all()) == (step != 1)
        if step == 1:  # as the hook does
            memories = memories_of(5000, 3, feedback)


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_nothing_comes_of_nothing(compressor: Compressor) -> None:
    memories = memories_of(3000, 2, feedback=True)
    average = exchanged(compressor, memories, [torch.zeros(3000)] * 2, 0)
    if compressor != OneBit(scaling=False):  # it has no zero
        assert torch.equal(average, torch.zeros(3000))
    tiny = exchanged(compressor, memories, [torch.full((3000,), 1e-42)] * 2, 1)
    assert tiny.isfinite().all()


@pytest.mark.parametrize("compressor", [OneBit(), TopK(0.1), Dithering(7), RandomK(0.1)], ids=str)
def test_a_quadratic_is_minimised_with_error_feedback(compressor: Compressor) -> None:
    """Each rank has a minimum of its own: only their mean's gradients vanish at the sum's."""
    elements, world_size = 1200, 3
    minima = [gradient(rank, elements) for rank in range(world_size)]
    curvature = 0.2 + gradient(9, elements).abs().clamp(max=0.8)
    memories = memories_of(elements, world_size, feedback=True)
    point = torch.zeros(elements)
    goal = torch.stack(minima).mean(0)
    first = (point - goal).norm()
    for step in range(600):
        rate = 0.05 if step < 400 else 0.005
        gradients = [curvature * (point - minimum) for minimum in minima]
        point = point - rate * exchanged(compressor, memories, gradients, step)
    assert (point - goal).norm() < 0.05 * first


def test_momentum_is_nesterovs() -> None:
    parameter = torch.zeros(100, requires_grad=True)
    expected = torch.zeros(100, requires_grad=True)
    ours = torch.optim.SGD([parameter], lr=0.1)
    torchs = torch.optim.SGD([expected], lr=0.1, momentum=0.9, nesterov=True)
    momentum = Momentum(0.9)
    for step in range(5):
        flat = gradient(step, 100)
        expected.grad = flat.clone()
        momentum.add_to([parameter], [flat])
        parameter.grad = flat
        ours.step()
        torchs.step()
    torch.testing.assert_close(parameter, expected)
    momentum.forget()
    flat = gradient(5, 100)
    momentum.add_to([parameter], [flat])
    torch.testing.assert_close(flat, 1.9 * gradient(5, 100))


@pytest.mark.parametrize("compressor", ALL, ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_bytes_that_are_told_are_those_of_the_messages(
    compressor: Compressor, world_size: int
) -> None:
    cut = Cut.of(100_000, world_size)
    memory = Memory(cut, 0, CPU, feedback=True)
    values = gradient(0, 100_000)
    if isinstance(compressor, RandomK):
        payload = memory.drawn(values, compressor, dice())[1].nbytes
        sent = 2 * (world_size - 1) * payload // world_size
    else:
        assert isinstance(compressor, TwoWay)
        messages = memory.messages(values, compressor, dice())
        own = memory.sum_message(messages, compressor, dice())
        sent = (world_size - 1) * (messages[0].nbytes + own.nbytes)
    assert compressor.sent_bytes(cut) == sent
    assert sent < values.nbytes


def test_what_cannot_be_is_refused_with_what_can() -> None:
    for k in (0, -1, 0.0, 1.0, 1.5, float("nan"), True):
        with pytest.raises(ValueError, match=r"give a number of elements, 1 or more|write 1"):
            TopK(k)
        with pytest.raises(ValueError, match=r"give a number of elements, 1 or more|write 1"):
            RandomK(k)
    for k in (0, 128, 0.5):
        with pytest.raises(ValueError, match="1, 7 and 127 fill 2, 4 and 8 bits"):
            Dithering(k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="linear or natural, not 'log'"):
        Dithering(7, partition="log")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max or l2, not 'l1'"):
        Dithering(7, normalize="l1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a bucket has 10 elements: give a part, as 0\.01"):
        TopK(11).check(10)
    with pytest.raises(TypeError, match="train in float32, or without compression"):
        check_gradient(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(TypeError, match="Embedding with sparse=False does"):
        check_gradient(torch.zeros(2, 2).to_sparse())
    with pytest.raises(TypeError, match=r"gradients of torch\.int32 are not compressed"):
        check_gradient(torch.zeros(1, dtype=torch.int32))
    given: Any = "onebit"
    with pytest.raises(TypeError, match=r"give one of fanin\.torch\.compression's"):
        fanin.torch.CompressionState(given)
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"momentum": 1.0}, "momentum is 1.0: at least 0, and below 1"),
        ({"uncompressed_steps": 0}, "DDP forms its buckets anew"),
        ({"min_bytes": -1}, "min_bytes is -1"),
    ]
    for wrong, said in wrongs:
        with pytest.raises(ValueError, match=said):
            fanin.torch.CompressionState(OneBit(), **wrong)


# DDP, over fanin.


class Network(nn.Module):
    """Buckets of some sizes; one layer is used in even steps alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 96)
        self.sometimes = nn.Linear(96, 96)
        self.last = nn.Linear(96, 8)

    def forward(self, x: Tensor, all_of_it: bool = True) -> Tensor:
        x = self.first(x).tanh()
        x = self.sometimes(x).tanh() if all_of_it else x
        out: Tensor = self.last(x)
        return out


def model_of(state: fanin.torch.CompressionState, **keywords: Any) -> DistributedDataParallel:
    torch.manual_seed(3)
    network = Network().to(keywords.pop("dtype", torch.float32))
    model = DistributedDataParallel(network, bucket_cap_mb=0.02, **keywords)
    model.register_comm_hook(state, fanin.torch.compression_hook)
    return model


def batches(rank: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    where = torch.get_default_device()  # the numbers are the same on all
    truth = torch.randn(32, 8, generator=dice(99), device="cpu").to(where)
    own = dice(rank)
    for _ in range(steps):
        x = torch.randn(16, 32, generator=own, device="cpu").to(where)
        yield x, x @ truth


def train(me: Me, compressor: Compressor, mode: str) -> tuple[list[Tensor], list[float]]:
    me.init("gloo" if mode == "gloo" else "fanin")
    dtype = getattr(torch, mode) if mode in ("bfloat16", "float16") else torch.float32
    momentum = 0.5 if mode == "momentum" else 0.0
    keywords = {
        name: mode == name for name in ("find_unused_parameters", "gradient_as_bucket_view")
    }
    unused = mode == "find_unused_parameters"
    state = fanin.torch.CompressionState(compressor, momentum=momentum, min_bytes=5000)
    model = model_of(state, dtype=dtype, **keywords)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step, (x, y) in enumerate(batches(me.rank, 60)):
        optimizer.zero_grad()
        out = model(x.to(dtype), not unused or step % 2 == 0)
        loss = (out - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [parameter.detach() for parameter in model.parameters()], losses


CASES: list[tuple[Compressor, str]] = [
    *((compressor, "plain") for compressor in STEADY),
    (OneBit(), "gloo"),
    (OneBit(), "bfloat16"),
    (OneBit(), "float16"),
    (RandomK(0.1), "float16"),
    (TopK(0.1), "find_unused_parameters"),
    (RandomK(0.1), "find_unused_parameters"),
    (OneBit(), "gradient_as_bucket_view"),
    (OneBit(), "momentum"),
]


@pytest.mark.parametrize(("compressor", "mode"), CASES, ids=str)
def test_ranks_train_with_the_same_bits(launch: Launch, compressor: Compressor, mode: str) -> None:
    by_rank = launch(train, 3, compressor, mode).results()
    for parameters, losses in by_rank:
        assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
        for one, other in zip(parameters, by_rank[0][0], strict=True):
            assert torch.equal(one, other)


def counted(me: Me, compressor: Compressor) -> list[int]:
    """How many collectives the services have served after each of some steps, with one bucket."""
    me.init()
    group: Any = dist.group.WORLD
    backend: Any = group._get_backend(CPU)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    state = fanin.torch.CompressionState(compressor, min_bytes=0)
    model.register_comm_hook(state, fanin.torch.compression_hook)
    found = []
    for _ in range(4):
        model(torch.randn(4, 64)).sum().backward()
        found.append(backend._on_switch)
    return found


@pytest.mark.parametrize("compressor", [RandomK(100), OneBit()], ids=str)
def test_what_can_be_added_up_is_and_the_rest_is_gathered_by_the_services(
    launch: Launch, compressor: Compressor
) -> None:
    """A sum a step, or a gathering of sums: the shards' way to their owners is Gloo's."""
    for found in launch(counted, 2, compressor).results():
        # DDP tells all ranks its new buckets after the first.
        assert [later - sooner for sooner, later in pairwise(found[1:])] == [1, 1]


@pytest.mark.parametrize("compressor", [TopK(0.1), RandomK(0.1)], ids=str)
def test_a_rank_by_itself_trains(launch: Launch, compressor: Compressor) -> None:
    ((_, losses),) = launch(train, 1, compressor, "plain").results()
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def poisoned(me: Me, compressor: Compressor) -> list[bool]:
    """Whether all gradients are finite, after each of some steps; rank 1 has a NaN in one."""
    me.init()
    model = model_of(fanin.torch.CompressionState(compressor, min_bytes=5000))
    found = []
    for step, (x, y) in enumerate(batches(me.rank, 5)):
        model.zero_grad()
        if step == 3 and me.rank == 1:
            x[3, 3] = torch.nan
        (model(x) - y).square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(all(bool(each.isfinite().all()) for each in gradients))
    return found


@pytest.mark.parametrize("compressor", [OneBit(), TopK(0.01), RandomK(0.01)], ids=str)
def test_one_ranks_nan_is_told_to_all_ranks(launch: Launch, compressor: Compressor) -> None:
    for found in launch(poisoned, 2, compressor).results():
        assert found == [True, True, True, False, True]


class Given(nn.Module):
    """Parameters whose gradients are what is handed to `forward`."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.of = nn.ParameterList(torch.zeros(length) for length in lengths)

    def forward(self, *gradients: float) -> Tensor:
        each = zip(self.of, gradients, strict=True)
        return torch.stack([(parameter * number).sum() for parameter, number in each]).sum()


def averages_after_a_skip(me: Me, compressor: Compressor, momentum: float) -> list[float]:
    """The magnitude of each bucket's average, once steps are zero after one that is skipped."""
    me.init("gloo")
    state = fanin.torch.CompressionState(compressor, momentum=momentum, min_bytes=5000)
    # The last one is sent as it is.
    model = DistributedDataParallel(Given(4000, 3000, 10), bucket_cap_mb=0.01)
    model.register_comm_hook(state, fanin.torch.compression_hook)
    found = []
    for step in range(6):
        model.zero_grad()
        one = float(step < 4)
        poison = torch.inf if step == 3 and me.rank == 1 else one
        model(one, poison, one).backward()
        found += [p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None]
    assert not all(map(math.isfinite, found[9:12]))
    assert all(map(math.isfinite, found[:9]))
    return found[12:]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("compressor", [TopK(0.01), OneBit(), RandomK(0.01)], ids=str)
def test_of_a_step_that_is_skipped_nothing_comes_later(
    launch: Launch, compressor: Compressor, momentum: float
) -> None:
    for found in launch(averages_after_a_skip, 2, compressor, momentum).results():
        assert found == [0.0] * 6


def other_models(me: Me) -> list[str]:
    """What is said when the gradients of others come to a state."""
    me.init("gloo")

    def wrapped(network: nn.Module, state: fanin.torch.CompressionState, cap: float) -> Any:
        model = DistributedDataParallel(network, bucket_cap_mb=cap)
        model.register_comm_hook(state, fanin.torch.compression_hook)
        return model

    said = []
    for steps in (1, 2, 3):
        state = fanin.torch.CompressionState(TopK(0.1), min_bytes=0)
        network = Given(2000, 2000)
        model = wrapped(network, state, 25)
        for _ in range(steps):
            model(1.0, 1.0).backward()
        others = [wrapped(Given(2000, 2000), state, 25)]
        if steps == 3:
            others.append(wrapped(network, state, 0.001))
        for other in others:
            with pytest.raises(ValueError, match="one DistributedDataParallel") as raised:
                other(1.0, 1.0).backward()
            said.append(str(raised.value))
    return said


def test_a_state_of_another_model_is_refused_with_what_to_do(launch: Launch) -> None:
    for said in launch(other_models, 2).results():
        assert len(said) == 4
        assert all("Make one for each model, and a new one" in each for each in said)


def without_elements(me: Me) -> float:
    me.init()
    model = DistributedDataParallel(Given(0))
    state = fanin.torch.CompressionState(OneBit(), momentum=0.5, min_bytes=0)
    model.register_comm_hook(state, fanin.torch.compression_hook)
    for _ in range(3):
        model(1.0).backward()
    return float(sum(p.grad.numel() for p in model.parameters() if p.grad is not None))


def test_a_bucket_without_elements_is_averaged(launch: Launch) -> None:
    assert launch(without_elements, 2).results() == [0.0, 0.0]


def sparse(me: Me) -> None:
    me.init("gloo")
    model = DistributedDataParallel(nn.Embedding(100, 50, sparse=True))
    state = fanin.torch.CompressionState(OneBit(), min_bytes=0)
    model.register_comm_hook(state, fanin.torch.compression_hook)
    with pytest.raises(TypeError, match="make them dense"):
        model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused_in_the_first_step(launch: Launch) -> None:
    launch(sparse, 1).results()


def first_step(me: Me, own: Any, others: Any, dtype: torch.dtype = torch.float32) -> None:
    me.init()
    compressor, keywords = own if me.rank == 0 else others
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(200, 200).to(dtype))
    if compressor is not None:
        state = fanin.torch.CompressionState(compressor, min_bytes=0, **keywords)
        model.register_comm_hook(state, fanin.torch.compression_hook)
    for _ in range(2):
        model(torch.randn(4, 200, dtype=dtype)).sum().backward()


DISAGREED: list[tuple[Any, Any, str]] = [
    ((OneBit(), {}), (TopK(0.1), {}), r"ranks \[0\]: OneBit.*ranks \[1, 2\]: TopK\(k=0\.1\)"),
    ((TopK(0.1), {}), (TopK(0.2), {}), r"k=0\.1.*k=0\.2"),
    ((OneBit(), {"momentum": 0.5}), (OneBit(), {}), r"momentum=0\.5.*momentum=0\.0"),
]


@pytest.mark.parametrize(("own", "others", "said"), DISAGREED)
def test_all_ranks_are_told_that_they_compress_differently(
    launch: Launch, own: Any, others: Any, said: str
) -> None:
    ranks = launch(first_step, 3, own, others)
    for rank in range(3):
        failed = ranks.outcome(rank)
        assert isinstance(failed, Failure)
        assert failed.kind == "ValueError", failed.text
        assert re.search(said, failed.message), failed.message


def test_a_rank_that_does_not_compress_is_told_of_on_all_ranks(launch: Launch) -> None:
    ranks = launch(first_step, 2, (OneBit(), {}), (None, {}))
    for rank in range(2):
        failed = ranks.outcome(rank)
        assert isinstance(failed, Failure)
        assert failed.kind == errors.CollectiveMismatch.__name__, failed.text


REFUSED = [
    (TopK(50_000), torch.float32, "ValueError", "a bucket has 40200 elements: give a part"),
    (OneBit(), torch.float64, "TypeError", "train in float32, or without compression"),
]


@pytest.mark.parametrize(("compressor", "dtype", "kind", "said"), REFUSED)
def test_what_cannot_be_compressed_is_told_by_backward(
    launch: Launch, compressor: Compressor, dtype: torch.dtype, kind: str, said: str
) -> None:
    ranks = launch(first_step, 2, (compressor, {}), (compressor, {}), dtype)
    for rank in range(2):
        failed = ranks.outcome(rank)
        assert isinstance(failed, Failure)
        assert failed.kind == kind, failed.text
        assert said in failed.message


def until_killed(me: Me) -> None:
    me.init()
    model = model_of(fanin.torch.CompressionState(OneBit(), min_bytes=0))
    for step, (x, y) in enumerate(batches(me.rank, 10_000)):
        (model(x) - y).square().mean().backward()
        if step == 5:
            me.say("under way")


def test_a_rank_that_dies_ends_the_others_with_its_name(launch: Launch) -> None:
    ranks = launch(until_killed, 3)
    for rank in range(3):
        assert ranks.hear(rank) == "under way"
    ranks.kill(2)
    for rank in range(2):
        failed = ranks.outcome(rank)
        assert isinstance(failed, Failure)
        assert failed.kind == "RankLost", failed.text
        assert failed.fields["rank"] == 2


def outer(rank: int) -> tuple[Tensor, Tensor]:
    own = dice(rank)
    return torch.randn(1, 128, generator=own), torch.randn(1, 128, generator=own)


def error_of_powersgd(me: Me) -> float:
    """How far off PowerSGD's average of matrices is whose sum has its rank."""
    me.init()
    model = DistributedDataParallel(nn.Linear(128, 128, bias=False))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        x, factors = outer(me.rank)
        (model(x) * factors).sum().backward()
    of_ranks = [outer(rank) for rank in range(me.world_size)]
    exact = torch.stack([factors.T @ x for x, factors in of_ranks]).mean(0)
    (weight,) = model.parameters()
    assert weight.grad is not None
    assert sums_on_switch() > 4
    return float((weight.grad - exact).norm() / exact.norm())


def test_powersgd_by_torchs_own_hook_is_exact_of_what_has_its_rank(launch: Launch) -> None:
    assert max(launch(error_of_powersgd, 2).results()) < 1e-3
