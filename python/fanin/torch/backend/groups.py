"""What a program asks of a group on fanin, and groups of the same ranks beside it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import cast

from torch import distributed
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import DistError
from torch.distributed.distributed_c10d import SHRINK_ABORT

from fanin import _fanin
from fanin.errors import FaninError
from fanin.torch.backend.fanin_backend import FaninBackend
from fanin.torch.patches import splitting
from fanin.torch.rendezvous.survivors import SURVIVORS_SECONDS


def plan(group: ProcessGroup | None = None) -> _fanin.JobPlan | None:
    """Return how a group's all-reduces are shared among services, and how they fare.

    A dict: `services`, of each a dict of its address (`service`), its `share` of all
    tensors, and the rank in whose process it is (`host`, None for a `fanin switch`); `predicted`
    and `measured`, seconds that a byte takes as it travels, and `bound`, what the prediction waits
    for: docs/operations.md has more. None for ranks of one machine, for one that does not speak for
    its machine (docs/local.md), and for a destroyed group.

    Without `group` it is the default group's. Raises `ValueError` for a group that is not fanin's.
    """
    return backend_of(group).plan


def lost(group: ProcessGroup | None = None) -> tuple[int, int]:
    """Return how much is missing in a group's sums since it was made.

    How many contributions are not in them, and how many would be: one for each block, of each rank
    or of each machine whose ranks sum first. The same on every rank, but of what was reduced to one
    rank or scattered: that rank alone counts, or its machine's ranks. Both are 0 where nothing may
    be lost (`Options(loss_bound=...)` may), and for a destroyed group. What one step lost is the
    difference of two calls.

    Without `group` it is the default group's. Raises `ValueError` for a group that is not fanin's.
    """
    return backend_of(group).lost()


def replan(switch: str | None = None, group: ProcessGroup | None = None) -> None:
    """Have a group's sums shared anew, by other services: between two steps, on all its ranks.

        for step, batch in enumerate(batches):
            if step % 100 == 0:
                fanin.torch.replan(Path("switches").read_text().strip())  # who serves from now on
            ...

    Spare machines (`fanin switch`) come and go so while a job runs. Rank 0's `switch`
    ("HOST:PORT[,..]") names them for all ranks, in place of those before; that of the others, who
    may have read the file at another moment, does not count. Where it is None, the ranks' machines
    sum alone. What was begun is done first, by those who began it. Then the ranks say anew what
    their links carry, and measure links of unknown rate anew, which takes about a second. They join
    the services that the new plan gives a share to; `plan` and `fanin status` show it. A service
    that is no longer named may be stopped then.

    Where that cannot be, all ranks are told why, and the group goes on as it was: the errors of
    `fanin.errors`. That takes the group's timeout at most. `RankLost` comes as soon as the group
    knows that a rank died. Both jobs are on the services for a moment: one whose memory is full has
    no room (`PoolExhausted`). Costs what `init_process_group` does. Other groups keep their
    services: `DistributedOptimizer` has one of its own, its `process_group`.

    Raises `ValueError` for a group that is not fanin's.
    """
    backend_of(group).replan(switch)


def shrink(group: ProcessGroup | None = None, seconds: float = SURVIVORS_SECONDS) -> ProcessGroup:
    """Go on without the ranks that are gone: all that are left of a group call it, and get another.

        try:
            loss.backward()
        except fanin.errors.FaninError:
            group = fanin.torch.shrink()
            model = DistributedDataParallel(network)  # of the ranks that are left

    They agree on who is left, and wait `seconds` for a rank that no error names as lost. Then it is
    torch's `shrink_group`: ranks are counted anew, the default group is replaced if it is the one,
    and all other groups are destroyed then. The store must have outlived the lost ranks: it is a
    launcher's, or a file. A launcher that ends all ranks with the first, as torchrun does, leaves
    nobody who could call it.

    The last collective may have been done on some ranks and not on others, and a tensor whose sum
    failed may hold anything: let all ranks take the model, the optimizer's state and the number of
    the step from rank 0, as `fanin.horovod.elastic` does by itself.

    Raises `FaninError` where nobody is gone, or this rank came too late: the others are then
    another group. Raises `JoinTimeout` where a rank that was left did not come.
    """
    backend = backend_of(group)
    try:
        left = backend.survivors(seconds)
    except DistError as error:
        raise FaninError(
            "shrink: the store where the ranks meet is gone with the process that had it: let the "
            "launcher have it (docs/operations.md)"
        ) from error
    if backend.rank() not in left:
        raise FaninError(
            f"shrink: ranks {left} went on without this one, which called it more than "
            f"{seconds:g} s after them"
        )
    gone = [rank for rank in range(backend.size()) if rank not in left]
    if not gone:
        raise FaninError(
            "shrink: no rank is gone. Make the group anew: destroy_process_group(), and then "
            "init_process_group()"
        )
    return distributed.shrink_group(gone, group, SHRINK_ABORT)


def backend_of(group: ProcessGroup | None) -> FaninBackend:
    """Return this rank's backend of a group (None: the default one)."""
    chosen: ProcessGroup | None = group or distributed.group.WORLD
    if chosen is None:
        raise ValueError("there is no group: call init_process_group first")
    backends = [splitting.unwrapped(chosen, device) for device in chosen._device_types]
    found = next((each for each in backends if isinstance(each, FaninBackend)), None)
    if found is None:
        raise ValueError(f"the group's backend is {distributed.get_backend(chosen)}, and not fanin")
    return found


@contextlib.contextmanager
def named_apart(group: ProcessGroup | None) -> Iterator[None]:
    """Have a group of this one's ranks named by what they agree on; all of these ranks call it.

    Torch names groups by how many there were before, which must be the same on all ranks of the
    default group, and the others make no group here.
    """
    told = [secrets.randbits(62)]
    distributed.broadcast_object_list(told, group=group, group_src=0)
    world = distributed.distributed_c10d._world
    before, world.group_count = world.group_count, told[0]
    try:
        yield
    finally:
        world.group_count = before


def same_ranks(group: ProcessGroup) -> ProcessGroup:
    """Return another group of the same ranks and timeout, on any backend; all ranks call it.

    The program's collectives go on beside it, in their own order.
    """
    ranks = list(range(group.size()))
    # Torch would take its default timeout.
    timeout = splitting.unwrapped(group, group._device_types[0]).options._timeout
    with named_apart(group):
        split = distributed.split_group(group, [ranks], timeout=timeout)
    return cast(ProcessGroup, split)
