"""How a process joins a job of arrays: where its ranks meet, and who sums."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Unpack, cast
from urllib.parse import urlsplit

from fanin import _fanin, _handshake
from fanin._failures import Failures
from fanin._hosting import listening
from fanin._join import check_rank, check_timeline, join, no_switch, trusted
from fanin._launchers import MEETING, launched
from fanin._membership import Connected, Ranks
from fanin._planes import GLOO_VARIABLE, own_address
from fanin._services import bracketed
from fanin._settings import Said, Settings, variable
from fanin.arrays.group import Gather, Group
from fanin.arrays.peers import Peers
from fanin.arrays.stores import Below, Shared, store_of
from fanin.errors import BeganAnew, JoinTimeout, SwitchUnreachable

# Before ranks meet once more, in seconds: whatever made one begin anew may do so again at once.
AGAIN: Final = 0.1
# How long a rank waits for rank 0 before it says so, in seconds.
QUIET: Final = 5.0
# torchrun sets it if it has a store of its own at MASTER_ADDR and MASTER_PORT.
AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
# The name of a job that was given none. Ranks that meet at one place may have several in turn.
UNNAMED: Final = "arrays"
# The services know no longer names of jobs, in bytes.
JOB_BYTES_MAX: Final = 100

Rendezvous = str | Shared


@dataclass(frozen=True)
class _Asked:
    """A rank that wants to join."""

    settings: Settings
    rank: int
    world_size: int
    timeout: float
    """The seconds that each collective may take, and the joining."""
    deadline: float
    """When the joining is to be over (`time.monotonic`)."""

    @classmethod
    def now(cls, settings: Settings, rank: int, world_size: int, timeout: float) -> _Asked:
        """Return one whose time begins."""
        return cls(settings, rank, world_size, timeout, time.monotonic() + timeout)

    def left(self) -> float:
        """Return how many seconds are left."""
        return max(self.deadline - time.monotonic(), 0.0)


def connect(
    switch: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous: Rendezvous | None = None,
    timeout: float = 300.0,
    **settings: Unpack[Said],
) -> Group:
    """Join a job as `rank` of `world_size`; blocks until all ranks have joined.

    Without `rank` and `world_size` the launcher says both, in the environment: torchrun, mpirun,
    srun. Where nobody launched the process, it is a job by itself.

    `rendezvous` is where the ranks meet: HOST:PORT, at which rank 0 then listens as long as its
    process lives, or a store that all ranks share, of torch's or any mapping of texts. Without it
    they meet at the first switch that rank 0 names; without a switch, where the environment says
    (torchrun's store, or MASTER_ADDR and MASTER_PORT). Ranks that meet without a switch sum
    themselves.

    `timeout` (seconds) bounds the joining and, later, every collective (see
    `fanin.errors.AllReduceTimeout`). The others are settings: `switch` ("HOST:PORT"), `job`,
    `wire_dtype`, `protocol`, `plan` and the others that docs/settings.md lists. What is not given,
    the environment says (FANIN_SWITCH, FANIN_JOB, ...). All ranks say the same, but for the
    switch's address.

    `job` names the job: ranks that give the same name find each other. It has to be said where
    they meet at a switch, which others use, too. Where ranks are on several machines, those of each
    sum among themselves first (docs/local.md), and then beside the switches as `plan` says.

    Arrays travel as they are: each element is right to its own magnitude, within half a unit in the
    last place and n 2^-53 of the sum of its own n contributions' absolute values; NaN and
    infinities are its own, too. Ranks that share a machine sum there first, in float32
    (docs/local.md). Arrays of more than 4,096 floats travel otherwise where `wire_dtype` says so:

    `wire_dtype`: as "shared_exponent" floats travel as integers of four bytes, and a sum is off by
    at most n^2 2^m / 2^31 (n ranks; 2^m: the largest absolute value in a packet, of 352 elements on
    Ethernet and up to 2,048 with longer frames and on loopback, rounded up to a power of two); what
    is not finite spoils the packet. With "bfloat16" two bytes, half the time on the network: each
    contribution and the sum are rounded to eight significant bits, so that a sum is off by at most
    2^-8 (the sum of the contributions' absolute values) + 2^-8 |sum|, and what is small beside that
    (docs/protocols/switchml.md); 2^128 and more becomes an infinity, also of an average. With
    "int8" one byte, a quarter of the time: each contribution and the sum are rounded, up or down by
    chance so that the expectation is right, to multiples of a power of two that 32 neighbouring
    elements share. With S the sum of the contributions' largest absolute values among these 32, a
    sum is off by less than S / 31; all ranks get the same bits, in every run. What is not finite,
    or above 127 2^121, leaves no element finite among the 32. With "int4" half a byte: an
    element is one of 8 levels and a sign, and the levels lie closer where elements are small. A
    sum is off by at most about 5 S / 4, and by less than S / 2 where no contribution is above a
    third of the largest of its 32; racks add to it (docs/protocols/switchml.md). The error of
    rounding is not kept for the next array: `fanin.torch.HookState` does that for DDP.

    `protocol`: by "switchml" gradients are summed in the slots of one switch. With "atp" on the way
    to a server: `switch` is the rack's (``fanin switch --protocol atp --upstream ...``) or the
    root itself, floats travel as integers, and a sum is rounded once, to
    float32, from integers that are each off by half of 10^-8, or, in packets of large or tiny
    values, of what keeps the largest sum in 31 bits (docs/operations.md). Of `wire_dtype` there is
    "bfloat16": contributions and sums are rounded to it, and travel in two bytes.
    With "goat" it is the same, by switches that a root (``fanin switch --protocol goat``) gives a
    plan; `sub_models` are the elements of the parts of the model that it plans by themselves, if
    the equal ones that it cuts are not to be (docs/protocols/goat.md).

    `loss_bound`: the fraction of each rank's part of a float array that may be lost on the way to
    the switch, at least 0 and below 1 (docs/protocols/dlcp.md). Above 0 a network's losses are not
    waited for as far as the bound forgives them; a sum is then the mean of what came times the
    ranks, all ranks get the same bits, and `Handle.loss` says what is missing. Floats travel as
    they are. Integers lose nothing. With `paths` above 1 the packets of a rank come from so many
    ports in turn, so that routers spread them over all paths that they have (docs/operations.md).

    Raises `ValueError` for what is no such setting, and the errors of `fanin.errors`.
    """
    taken = Settings.of(switch, **settings)
    rank, world_size = _placed(rank, world_size)
    check_rank(rank, world_size)
    asked = _Asked.now(taken, rank, world_size, timeout)
    if taken.trace is not None:
        # As where nobody is to be met: told before anything is waited for.
        check_timeline(taken.trace, rank)
    if rendezvous is None and taken.switch is not None:
        if taken.job is None:
            raise ValueError(
                f'no job was named: say job="NAME", or set {variable("job")}, the same on all ranks'
            )
        if world_size == 1 or taken.protocol != "switchml":
            # There is nothing to agree on: sums are where the switches are.
            connected = Connected(join(taken, taken.job, rank, world_size, timeout))
            if world_size == 1:
                return _with_peers(asked, _lonely(taken, taken.job), connected)
            summed = ", ".join(connected.client.dtypes)
            return Group(
                connected,
                None,
                why_no_peers=f"the switches of this protocol sum and average {summed} alone, and "
                "the ranks do not know each other: say rendezvous=HOST:PORT of rank 0",
                wire_dtype=taken.wire_dtype,
            )
        return _met(asked, taken.switch.split(","), taken.job)
    if world_size == 1:
        return _grouped(asked, _lonely(taken, taken.job or UNNAMED))
    if rendezvous is None:
        rendezvous = _environment(rank, world_size)
    if not isinstance(rendezvous, str):
        return _stored(asked, rendezvous, taken.job or UNNAMED)
    address = _fanin.switch_address(rendezvous)
    if rank == 0:
        _listen(address, taken)
    else:
        _await(address, asked.deadline)
    return _met(asked, [address], taken.job)


def _placed(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("say rank and world_size both, or neither where a launcher says them")
    if rank is None or world_size is None:
        said = launched(os.environ, meets=False)
        return (0, 1) if said is None else (said.rank, said.size)
    return rank, world_size


def _environment(rank: int, world_size: int) -> Rendezvous:
    """Return where the environment says that ranks meet."""
    host, port = (os.environ.get(name, "") for name in MEETING)
    if not (host and port):
        raise SwitchUnreachable(
            f"nothing says where the {world_size} ranks meet: say rendezvous=HOST:PORT, with a "
            f"port that is free on the machine of rank 0, or set {' and '.join(MEETING)}; or name "
            f"a switch: {no_switch()}"
        )
    if os.environ.get(AGENT_STORE) == "True":
        # The launcher listens there itself, and whoever uses it has torch.
        from torch.distributed.rendezvous import rendezvous

        found = next(iter(rendezvous("env://", rank, world_size)))
        return cast("Shared", found[0])
    return f"{bracketed(host)}:{port}"


def _listen(address: str, settings: Settings) -> None:
    """Have the others find this rank 0, as long as its process lives."""
    try:
        listening(address, settings.secret_file)
    except OSError as cause:
        raise SwitchUnreachable(
            f"rank 0 cannot listen at {address}, where the ranks meet: {cause}. Name an address of "
            "its machine, and a port that is free there (rendezvous, or MASTER_PORT)"
        ) from None


def _await(address: str, deadline: float) -> None:
    """Wait until rank 0 listens where the ranks meet, for a while: launchers start all at once.

    A meeting waits longer, and says so.
    """
    parts = urlsplit(f"//{address}")
    until = min(deadline, time.monotonic() + QUIET)
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection((parts.hostname, parts.port), QUIET).close()
            return
        # Nothing tells when somebody begins to listen.
        time.sleep(AGAIN)


def _lonely(settings: Settings, job: str) -> Ranks:
    """Return the ranks of a job that has one."""

    def gather(_name: str, text: str, _left: float) -> list[str]:
        return [text]

    return Ranks(
        job=f"{job}#{secrets.token_hex(4)}",
        name=job,
        who=f"job {job!r}",
        rank=0,
        world_size=1,
        address="127.0.0.1",
        cure="",
        gather=gather,
        trust=trusted(settings),
    )


def _met(asked: _Asked, switches: list[str], name: str | None) -> Group:
    """Meet at the first of the switches that rank 0 names, as often as a rank begins anew."""
    while True:
        try:
            return _met_once(asked, switches, name)
        except BeganAnew:
            # All that this rank made for the others is gone again.
            if asked.left() <= 0:
                raise
            # The rank that began anew may do so again at once.
            time.sleep(AGAIN)


def _met_once(asked: _Asked, switches: list[str], name: str | None) -> Group:
    rank, world_size, trust = asked.rank, asked.world_size, trusted(asked.settings)
    meeting = _fanin.Meeting(
        switches, "switchml", name or UNNAMED, rank, world_size, timeout=asked.left(), trust=trust
    )
    job = name or f"{UNNAMED}-{meeting.attempt:016x}"

    def gather(name: str, text: str, left: float) -> list[str]:
        return meeting.gather(name, text, timeout=max(left, 0.0))

    try:
        route = _fanin.route_to(switches[0])
        ranks = Ranks(
            job=job,
            name=f"{job}-{meeting.attempt:016x}",
            who=f"job {job!r}",
            rank=rank,
            world_size=world_size,
            address=route[0] if route else "127.0.0.1",
            cure="Name the switch by an address that the other machines know, too",
            gather=gather,
            trust=trust,
            meeting=meeting,
        )
        return _grouped(asked, ranks)
    finally:
        meeting.close()


def _stored(asked: _Asked, shared: Shared, job: str) -> Group:
    """Meet in a store, which may hold what ranks wrote that have died since."""
    settings, rank, world_size = asked.settings, asked.rank, asked.world_size
    store = Below(f"fanin/{job}/", store_of(shared))
    with _naming_absent(job, asked.timeout):
        terms = _handshake.agree(
            store, rank, world_size, lambda: (_unique(job), settings.switch), asked.left()
        )
    attempt = Below(f"{terms.token}/", store)
    failures = Failures(attempt, rank, world_size)

    def pause(seconds: float) -> None:
        failures.look()
        # A store's own wait would look at nothing else meanwhile.
        time.sleep(seconds)

    def gather(name: str, text: str, left: float) -> list[str]:
        with _naming_absent(job, asked.timeout):
            return _handshake.gather(attempt, rank, world_size, name, text, left, pause)

    with failures.shared():
        ranks = Ranks(
            job=terms.job,
            name=terms.job,
            who=f"job {job!r}",
            rank=rank,
            world_size=world_size,
            address=own_address(),
            cure=f"Set {GLOO_VARIABLE} to the interface to the others",
            gather=gather,
            trust=trusted(settings),
            look=failures.look,
            tell=failures.tell,
        )
        # A rank's own switch first: it may reach it by another address than rank 0.
        own = settings.at(settings.switch or terms.switch)
        return _grouped(replace(asked, settings=own), ranks)


def _grouped(asked: _Asked, ranks: Ranks) -> Group:
    """Join, and tell each other where to connect to for what no service does."""
    return _with_peers(asked, ranks, ranks.connect(asked.settings, asked.timeout, asked.deadline))


def _with_peers(asked: _Asked, ranks: Ranks, connected: Connected) -> Group:
    settings = asked.settings
    if settings.security not in (None, "tag"):
        why = (
            "it goes over TCP from rank to rank, neither encrypted nor authenticated, and the job "
            f'has security="{settings.security}": leave that out if nobody else is on the network'
        )
        return Group(connected, None, why_no_peers=why, wire_dtype=settings.wire_dtype)
    address = connected.address or ranks.address
    try:
        peers = Peers(ranks.rank, ranks.world_size, address, connected.client)
        peers.heard(ranks.gather("peers", peers.said, asked.left()))
    except BaseException:
        connected.close()
        raise
    within = partial(_within, settings, ranks.job, ranks.who, address, ranks.cure, asked.timeout)
    return Group(connected, peers, within, wire_dtype=settings.wire_dtype)


def _within(
    settings: Settings,
    of: str,
    who: str,
    address: str,
    cure: str,
    timeout: float,
    gather: Gather,
    name: str,
    rank: int,
    world_size: int,
) -> Group:
    """Join with some of the ranks of a group, by what they say to each other there."""
    asked = _Asked.now(settings, rank, world_size, timeout)
    job = gather("job", _unique(f"{of}/{name}"), timeout)[0]
    ranks = Ranks(
        job=job,
        name=job,
        who=f"group {name!r} of {who}",
        rank=rank,
        world_size=world_size,
        address=address,
        cure=cure,
        gather=gather,
        trust=trusted(settings),
    )
    return _grouped(asked, ranks)


@contextlib.contextmanager
def _naming_absent(job: str, waited: float) -> Iterator[None]:
    try:
        yield
    except _handshake.Absent as absent:
        raise JoinTimeout(
            f"job {job!r}: ranks {', '.join(map(str, absent.ranks))} did not come within "
            f"{waited:g} s to the store where the ranks meet",
            missing_ranks=absent.ranks,
            waited=waited,
        ) from None


def _unique(job: str) -> str:
    """Return a name that no other attempt at any job has."""
    kept = re.sub(r"#[0-9a-f]{8}", "", job).encode()[:JOB_BYTES_MAX].decode(errors="ignore")
    return f"{kept}#{secrets.token_hex(4)}"
