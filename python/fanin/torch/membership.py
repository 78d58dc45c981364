"""How the ranks of a torch group agree on a job and a switch, over the group's own store."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from datetime import timedelta

from torch._C import _DistStoreError as DistStoreError
from torch._C._distributed_c10d import PrefixStore, Store

from fanin import _fanin
from fanin._environment import (
    SWITCH_VARIABLE,
    Protocol,
    WireDtype,
    congestion_control,
    pool_slots,
    switch_address,
    trace,
)
from fanin.errors import JoinTimeout

# What is kept of a group's name in the job's, for people who read the switch's status.
NAME_MAX = 24


@dataclass(frozen=True)
class Membership:
    """What all ranks of one generation of a group share."""

    job: str
    """Unique among all runs on all machines: it carries a random number of rank 0."""
    switch: str | None
    """Rank 0's switch, None if it has none: for ranks whose environment names no other."""
    store: Store
    """A part of the group's store that no other generation uses."""

    def connect(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        wire_dtype: WireDtype,
        protocol: Protocol,
    ) -> _fanin.Client:
        """Join the job; blocks until all ranks have. Raises the errors of `fanin.errors`."""
        switch = switch_address(own_or(self.switch))
        return _fanin.Client(
            switch,
            self.job,
            rank,
            world_size,
            timeout=timeout,
            slots=pool_slots(),
            wire_dtype=wire_dtype,
            protocol=protocol,
            congestion_control=congestion_control(),
            trace=trace(rank),
        )


def new_job(name: str, switch: str | None = None) -> tuple[str, str | None]:
    """Decide, on rank 0: a job that no other run has, and its switch, if it knows one."""
    kept = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:NAME_MAX]
    return f"torch-{secrets.token_hex(8)}-{kept}", switch or os.environ.get(SWITCH_VARIABLE)


def own_or(switch_of_rank_0: str | None) -> str | None:
    """Prefer a rank's own environment: it may reach the switch by another address."""
    return os.environ.get(SWITCH_VARIABLE) or switch_of_rank_0


def agree(store: Store, rank: int, world_size: int, group: str, timeout: timedelta) -> Membership:
    """Rank 0 decides, the others read.

    Raises `fanin.errors.JoinTimeout` if rank 0 does not come in time.

    Keys of a store outlive destroy_process_group + init_process_group, so generations are numbered:
    the n-th join belongs to generation (n-1) // world_size, as a generation begins after the one
    before ended.
    """
    generation = (store.add("fanin/joins", 1) - 1) // world_size
    mine = PrefixStore(f"fanin/{generation}/", store)
    if rank == 0:
        mine.set("job", json.dumps(new_job(f"{group or 'group'}-{generation}")))
    try:
        mine.wait(["job"], timeout)
    except RuntimeError as error:
        # A FileStore has no type for it.
        if not isinstance(error, DistStoreError) and "Wait timeout" not in str(error):
            raise
        raise JoinTimeout(
            f"group {group!r}: rank 0 made no job within {timeout.total_seconds():g} s; does every "
            "rank make the same groups, in the same order?",
            missing_ranks=[0],
            waited=timeout.total_seconds(),
        ) from error
    job, switch = json.loads(mine.get("job"))
    return Membership(job, switch, mine)
