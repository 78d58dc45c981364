"""A DDP communication hook: gradients through the switch, the rest through any backend."""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

import weakref
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as plain_hook

from fanin._settings import Said, Settings
from fanin.group import Group, joined
from fanin.torch.channel import Channel
from fanin.torch.error_feedback import ErrorFeedback
from fanin.torch.membership import new_job

_channels: weakref.WeakKeyDictionary[Group, Channel] = weakref.WeakKeyDictionary()


class HookState:
    """What `allreduce_hook` needs: a membership of the process group's ranks in a job on a switch.

        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        model.register_comm_hook(HookState(), allreduce_hook)

    Collective: all ranks of `process_group` (None: the default group) make one, at the same place
    in their program. `timeout` in seconds. The others are settings, as for `fanin.torch.Options`.
    With ``wire_dtype="int8"`` what rounding takes of this rank's gradients is added to those of its
    next step, of each model by itself; the residuals are in float32, as much memory again as its
    gradients.
    Raises the errors of `fanin.errors`.
    """

    def __init__(
        self,
        switch: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        **settings: Unpack[Said],
    ) -> None:
        self.process_group = process_group
        rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        taken = Settings.of(switch, **settings)
        agreed: list[Any] = [(new_job(taken.job, "ddp-hook"), taken.switch) if rank == 0 else None]
        dist.broadcast_object_list(agreed, group=process_group, group_src=0)
        job, root_switch = agreed[0]
        own = replace(taken, switch=taken.switch or root_switch)
        self.group = joined(own, job, rank, world_size, timeout)
        # A rank alone sends nothing.
        rounds = own.travels_as == "int8" and world_size > 1
        self.error_feedback = ErrorFeedback() if rounds else None

    def close(self) -> None:
        """Leaves the job. The hook must not be called afterwards. Idempotent."""
        channel = _channels.pop(self.group, None)
        if channel is not None:
            channel.close()
        self.group.close()


def allreduce_hook(
    state: HookState | Group, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks, on the switch.

    `state` is a `HookState`, or a `fanin.Group` with the ranks of DDP's process group. Buckets that
    the switch does not serve (float64 by ATP) are averaged by DDP's process group (a Group: the
    default one). Only a `HookState` keeps what rounding to int8 takes of the gradients.
    """
    tensor = bucket.buffer()
    channel = _channel(state)
    if not channel.serves(tensor):
        return plain_hook(_process_group(state), bucket)
    if isinstance(state, HookState) and state.error_feedback is not None:
        state.error_feedback.round(bucket)
    work = channel.all_reduce([tensor], average=True, notify=True)
    return work.get_future().then(_first)


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _process_group(state: HookState | Group) -> dist.ProcessGroup:
    given = state.process_group if isinstance(state, HookState) else None
    group = given or dist.group.WORLD
    assert group is not None  # DDP has one
    return group


def _channel(state: HookState | Group) -> Channel:
    group = state if isinstance(state, Group) else state.group
    channel = _channels.get(group)
    if channel is None:
        channel = _channels[group] = Channel(group.client)
    return channel
