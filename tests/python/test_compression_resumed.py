"""Trainings with compressed gradients that go on from a checkpoint as if nothing had happened."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import fanin.torch
import pytest
import torch
from conftest import Launch
from fanin._settings import PACKED, Packed
from fanin.torch.compression import Compressor, Dithering, OneBit, RandomK, TopK
from ranks import Me
from test_compression import Network, batches
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SAVED, STEPS = 5, 12


def through_a_file(state: Mapping[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def compressing(compressor: Compressor, mode: str) -> fanin.torch.CompressionState:
    momentum, feedback = 0.5 if mode == "momentum" else 0.0, mode != "without feedback"
    return fanin.torch.CompressionState(
        compressor, momentum=momentum, error_feedback=feedback, min_bytes=5000
    )


class Run:
    """One training, whose batches are the same in each run."""

    def __init__(self, me: Me, state: Any, hook: Any, network: nn.Module) -> None:
        self.me, self.state, self.network = me, state, network
        self.model = DistributedDataParallel(network, bucket_cap_mb=0.02)
        self.model.register_comm_hook(state, hook)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def steps(self, begin: int, end: int) -> list[Tensor]:
        for x, y in list(batches(self.me.rank, end))[begin:]:
            self.optimizer.zero_grad()
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def saved(self) -> Any:
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "compression": self.state.state_dict(),
        }
        return through_a_file(state)

    def load(self, saved: Any) -> None:
        saved = through_a_file(saved)  # an optimizer goes on in the tensors that it is given
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["compression"])


def interrupted(me: Me, compressor: Compressor, mode: str, at: int) -> bool:
    me.init("gloo" if mode == "gloo" else "fanin")

    def begun(seed: int) -> Run:
        torch.manual_seed(seed)
        state = compressing(compressor, mode)
        return Run(me, state, fanin.torch.compression_hook, Network())

    whole = begun(3)
    whole.steps(0, at)
    saved = whole.saved()
    expected = whole.steps(at, STEPS)
    again = begun(4)
    again.load(saved)
    # Nothing of it is lost if it is saved once more before the first step.
    assert str(again.saved()["compression"]) == str(saved["compression"])
    found = again.steps(at, STEPS)
    # And back, with the buckets that DDP has formed meanwhile.
    whole.load(saved)
    back = whole.steps(at, STEPS)
    if at >= 2:
        buckets = saved["compression"]["buckets"]
        assert len(buckets) > 1
        in_order = [number for bucket in buckets for number in bucket]
        assert in_order != sorted(in_order), "else DDP's first step would be as the others"
    without = begun(4)
    without.network.load_state_dict(saved["network"])
    without.optimizer.load_state_dict(through_a_file(saved["optimizer"]))
    if at >= 2:
        assert not equal(without.steps(at, STEPS), expected), "a checkpoint that says nothing"
    return equal(found, expected) and equal(back, expected)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


CASES: list[tuple[Compressor, str]] = [
    *((each, "plain") for each in (OneBit(), TopK(0.1), RandomK(0.1), Dithering(7))),
    (OneBit(), "momentum"),
    (OneBit(), "gloo"),
    (Dithering(7), "without feedback"),
    (RandomK(0.1), "without feedback"),
]


@pytest.mark.parametrize(("compressor", "mode"), CASES, ids=str)
def test_a_training_goes_on_from_a_checkpoint_with_the_same_bits(
    launch: Launch, compressor: Compressor, mode: str
) -> None:
    assert launch(interrupted, 2, compressor, mode, SAVED).results() == [True, True]


def after_one_step(me: Me) -> bool:
    """Whether a checkpoint of before DDP formed its buckets has the momentum, and trains."""
    me.init()
    torch.manual_seed(3)
    run = Run(me, compressing(OneBit(), "momentum"), fanin.torch.compression_hook, Network())
    run.steps(0, 1)
    saved = run.saved()
    assert saved["compression"]["buckets"] == []
    again = Run(me, compressing(OneBit(), "momentum"), fanin.torch.compression_hook, Network())
    again.load(saved)
    again.steps(1, 4)
    velocities = saved["compression"]["velocities"]
    return len(velocities) == 6 and again.state.state_dict()["step"] == 3


def test_a_checkpoint_of_the_first_step_has_the_momentum(launch: Launch) -> None:
    assert launch(after_one_step, 2).results() == [True, True]


def refused(me: Me) -> None:
    me.init()
    run = Run(me, compressing(OneBit(), "momentum"), fanin.torch.compression_hook, Network())
    run.steps(0, 3)
    saved = run.state.state_dict()
    state = compressing(OneBit(), "momentum")
    damaged = {**saved, "unsent": {0: (torch.zeros(3), torch.zeros(1, 3))}}
    for wrong, said in (
        ({}, "no checkpoint that CompressionState.state_dict"),
        ({**saved, "compressor": "TopK(0.1)"}, r"of compressor TopK\(0.1\), and this .* OneBit"),
        ({**saved, "ranks": 3}, "of ranks 3, and this state of 2: each rank loads"),
        ({**saved, "rank": 1 - me.rank}, "of rank .*, and this state of .: each rank loads"),
        (damaged, "the checkpoint is damaged"),
        ({**saved, "velocities": {77: torch.zeros(1)}}, "the checkpoint is damaged"),
        ({**saved, "buckets": [[0], [0]]}, "the checkpoint is damaged"),
    ):
        with pytest.raises(ValueError, match=said):
            run.state.load_state_dict(wrong)
        with pytest.raises(ValueError, match=said):
            state.load_state_dict(wrong)
    assert str(run.state.state_dict()) == str(saved), "nothing is half loaded"
    assert state.state_dict()["step"] == 0
    state.load_state_dict(saved)
    other = Run(me, state, fanin.torch.compression_hook, nn.Linear(32, 8))
    with pytest.raises(ValueError, match="the checkpoint is of another model"):
        other.steps(0, 1)


def test_a_checkpoint_that_does_not_fit_is_refused_whole(launch: Launch) -> None:
    launch(refused, 2).results()


def loaded_by_one(me: Me) -> None:
    me.init()
    run = Run(me, compressing(OneBit(), "plain"), fanin.torch.compression_hook, Network())
    run.steps(0, 3)
    saved = run.state.state_dict()
    again = Run(me, compressing(OneBit(), "plain"), fanin.torch.compression_hook, Network())
    if me.rank == 0:
        again.state.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"the ranks compress gradients differently: .* at step 4"):
        again.steps(0, 1)


def test_a_checkpoint_that_one_rank_has_not_loaded_is_told_of_on_all(launch: Launch) -> None:
    launch(loaded_by_one, 2).results()


class Two(nn.Module):
    """Gradients of one rank alone: what they say travels unchanged, and no sum is rounded."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(8192)), nn.Parameter(torch.zeros(9600))
        dice = torch.Generator().manual_seed(7)
        self.of_a, self.of_b = (
            torch.randn(each.numel(), generator=dice) * scale for each in (self.a, self.b)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * ((self.a * self.of_a).sum() + (self.b * self.of_b).sum())


def hooked(me: Me, wire_dtype: Packed) -> bool:
    me.init("gloo")

    def begun() -> tuple[Two, DistributedDataParallel, fanin.torch.HookState]:
        network = Two(1.0 if me.rank == 0 else 0.0)
        model = DistributedDataParallel(network)
        state = fanin.torch.HookState(wire_dtype=wire_dtype)
        model.register_comm_hook(state, fanin.torch.allreduce_hook)
        return network, model, state

    def steps(network: Two, model: nn.Module, count: int) -> list[Tensor]:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for step in range(count):
            optimizer.zero_grad()
            model(torch.ones(4) * (1 + step % 3)).backward()
            optimizer.step()
        return [network.a.detach().clone(), network.b.detach().clone()]

    network, model, state = begun()
    steps(network, model, 3)
    saved = through_a_file(state.state_dict())
    weights = {name: each.clone() for name, each in network.state_dict().items()}
    expected = steps(network, model, 6)
    other, again, new = begun()
    other.load_state_dict(weights)
    new.load_state_dict(saved)
    assert str(through_a_file(new.state_dict())) == str(saved)
    mistakes: list[tuple[Any, str]] = [
        ({**saved, "wire_dtype": "native"}, "the checkpoint is of wire_dtype native"),
        ({**saved, "rank": 1 - me.rank}, "each rank loads what it saved itself"),
        ({}, "this is no checkpoint"),
        ([], "this is no checkpoint"),
        ({**saved, "residuals": None}, "the checkpoint is damaged"),
        ({**saved, "residuals": [{"number": 0}]}, "the checkpoint is damaged"),
    ]
    for wrong, said in mistakes:
        with pytest.raises(ValueError, match=said):
            new.load_state_dict(wrong)
    found = steps(other, again, 6)
    with pytest.raises(RuntimeError, match="before the first backward pass"):
        new.load_state_dict(saved)
    third, unloaded, empty = begun()
    third.load_state_dict(weights)
    if me.rank == 0:
        assert saved["residuals"][0]["missing"].any()
    assert not equal(steps(third, unloaded, 6), expected), "a checkpoint that says nothing"
    for each in (state, new, empty):
        each.close()
    return equal(found, expected)


@pytest.mark.parametrize("wire_dtype", PACKED)
def test_what_rounding_took_is_in_a_checkpoint(launch: Launch, wire_dtype: Packed) -> None:
    assert launch(hooked, 2, wire_dtype).results() == [True, True]
