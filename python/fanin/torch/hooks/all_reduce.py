"""A DDP communication hook: gradients by fanin, the rest through any backend."""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as plain_hook

from fanin._bounds import losing
from fanin._layers import Layer, of_layer, of_priority
from fanin._settings import PACKED, Said
from fanin.torch.backend import backend_of, named_apart
from fanin.torch.backend.options import Options
from fanin.torch.hooks.bucket_layers import BucketLayers
from fanin.torch.hooks.error_feedback import ErrorFeedback

VERSION = 1
"""The checkpoints' version."""


class HookState:
    """What `allreduce_hook` needs: a group on fanin of the process group's ranks.

        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        model.register_comm_hook(HookState(), allreduce_hook)

    Collective: all ranks of `process_group` (None: the default group) make one, at the same place
    in their program. `timeout` in seconds. The others are settings, as for `fanin.torch.Options`.
    With ``wire_dtype="int8"`` or ``"int4"`` what rounding takes of this rank's gradients is added
    to those of its next step, of each model by itself; the residuals are in float32, as much memory
    again as its gradients. They are in `state_dict`: every rank saves and loads its own.
    With a `loss_bound` packets say to routers which layers they are of (docs/operations.md).
    `priority_of` says otherwise, from 0 to 6, and `loss_bound_of` how much of a bucket may be lost:
    both are given the bucket's parameters, and return the same on all ranks.
    Raises the errors of `fanin.errors`.
    """

    def __init__(
        self,
        switch: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        priority_of: Callable[[Sequence[torch.Tensor]], int] | None = None,
        loss_bound_of: Callable[[Sequence[torch.Tensor]], float] | None = None,
        **settings: Unpack[Said],
    ) -> None:
        self.process_group = process_group
        options = Options(switch=switch, **settings)
        with named_apart(process_group):
            made = dist.new_group(
                dist.get_process_group_ranks(process_group),
                timedelta(seconds=timeout),
                backend="fanin",
                pg_options=options,
                # The ranks of other groups are not here, and those of this one keep their order.
                use_local_synchronization=True,
                sort_ranks=False,
                group_desc="ddp-hook",
            )
        self.group = cast(dist.ProcessGroup, made)
        # A rank alone sends nothing.
        self._wire_dtype = options.settings.travels_as
        self.error_feedback = (
            ErrorFeedback(self._wire_dtype)
            if self._wire_dtype in PACKED and self.group.size() > 1
            else None
        )
        self._layers = BucketLayers()
        self._priority_of = priority_of
        self._loss_bound_of = loss_bound_of

    def layer_of(self, bucket: GradBucket) -> Layer | None:
        """Return the layer of a bucket that a pass has come to."""
        layer = self._layers.of(bucket)
        if self._priority_of is None:
            return layer
        return of_priority(self._priority_of(bucket.parameters()))

    def loss_bound_of(self, bucket: GradBucket) -> float | None:
        """Return how much of a bucket may be lost; None: as much as of all."""
        return None if self._loss_bound_of is None else self._loss_bound_of(bucket.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return what rounding took of this rank's gradients, for a checkpoint.

        It is for `torch.save`: tensors, numbers and text. Call it between two steps, on every rank,
        and save every rank's own.
        """
        residuals = [] if self.error_feedback is None else self.error_feedback.state()
        return {**self._terms(), "residuals": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned to this rank, before the first backward pass.

        The models come to their first backward passes in the order in which they did before.
        Raises `ValueError`, and loads nothing, if the checkpoint is of another `wire_dtype`, of
        another rank or number of ranks, or is none, and `RuntimeError` after a backward pass. If
        it is of another model, the next backward pass raises `ValueError`.
        """
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise ValueError(
                "this is no checkpoint that HookState.state_dict of this fanin has made"
            )
        for name, own in self._terms().items():
            if state.get(name) != own:
                raise ValueError(
                    f"the checkpoint is of {name} {state.get(name)}, and this state of {own}: each "
                    "rank loads what it saved itself, in a job of as many ranks and with the same "
                    "wire_dtype"
                )
        if self.error_feedback is not None:
            self.error_feedback.load(state.get("residuals"))

    def _terms(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "wire_dtype": self._wire_dtype,
            "ranks": self.group.size(),
            "rank": self.group.rank(),
        }

    def close(self) -> None:
        """Leaves the group. The hook must not be called afterwards. Idempotent."""
        with contextlib.suppress(ValueError):  # it is destroyed, maybe with all groups
            dist.destroy_process_group(self.group)


def allreduce_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks, by fanin.

    Buckets that it does not serve (float64 by ATP) are averaged by DDP's process group.
    """
    tensor, layer = bucket.buffer(), state.layer_of(bucket)
    if not backend_of(state.group).serves(tensor):
        group = state.process_group or dist.group.WORLD
        assert group is not None  # DDP has one
        return plain_hook(group, bucket)
    if state.error_feedback is not None:
        state.error_feedback.round(bucket)
    with of_layer(layer), losing(state.loss_bound_of(bucket)):
        work = dist.all_reduce(tensor, dist.ReduceOp.AVG, group=state.group, async_op=True)
    assert work is not None  # of a member
    return work.get_future().then(_first)


def _first(future: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor
