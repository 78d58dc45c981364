"""Gradients of a machine's GPUs: by NCCL among neighbours, what is left by fanin (BytePS §4.2).

The ranks of a *domain*, neighbours on one machine, cut each bucket of gradients into one part for
each *holder*. A part is reduced to its holder, holders of one number in all domains of all machines
all-reduce their parts on fanin, and each part goes back to its domain.

- All ranks hold (the default): reduce-scatter and all-gather. With a domain for each PCIe switch
  that is CPU-assisted aggregation: fanin sums what the domains of a machine have in shared memory.
- Some hold: reduce and broadcast, with roots whose copies do not compete with the NIC's.

A bucket goes in pieces. While fanin sums one, the next one is reduced in the machine, and the one
before goes back.

`fanin topo` says which of it a machine should take, and is asked where the program says nothing
(`ways`).
"""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Unpack, cast

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from fanin._layers import of_layer
from fanin._services import machine
from fanin._settings import Said
from fanin.torch.backend.options import Options
from fanin.torch.hooks import ways
from fanin.torch.hooks.bucket_layers import BucketLayers
from fanin.torch.hooks.ways import Way

TIMEOUT = 300.0

PIECE_BYTES = 4 << 20
"""BytePS's partitions (§6.1). All ranks cut alike."""

# A part is a multiple of this many elements, except in a tensor's last piece. So it begins where a
# word of 16 bytes does, the widest that NCCL copies.
_ALIGNED = 16

# By a piece's address, length and dtype: it padded, where it has to be, and this holder's part.
_Buffers = dict[tuple[int, int, torch.dtype], tuple[Tensor | None, Tensor]]


@dataclass(frozen=True)
class _Neighbour:
    """What each rank tells the others."""

    machine: str
    way: Way | None
    """The way that its program says, if it says one."""
    backend: str
    gpu: str | None
    """The PCI address of its GPU."""
    switches: int
    """How many are named."""


class MachineState:
    """What `machine_hook` needs: how the ranks of this machine sum, and who of them sends.

        dist.init_process_group("nccl")
        model = DistributedDataParallel(model)
        model.register_comm_hook(MachineState(), machine_hook)

    Collective: all ranks of the default group make one, at the same place in their program. `local`
    is torch's backend inside a machine: "nccl", or "gloo" for tensors of the CPU. Ranks of one
    machine with the same `domain` are one domain (default: all of them). `holders` are places in
    the domain, in the order of ranks, whose ranks each have a part of the sums and send it
    (default: all). If no rank says one of the two, each machine does what `fanin topo` recommends
    for its GPUs. `timeout` in seconds. The others are settings, as for `fanin.torch.Options`.

    A state is of one model. Raises `ValueError` on all ranks where they say what cannot be, and the
    errors of `fanin.errors`.
    """

    def __init__(
        self,
        local: str = "nccl",
        *,
        domain: str | None = None,
        holders: Sequence[int] | None = None,
        switch: str | None = None,
        timeout: float = TIMEOUT,
        **settings: Unpack[Said],
    ) -> None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        options = Options(switch=switch, **settings)
        way = None
        if domain is not None or holders is not None:
            way = Way(domain or "", None if holders is None else list(holders))
        named = options.settings.switch
        own = _Neighbour(
            machine(options.settings),
            way,
            local,
            ways.own_gpu(local),
            len(named.split(",")) if named else 0,
        )
        neighbours: list[Any] = [None] * size
        distributed.all_gather_object(neighbours, own)
        machines = _machines(neighbours)
        taken = _taken(rank, neighbours, machines)
        domains = ways.domains(machines, taken)
        holders_of = _holders(domains, taken)
        limit = timedelta(seconds=timeout)
        # All ranks make all groups. Reductions and what goes back are each in an order of their
        # own, so they have a communicator each.
        for ranks, of_domain in zip(domains, holders_of, strict=True):
            down, up = _group(ranks, limit, local), _group(ranks, limit, local)
            if rank in ranks:
                self._down, self._up = down, up
                self._ranks, self._holders = ranks, of_domain
        self._across: distributed.ProcessGroup | None = None
        for of_number in zip(*holders_of, strict=True):
            across = _group(list(of_number), limit, "fanin", options)
            if rank in of_number:
                self._across = across
        self._part = self._holders.index(rank) if rank in self._holders else None
        self._size = size
        # Buffers of each piece. A step's buffers are free when the next step's begin, as DDP waits
        # for all. DDP forms its buckets anew: the next step forgets buffers that a step did not
        # use.
        self._buffers: _Buffers = {}
        self._used: _Buffers = {}
        self._before: Future[Any] | None = None
        self.layers = BucketLayers()

    @property
    def ranks(self) -> list[int]:
        """The ranks of this one's domain."""
        return list(self._ranks)

    @property
    def holders(self) -> list[int]:
        """The ranks of this one's domain that send, in the order of their parts."""
        return list(self._holders)

    def begin_step(self) -> None:
        """Note that the first bucket of a step comes next."""
        if self._used:
            self._buffers, self._used = self._used, {}

    def average(self, flat: Tensor) -> Future[Tensor]:
        """Average a tensor of one dimension over all ranks, in place.

        All ranks do in one order. The tensor is always the same for its address: a bucket of DDP.
        """
        aligned = _ALIGNED * len(self._holders)
        elements = max(PIECE_BYTES // flat.element_size() // aligned, 1) * aligned
        # Pieces go back in order: once the last one is back, the whole tensor is.
        return [self._average(piece, flat) for piece in torch.split(flat, elements)][-1]

    def _average(self, piece: Tensor, flat: Tensor) -> Future[Tensor]:
        """Average a piece of a tensor; the future is of the tensor up to the piece's end."""
        with self._ends_for_all():
            whole, part = self._memory(piece)
            if whole is not piece:
                whole[: piece.numel()].copy_(piece)  # what is behind it stays zero
            # Before anything is summed, as DDP does: sums of float16 would overflow.
            whole.div_(self._size)
            self._reduce(whole, part)
            sums: Future[Any] = Future(devices=_devices(flat))
            if self._across is None:
                sums.set_result([whole])
            else:
                work = distributed.all_reduce(part, group=self._across, async_op=True)
                assert work is not None  # of a member
                sums = work.get_future()
        # Pieces come one after the other, in the order of the calls, on all ranks.
        awaited = [sums] if self._before is None else [self._before, sums]

        def spread(_: Future[Any]) -> Tensor:
            with self._ends_for_all():
                for each in awaited:
                    each.wait()  # they are there: for this stream, and what one has failed with
                self._gather(whole, part)
                if whole is not piece:
                    piece.copy_(whole[: piece.numel()])
            return flat

        # A collected future has no devices, and its callbacks would run on any stream.
        ready: Future[Any] = Future(devices=_devices(flat))
        torch.futures.collect_all(awaited).add_done_callback(lambda _: ready.set_result([whole]))
        spread_out: Future[Tensor] = ready.then(spread)
        self._before = spread_out
        return spread_out

    @contextlib.contextmanager
    def _ends_for_all(self) -> Iterator[None]:
        """Leave all groups where something fails: others wait for what this rank would do next."""
        try:
            yield
        except BaseException:
            for group in (self._across, self._down, self._up):
                with contextlib.suppress(Exception):  # what has failed is told, and not this
                    if group is not None:
                        group.abort()
            raise

    def _memory(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        key = piece.data_ptr(), piece.numel(), piece.dtype
        if key not in self._buffers:
            length, rest = divmod(piece.numel(), len(self._holders))
            length += bool(rest)
            padded = piece.new_zeros(length * len(self._holders)) if rest else None
            self._buffers[key] = padded, piece.new_empty(length)
        padded, part = self._used[key] = self._buffers[key]
        return piece if padded is None else padded, part

    def _reduce(self, whole: Tensor, part: Tensor) -> None:
        if len(self._holders) == len(self._ranks):
            distributed.reduce_scatter_tensor(part, whole, group=self._down)
            return
        for holder, each in zip(self._holders, whole.chunk(len(self._holders)), strict=True):
            distributed.reduce(each, holder, group=self._down)
        if self._part is not None:
            part.copy_(whole.chunk(len(self._holders))[self._part])

    def _gather(self, whole: Tensor, part: Tensor) -> None:
        if len(self._holders) == len(self._ranks):
            distributed.all_gather_into_tensor(whole, part, group=self._up)
            return
        for number, each in enumerate(whole.chunk(len(self._holders))):
            if number == self._part:
                each.copy_(part)
            distributed.broadcast(each, self._holders[number], group=self._up)


def machine_hook(state: MachineState, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over the ranks: in the machine first, then on fanin."""
    if bucket.index() == 0:
        state.begin_step()
    with of_layer(state.layers.of(bucket)):
        return state.average(bucket.buffer())


def _machines(neighbours: Sequence[_Neighbour]) -> list[list[int]]:
    """Return the ranks of each machine."""
    backends = {each.backend for each in neighbours}
    if len(backends) > 1:
        raise ValueError(f"ranks say different backends for local: {', '.join(sorted(backends))}")
    machines: dict[str, list[int]] = {}
    for rank, each in enumerate(neighbours):
        machines.setdefault(each.machine, []).append(rank)
    return list(machines.values())


def _taken(
    rank: int, neighbours: Sequence[_Neighbour], machines: Sequence[Sequence[int]]
) -> list[Way]:
    """Return the way of each rank: what their programs say, or else what `fanin topo` recommends.

    Collective if no rank says one. A machine's first rank asks for all on it.
    """
    if any(each.way is not None for each in neighbours):
        return [each.way or Way() for each in neighbours]
    own = None
    for ranks in machines:
        gpus = [neighbours[each].gpu for each in ranks]
        if rank == ranks[0] and None not in gpus:
            own = ways.recommended(gpus, len(machines), neighbours[0].switches)
    told: list[Any] = [None] * len(neighbours)
    distributed.all_gather_object(told, own)
    return ways.that_fit(machines, [told[ranks[0]] for ranks in machines])


def _holders(domains: Sequence[Sequence[int]], taken: Sequence[Way]) -> list[list[int]]:
    """Return which ranks of each domain hold, as many of each."""
    found = []
    for ranks in domains:
        said = {str(taken[rank].holders): rank for rank in ranks}
        if len(said) > 1:
            each_way = " and ".join(f"{what} (rank {rank})" for what, rank in said.items())
            raise ValueError(f"ranks of one domain say different holders: {each_way}")
        places = taken[ranks[0]].holders
        places = list(range(len(ranks)) if places is None else places)
        if not places or len(set(places)) < len(places):
            raise ValueError(f"holders are {places}: name each once, and at least one")
        outside = [place for place in places if not 0 <= place < len(ranks)]
        if outside:
            raise ValueError(
                f"holders are {places}, and the domain of ranks {list(ranks)} has the places 0 to "
                f"{len(ranks) - 1}"
            )
        if len(places) == len(ranks):
            places.sort()  # reduce-scatter gives the parts out in the order of ranks
        found.append([ranks[place] for place in places])
    counts = {len(each) for each in found}
    if len(counts) > 1:
        raise ValueError(
            f"domains {list(map(list, domains))} have {' and '.join(map(str, sorted(counts)))} "
            "holders: a part of the gradients is a holder's of each, so say as many for all"
        )
    return found


def _group(
    ranks: list[int], limit: timedelta, backend: str, options: Options | None = None
) -> distributed.ProcessGroup:
    made = distributed.new_group(ranks, timeout=limit, backend=backend, pg_options=options)
    return cast(distributed.ProcessGroup, made)


def _devices(flat: Tensor) -> list[int | str | torch.device]:
    return [flat.device] if flat.is_cuda else []
