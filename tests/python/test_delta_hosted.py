"""Parameters in the ranks' own processes: who keeps how much, and who is missed."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launch, SwitchProcess
from fanin.torch import DeltaOptimizer
from fanin.torch.optimizers.delta_services import split
from layers import flat, layer
from ranks import Failure, Me
from torch import nn, optim


def made(me: Me, model: nn.Module, machine: int | None, **said: Any) -> Any:
    """An optimizer on a machine of this number (None: all ranks are on one)."""
    if machine is not None:
        os.environ["FANIN_MACHINE"] = f"m{machine}"
    me.init(said.pop("backend", "fanin"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return DeltaOptimizer(optim.SGD(model.parameters(), lr=1.0), **said)


def keeps_strangers_out(me: Me) -> None:
    os.environ["FANIN_SECURITY"] = "encrypt"
    with pytest.raises(ValueError, match="neither a secret nor encryption"):
        made(me, layer(0), None, backend="gloo")


def test_a_job_with_a_secret_hosts_no_parameters(launch: Launch) -> None:
    launch(keeps_strangers_out, 2).results()


# Eqs. 1 and 2.


@pytest.mark.parametrize("spares", range(5))
@pytest.mark.parametrize("machines", [3, 4, 8])
def test_shares_are_those_of_equations_1_and_2(machines: int, spares: int) -> None:
    n, k = machines, spares
    whole = n * n + k * n - 2 * k
    shares = split([None] * n, k)
    if k > n:
        assert shares == pytest.approx([0.0] * n + [1 / k] * k)
        return
    of_rank, of_spare = Fraction(n - k, whole), Fraction(2 * (n - 1), whole)
    expected = [of_rank] * n + [of_spare] * k
    assert shares == pytest.approx([float(share) for share in expected], abs=1e-9)


def test_a_machine_with_a_fast_link_keeps_more() -> None:
    slow, other, fast = split([10**9, 10**9, 3 * 10**9], 0)
    assert slow == pytest.approx(other)
    assert fast > slow
    assert split([10**9, None], 0) == pytest.approx([0.5, 0.5])


def kept(me: Me, backend: str, spares: str | None) -> dict[str, Any]:
    model = layer(me.rank)
    # Ranks 2 and 3 are on one machine, and rank 2 hosts its part.
    optimizer = made(me, model, min(me.rank, 2), backend=backend, spares=spares)
    begun = flat(model)
    for _ in range(2 * me.rank + 1):
        optimizer.step()
    hosts = optimizer._own is not None
    optimizer.close()
    return {"begun": begun, "ended": flat(model), "hosts": hosts}


@pytest.mark.parametrize("backend", ["fanin", "gloo"])
@pytest.mark.parametrize("spares", [0, 1])
def test_ranks_keep_the_parameters_until_all_have_closed(
    launch: Launch, backend: str, spares: int
) -> None:
    with SwitchProcess(command="parameters") as spare:
        ranks = launch(kept, 4, backend, spare.address if spares else None).results()
    begun = flat(layer(0))
    assert torch.equal(ranks[0]["begun"], begun), "rank 0 began before it saw others"
    for got in ranks:
        # Rank 0 is done after one step, and the others' 15 are in.
        torch.testing.assert_close(got["ended"], begun - 16.0)
        assert torch.equal(got["ended"], ranks[0]["ended"])
    assert [got["hosts"] for got in ranks] == [True, True, True, False]


def on_one_machine(me: Me, overlap: bool) -> torch.Tensor:
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model = nn.ParameterList([double, nn.Parameter(torch.zeros(3))])
    optimizer = made(me, model, None, overlap=overlap)
    assert (optimizer._own is not None) == (me.rank == 0)
    for _ in range(3):
        optimizer.step()
    optimizer.close()
    return torch.cat([each.detach().double() for each in model])


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_of_one_machine_have_one_service(launch: Launch, overlap: bool) -> None:
    for ended in launch(on_one_machine, 2, overlap).results():
        assert (ended == -6.0).all()


# Ranks that are gone.


def while_one_is_lost(me: Me, overlap: bool) -> Any:
    model = layer(0)
    # Ranks 1 and 2 are on one machine: rank 1 hosts its part.
    optimizer = made(me, model, min(me.rank, 1), overlap=overlap)
    optimizer.step()
    me.say("in")
    me.hear()
    for _ in range(5):
        optimizer.step()
    me.say(flat(model))
    me.hear()
    optimizer.step()
    optimizer.pull()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_dead_host_ends_the_training_with_its_name_and_the_cure(
    launch: Launch, overlap: bool
) -> None:
    ranks = launch(while_one_is_lost, 3, overlap)
    for rank in range(3):
        assert ranks.hear(rank) == "in"
    # This one hosts nothing, and nobody misses it.
    ranks.kill(2)
    for rank in range(2):
        ranks.tell(rank, "go on")
        ranks.hear(rank)
    ranks.kill(1)
    ranks.tell(0, "go on")
    ended = ranks.outcome(0)
    assert isinstance(ended, Failure)
    assert ended.kind == "RankLost"
    assert ended.fields["rank"] == 1
    assert "a checkpoint" in ended.message
    assert "fanin parameters --snapshots" in ended.message


def without_close(me: Me) -> Any:
    optimizer = made(me, layer(0), me.rank)
    optimizer.step()
    if me.rank == 1:
        return
    me.hear()
    optimizer.step()


def test_a_host_that_ends_without_close_is_named(launch: Launch) -> None:
    ranks = launch(without_close, 2)
    ranks.result(1)
    ranks.processes[1].join()
    ranks.tell(0, "go on")
    ended = ranks.outcome(0)
    assert isinstance(ended, Failure)
    assert ended.kind == "RankLost"
    assert ended.fields["rank"] == 1
    assert "before all ranks had called close()" in ended.message


def refused(me: Me) -> None:
    me.init()
    inner = optim.SGD(layer(0).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="name one"):
        DeltaOptimizer(inner, "127.0.0.1:1", spares="127.0.0.1:2")
    with pytest.raises(ValueError, match="rank 1 names 1 spare services, and rank 0 0"):
        DeltaOptimizer(inner, spares=None if me.rank == 0 else "127.0.0.1:1")
    with pytest.raises(ValueError, match="0 spare services, and rank 0 1 parameter services"):
        DeltaOptimizer(inner, "127.0.0.1:1" if me.rank == 0 else None)
    dist.barrier()


def test_ranks_that_say_unlike_things_are_refused(launch: Launch) -> None:
    launch(refused, 2).results()


def forked(me: Me) -> torch.Tensor:
    model = layer(0)
    optimizer = made(me, model, me.rank)
    child = os.fork()
    if child == 0:
        del optimizer  # it stops nothing, and waits for nothing
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    optimizer.close()
    return flat(model)


def test_a_forked_child_ends_without_its_parents_service(launch: Launch) -> None:
    for ended in launch(forked, 2).results():
        torch.testing.assert_close(ended, flat(layer(0)) - 2.0)
