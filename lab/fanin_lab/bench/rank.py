"""One rank of the benchmark: a process that does rounds as it is told, and checks every sum."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from fanin._settings import Said, variable
from fanin.torch import Options
from fanin.torch import lost as lost_of
from fanin.torch.backend import channel

from fanin_lab import netlab
from fanin_lab.bench.message import BOUNDED, Failed, Place, Round, Timing, Verdict
from fanin_lab.bench.pattern import offset, pattern


def play(place: Place, parent: Connection) -> None:
    """Be that rank until the parent hangs up."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # EOFError, OSError: the parent has hung up.
    with contextlib.suppress(EOFError, OSError):
        try:
            _play(place, parent)
        except EOFError:
            raise
        except Exception:
            parent.send(Failed(traceback.format_exc()))
    if variable("trace") in os.environ:
        # No session is closed here, which would write the rest of the timeline. Its own thread does
        # so every 50 ms.
        time.sleep(0.2)
    # No orderly farewell: other ranks may be gone already.
    os._exit(0)


def _play(place: Place, parent: Connection) -> None:
    if place.namespace is not None:
        netlab.enter(place.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    torch.set_num_threads(1)
    timeout = timedelta(seconds=place.timeout_s)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.rendezvous}",
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    groups: dict[str, Any] = {"gloo": dist.group.WORLD}
    if "fanin" in place.backends:
        os.environ.pop(variable("switch"), None)  # the user's: here sums only what was started here
        said = place.settings
        alike: Said = {
            "protocol": said.protocol,
            "congestion_control": said.congestion_control,
            "plan": said.plan,
            "rate": place.rate_bps,
        }
        # What the services do is measured, also where the backend would take Gloo for it.
        channel.ALL_GATHER_BYTES_MAX = sys.maxsize
        made: dict[str, Said] = {
            "fanin": {**alike, "wire_dtype": said.wire_dtype, "loss_bound": 0.0, "paths": 1}
        }
        if BOUNDED in place.backends:
            bounded: Said = {"loss_bound": said.loss_bound, "paths": said.paths}
            made[BOUNDED] = {**alike, **bounded}
        for name, own in made.items():
            options = Options(switch=place.switch, **own)
            groups[name] = dist.new_group(backend="fanin", timeout=timeout, pg_options=options)
    parent.send("joined")
    inputs: Inputs | None = None
    while True:
        round_, number = parent.recv()
        if inputs is None or not inputs.fit(round_):
            inputs = Inputs(round_, place)
        inputs.fill(number)
        parent.send("ready")
        begin: float = parent.recv()
        parent.send(_measure(inputs, groups[round_.backend], round_, begin))
        parent.send(inputs.verdict(number))


def _measure(inputs: Inputs, group: Any, round_: Round, begin: float) -> Timing:
    retransmissions = _retransmissions(group, round_.backend)
    contributions, lost = _loss(group, round_.backend)
    # The barrier: a moment that all ranks were told, on the clock that they share. A barrier of
    # messages would let the first rank go long before the last.
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu = time.process_time()
    began = time.monotonic()
    for call in inputs.calls:
        if round_.step:
            _step(inputs, group, round_, call)
        elif len(call) == 1:
            inputs.start(call[0], group, False)
        else:
            for work in [inputs.start(tensor, group, True) for tensor in call]:
                work.wait()
    ended = time.monotonic()
    cpu = time.process_time() - cpu
    again = _retransmissions(group, round_.backend) - retransmissions
    of_all, lost_of_all = _loss(group, round_.backend)
    return Timing(began, ended, cpu, again, of_all - contributions, lost_of_all - lost)


def _step(inputs: Inputs, group: Any, round_: Round, tensors: Sequence[torch.Tensor]) -> None:
    """Wait as long as is computed before each sum, and for all sums."""
    began = time.monotonic()
    works = []
    for asked, tensor in zip(round_.step, tensors, strict=True):
        # The time is what is played: as long as the training computes before this sum.
        time.sleep(max(0.0, began + asked.ready_s - time.monotonic()))
        works.append(inputs.start(tensor, group, True))
    for work in works:
        work.wait()


class Inputs:
    """The tensors of a rank: a known pattern, another one each round."""

    def __init__(self, round_: Round, place: Place) -> None:
        self._round = replace(round_, backend="")
        self._rank = place.rank
        self._slice = round_.elements // place.world_size
        dtype: torch.dtype = getattr(torch, round_.dtype)
        ramp = torch.arange(round_.elements, dtype=torch.int32)
        self._world_size = place.world_size
        # One pattern at a time: all of them on every rank would be more than a machine has.
        total, gathered = torch.zeros_like(ramp), torch.zeros_like(ramp)
        for rank in range(place.world_size):
            of_rank = pattern(rank, ramp)
            total += of_rank
            here = self._of(rank)
            gathered[here] = of_rank[here]
            if rank == 0:
                first = of_rank
            if rank == place.rank:
                self._mine = of_rank.to(dtype)
        expected = {"all_gather": gathered, "broadcast": first}.get(round_.collective, total)
        self._expected = expected.to(torch.float32)
        # How often what is written is in a result.
        self._times = 1 if round_.collective in ("all_gather", "broadcast") else self._world_size
        self._results = {
            "reduce_scatter": self._of(place.rank),
            "reduce": slice(0, round_.elements if place.rank == 0 else 0),
        }.get(round_.collective, slice(None))
        lengths = [asked.elements for asked in round_.step]
        lengths = lengths or [round_.elements] * round_.buckets
        self.calls = [
            [torch.empty(length, dtype=dtype) for length in lengths] for _ in range(round_.calls)
        ]

    def _of(self, rank: int) -> slice:
        return slice(rank * self._slice, (rank + 1) * self._slice)

    def fit(self, round_: Round) -> bool:
        """Whether these are the tensors of such a round."""
        return self._round == replace(round_, backend="")

    def start(self, tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        """Call the collective on a tensor; the result is in it, of a slice in its place there."""
        own = tensor[self._of(self._rank)]
        match self._round.collective:
            case "reduce":
                return dist.reduce(tensor, 0, group=group, async_op=async_op)
            case "broadcast":
                return dist.broadcast(tensor, 0, group=group, async_op=async_op)
            case "reduce_scatter":
                return dist.reduce_scatter_single(own, tensor, group=group, async_op=async_op)
            case "all_gather":
                return dist.all_gather_single(tensor, own, group=group, async_op=async_op)
            case _:
                return dist.all_reduce(tensor, group=group, async_op=async_op)

    def fill(self, number: int) -> None:
        """Write the inputs of that round."""
        for i, tensor in enumerate(self._tensors()):
            torch.add(self._mine[: len(tensor)], offset(number, i), out=tensor)

    def verdict(self, number: int) -> Verdict:
        """Compare the sums of that round."""
        digest = hashlib.blake2b(digest_size=16)
        error = 0.0
        alike = self._round.collective not in ("reduce", "reduce_scatter")
        for i, tensor in enumerate(self._tensors()):
            expected = self._expected[: len(tensor)][self._results]
            result = tensor[self._results]
            if alike:
                digest.update(result.view(torch.uint8).numpy().data)
            off = result.to(torch.float32).sub_(expected).sub_(self._times * offset(number, i))
            if not off.numel():
                continue
            # Not max(): a NaN must not compare as small.
            worst = off.abs_().max().item()
            error = worst if not worst <= error else error
        return Verdict(digest.hexdigest(), error)

    def _tensors(self) -> Sequence[torch.Tensor]:
        return [tensor for call in self.calls for tensor in call]


def _statistics(group: Any) -> dict[str, int]:
    # What torch hands out for a Python backend is the object itself.
    channel = group._get_backend(torch.device("cpu"))._channel
    found: dict[str, int] = channel._client.statistics()
    return found


def _loss(group: Any, backend: str) -> tuple[int, int]:
    if backend != BOUNDED:
        return 0, 0
    lost, contributions = lost_of(group)
    return contributions, lost


def _retransmissions(group: Any, backend: str) -> int:
    if backend in ("fanin", BOUNDED):
        return _statistics(group)["retransmissions"]
    return netlab.tcp_retransmissions()
