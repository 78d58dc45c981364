"""How the ranks of a torch group agree on a job and a switch, over the group's own store."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

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
from fanin.torch import handshake

# What is kept of a group's name in the job's, for people who read the switch's status.
NAME_MAX = 24


@dataclass(frozen=True)
class Membership:
    """What all ranks of a group share."""

    job: str
    """Unique among all runs on all machines: it carries a random number of rank 0."""
    switch: str | None
    """Rank 0's switch, None if it has none: for ranks whose environment names no other."""
    store: Store
    """A part of the group's store that no other attempt uses."""

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
    """Rank 0 decides, all agree; returns once every rank of this attempt is there.

    Raises `fanin.errors.JoinTimeout` if some rank does not come in time.
    """
    waited = timeout.total_seconds()
    decide = partial(new_job, group or "group")
    try:
        terms = handshake.agree(store, rank, world_size, decide, waited)
    except handshake.Absent as absent:
        raise JoinTimeout(
            f"group {group!r}: {_named(absent.ranks)} did not join within {waited:g} s; does every "
            "rank make the same groups, in the same order?",
            missing_ranks=absent.ranks,
            waited=waited,
        ) from None
    return Membership(terms.job, terms.switch, PrefixStore(f"fanin/{terms.token}/", store))


def _named(ranks: list[int]) -> str:
    names = [str(rank) for rank in ranks]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "some rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
