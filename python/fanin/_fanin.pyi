"""The Rust binding: sockets, protocol and threads. It knows no torch and no NumPy, only memory."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from fanin._settings import Protocol, Security, Settings
from fanin.errors import FaninError

Collective = Literal["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather"]
DType = Literal["float32", "float16", "bfloat16", "int32", "float64", "int64", "uint8", "int8"]

version: str
assertions: bool
"""Whether this was compiled for tests (`make checked`): its figures are no release's."""
priorities: int
"""How many queues there are for gradients on the way: DLCP's packets say which is theirs."""
variables: list[str]
"""Every environment variable that some part of fanin reads."""
former_variables: list[tuple[str, str]]
"""The variables that were settings once, each with the one in its place."""

class LocalRanks:
    """The ranks of this machine, which sum in shared memory. For one `Client`.

    `machines` are those of all ranks, numbered in the order of their first ranks; `name` is one
    that no other job on these machines has. At most `columns_max` ranks of a machine speak with
    other machines; None is no limit. Raises `OSError` on the first rank of a machine where /dev/shm
    has too little room.
    """

    def __new__(
        cls, machines: Sequence[int], rank: int, name: str, columns_max: int | None = None
    ) -> LocalRanks: ...
    def close(self) -> None:
        """Give the memory back, if no client has taken it."""

class Parameters:
    """A worker's parameters at the services that share them.

    A service is its host:port, its share, and the rank in whose process it is (None: it is `fanin
    parameters`). Their order is the same for all workers. `key` is 16 bytes that the workers of
    this training have alone; each service has a key made of it and of its place in the order. Every
    call waits for a service that is away, `timeout` seconds at most since it answered last, and
    then raises `SwitchUnreachable`; `ParametersRefused` where one does not serve this training. For
    a service of a rank it raises `RankLost` in place of `SwitchUnreachable`, and at once if the
    rank's process has ended. Bytes of parameters are little-endian.
    """

    def __new__(
        cls,
        services: Sequence[tuple[str, float, int | None]],
        key: bytes,
        worker: int,
        workers: int,
        dtype: Literal["float32", "float64"],
        elements: int,
        *,
        timeout: float,
    ) -> Parameters: ...
    def create(self, first: bytes) -> None:
        """Make the model of these first parameters. One worker does, before others ask for it."""

    def exchange(self, delta: bytes | None) -> tuple[bytes, int]:
        """Add a delta; return the latest parameters, and how many of this worker's were lost.

        Those are deltas which a service that was started again does not have, and of which no call
        has told before. Without a delta, asks alone.
        """

    def begin_exchange(self, delta: bytes) -> Exchanging:
        """Begin an exchange in the background. Its end is waited for before the next call."""

    def leave(self) -> None:
        """Be done. Once all are, the services forget the model."""

class Exchanging:
    """An exchange that is under way. It goes on if nobody waits for it."""

    def wait(self) -> tuple[bytes, int]:
        """Wait for its end; return what `Parameters.exchange` returns, or raise its errors.

        A signal handler that raises ends the waiting alone, and the exchange may be waited for
        again; else it is waited for once.
        """

class ParameterService:
    """A parameter service inside this process, which keeps nothing on a disk.

    `listen` is an address and a port, TCP; port 0 takes a free one. It serves only the trainings of
    these `keys`, each of 16 bytes. Raises `OSError` when the address cannot be listened on, and
    `ValueError` when it is none.
    """

    def __new__(cls, listen: str, keys: Sequence[bytes]) -> ParameterService: ...
    @property
    def address(self) -> str:
        """The address at which it listens, as host:port."""

    def stop(self) -> None:
        """End it, and forget what it has. Idempotent. In a forked process it does nothing."""

class Exchange:
    """An end of an exchange of keys through a place that others read, such as torch's store."""

    def __new__(cls) -> Exchange: ...
    @property
    def public(self) -> str:
        """Public key of this end alone: everybody may read it."""

    def key(self, public: str) -> bytes:
        """Return 32 bytes that this end and the one with that `public` have alone."""

    def seal(self, public: str, text: str) -> str:
        """Return text that the end with that `public` can open, and nobody else."""

    def open(self, public: str, sealed: str) -> str:
        """Return what the end with that `public` sealed. Raises `ValueError` if it did not."""

class Trust:
    """By what the services of a job are known (docs/security.md).

    By a key that was told, by the authorities in `tls_ca`, by the secret in `secret_file`, or else
    by the key that a service showed first. Raises `FaninError` for files that are of no use.
    """

    def __new__(cls, tls_ca: str | None = None, secret_file: str | None = None) -> Trust: ...
    def insist(self, service: str, fingerprint: str) -> None:
        """Know the service, "host:port", by this key and no other from now on."""

    def fingerprint(self, service: str) -> str | None:
        """Return the key that the service is known by; None where another thing decides."""

class Meeting:
    """The ranks of a job at the first of the switches that rank 0 names, before they join.

    Blocks until all ranks have come, `timeout` seconds at most. Raises the errors of
    `fanin.errors`, of which `JoinTimeout` names the ranks that did not.
    """

    def __new__(
        cls,
        switches: Sequence[str],
        protocol: str,
        job: str,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        trust: Trust | None = None,
    ) -> Meeting: ...
    @property
    def attempt(self) -> int:
        """Which attempt at the job it is: the same on all its ranks, and no other's."""

    def gather(self, name: str, text: str, *, timeout: float) -> list[str]:
        """Return what each rank says under this name, in their order; `text` is this rank's.

        Every rank calls with the same names in the same order, each once. Blocks and raises as the
        constructor does; `BeganAnew` when a rank was started again since all met, so that they have
        to meet once more, and `JoinRefused`, on all ranks, when they say too much.
        """

    def close(self) -> None:
        """Hang up. Idempotent."""

class ServiceShare(TypedDict):
    """A service's part of a job."""

    service: str
    share: float
    host: int | None

class JobPlan(TypedDict):
    """How a job is shared among its services, and how they fare. Times are seconds a byte."""

    services: list[ServiceShare]
    predicted: float | None
    bound: str | None
    links: str | None
    measured: float | None
    imbalance: float

class Client:
    """A rank's membership in a job, which one or several services sum.

    `services` are address, share, rate in bits a second and hosting rank of each. The client reads
    these of the settings: `in_flight`, `sub_models`, `wire_dtype`, `security`, `protocol`,
    `loss_bound`, `paths`, `congestion_control` and `machine`. The other arguments say the rest. The
    constructor blocks, without the GIL, until all ranks have joined.
    """

    def __new__(
        cls,
        services: Sequence[tuple[str, float, int | None, int | None]],
        job: str,
        rank: int,
        world_size: int,
        settings: Settings | None = None,
        *,
        timeout: float = 300.0,
        trace: tuple[str, int] | None = None,
        prediction: tuple[float, str, float] | None = None,
        links: str | None = None,
        local: LocalRanks | None = None,
        hosted: Switch | None = None,
        meeting: Meeting | None = None,
        look: Callable[[], None] | None = None,
        trust: Trust | None = None,
    ) -> Client: ...
    @property
    def switch(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def dtypes(self) -> list[DType]:
        """The dtypes that the job sums, the same on all ranks: by ATP and GOAT not all of them."""

    @property
    def has_roots(self) -> bool:
        """Whether the job has other collectives than all_reduce, the same on all ranks."""

    @property
    def has_participants(self) -> bool:
        """Whether a part of the ranks can sum alone, the same on all ranks."""

    @property
    def encrypts(self) -> bool:
        """Whether the job's packets are encrypted, the same on all ranks."""

    @property
    def machines(self) -> list[int]:
        """The number of each rank's machine: the same on all ranks.

        If no ranks sum first, each rank counts as a machine.
        """

    @property
    def columns(self) -> int:
        """How many ranks of each machine speak for it, the same on all ranks.

        1 where they do not sum among themselves.
        """

    @property
    def timeout(self) -> float: ...
    def set_timeout(self, seconds: float) -> None:
        """Bound each all-reduce, those under way as well."""

    def submit(
        self,
        parts: Sequence[tuple[int, int]],
        dtype: DType,
        collective: Collective,
        root: int,
        average: bool,
        keep: object,
        notify: bool,
        layer: tuple[int, int] | None = None,
        loss_bound: float | None = None,
        participants: Sequence[int] | None = None,
    ) -> Pending:
        """Start a collective, in place, on parts: the address of each, and its elements.

        A reduce_scatter and an all_gather have one part a rank, the others one. `keep` is held
        until completion. With `notify`, the `Pending` is also handed out by
        `next_completion` once it is done. Every rank submits in the same order.

        `layer` is the place of the gradients' layer, from the model's input, and how many layers
        there are. Without it they go first. `loss_bound` is the part of each rank's elements that
        may be lost, in place of what the job says. All ranks give the same.

        `participants` are the ranks that sum, and get the sum; None is all. The others submit the
        same, send nothing, and keep what they have. A set may differ from the one before only once
        all ranks of that one have its sums.
        """

    def next_completion(self) -> Pending | None:
        """Blocks, without the GIL; None once the client is closed and drained.

        Several threads may call it.
        """

    def failure(self) -> FaninError | None: ...
    def left(self) -> list[int]:
        """Return the ranks that have left, as far as this one has heard; none once closed."""

    def statistics(self) -> dict[str, int]: ...
    @property
    def plan(self) -> JobPlan | None:
        """How the job is shared; None where no service sums, and once it is closed."""

    def close(self) -> None:
        """Leaves the job and fails what is outstanding. Idempotent."""

class Pending:
    """An all-reduce under way."""

    @property
    def keep(self) -> object: ...
    def wait(self, timeout: float | None = None) -> None:
        """Blocks, without the GIL; raises the typed error of `fanin.errors`."""

    def done(self) -> bool: ...
    def loss(self) -> tuple[int, int, int, int] | None:
        """Contributions that the sum would have, those that it lacks, blocks of nobody, rounds.

        All zero without a loss bound; None while there is no sum.
        """

    def exception(self) -> Exception | None: ...

class Switch:
    """A switch inside this process, on threads of its own."""

    def __new__(
        cls,
        listen: str = "127.0.0.1:0",
        *,
        pool_units: int | None = None,
        heartbeat_timeout: float | None = None,
        protocol: Protocol = "switchml",
        shards: int | None = None,
        secret_file: str | None = None,
    ) -> Switch: ...
    @property
    def address(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """By what its key is known: public."""

    def stop(self, linger: float = 0.0) -> None:
        """End it, once nobody is in any job, after `linger` seconds at the latest. Idempotent."""

class Traffic(TypedDict):
    """The traffic of the contributions of one step."""

    server_bytes: int
    """Bytes that reach the server."""
    in_network_bytes: int
    """Bytes that workers send, and that do not reach the server."""
    hop_bytes: int
    """Bytes times the links that they pass."""

class Schedule(Traffic):
    """The places where gradients are summed."""

    direct_bytes: int
    """The part of `server_bytes` that no switch has summed."""
    slowest_s: float
    """How long the slowest link takes."""
    nodes: list[list[str]]
    """For each sub-model the name of each worker's aggregation node."""

class Workload:
    """A training on one of GOAT's topologies, whose gradients can be planned for.

    `triangle` (workers w1 and on, server ps, switches s1 to s3), `leaf-spine` or `fat-tree`, with
    links of `rate_bps`. `memory` names the switches that sum, each with its bytes. A model of
    `size` bytes is cut into sub-models of at most `sub_model` bytes. Raises `ValueError` for what
    is not there, or cannot be planned for.
    """

    def __new__(
        cls,
        topology: str,
        memory: Mapping[str, int],
        workers: Sequence[str],
        server: str,
        size: int,
        sub_model: int,
        rate_bps: float,
    ) -> Workload: ...
    def plan(self, planner: str, seed: int) -> Schedule:
        """Plan: krgs (Eq. 4), krgs-overhead (Eq. 1), slowest, first-switches or at-server."""

    def shared_memory(
        self,
        arrivals: Sequence[tuple[int, int]],
        fragment_bytes: int,
        priorities: Sequence[int] | None,
        ways: Literal["tree", "each"],
        drawn: int,
    ) -> Traffic:
        """Count what goes where if switches share their memory among fragments (ATP and ESA).

        Contributions come in the order of `arrivals`, as (worker, fragment). Without `priorities`
        who comes first keeps a unit; with one for each fragment, who is more important takes it.
        All workers are one flow, a `tree`, or `each` is its own; `drawn` chooses of equal ways.
        """

def participation(
    intervals: Sequence[float], rounds: int, loss: float, variance: float, square: float
) -> list[int]:
    """Return the workers that the next epoch waits for, by GOAT's Algorithm 2.

    From the seconds that each worker took last; epochs are played for so many `rounds`. `loss` is
    how far the training is above its least, `variance` that of a worker's gradient, `square` the
    mean square of the gradient that is to be reached. Raises `ValueError` if nobody can be.
    """

def main(argv: list[str]) -> int:
    """Run the commands that are not Python's: switch, server, status, doctor, sim, version.

    Return the exit status.
    """

class Planned(TypedDict):
    """The split of a load."""

    shares: list[float]
    seconds_per_byte: float
    bound: str
    ring: float
    lower_bound: float

def send_order(partitions: Sequence[tuple[float, int, int]], seconds_a_byte: float) -> list[int]:
    """Return in which order partitions are sent: when each is there, needed, and its bytes."""

def plan(machines: Sequence[tuple[str, bool, bool, float, float, float]]) -> Planned:
    """Return the split over machines that takes the least time.

    A machine is its name, whether it trains, whether it sums, what its link carries out of it and
    into it in bits a second, and the bytes a second that its cores sum. Raises `ValueError` for
    what cannot be planned for.
    """

def cores() -> tuple[int, int]:
    """Return the cores that this process may use, and the bytes a second that one sums."""

def route_to(address: str) -> tuple[str, str | None, int | None] | None:
    """Return this machine's address towards "host:port", the interface, and its bits a second."""

def cut_off(
    address: str, timeout: float, trust: Trust | None = None, security: Security = "tag"
) -> str | None:
    """Return what keeps this machine from a service over TCP or UDP, `timeout` seconds for each.

    None where nothing does, or where it cannot be told.
    """

class Gauge:
    """Counts what fills it, at an address of this machine, until its seconds are over."""

    port: int
    ticket: int
    """What those who fill it have to know."""

    def __new__(cls, address: str, life: float) -> Gauge:
        """Raise `OSError` where there is no port, and `ValueError` for what is no address."""

    def close(self) -> None:
        """End it. Idempotent."""

def gauge_at(address: str, timeout: float, trust: Trust | None = None) -> tuple[int, int]:
    """Have a switch open a gauge, and return its port and ticket. Raises `fanin.errors`."""

def fill(address: str, ticket: int, seconds: float, window: int) -> int:
    """Fill a gauge at "host:port", and return the bits a second that it receives from all.

    At most `window` bytes are on the way. Raises `OSError` where it cannot be measured.
    """

def interface_address(interface: str, *, linked: bool = False) -> str:
    """Return an address of an interface of this machine, IPv4 where it has one.

    Raises `ValueError` where there is no such interface, or it is down, or has none; with `linked`
    also where it has no carrier.
    """

def switch_capacity(
    address: str,
    timeout: float,
    *,
    rank: int | None = None,
    look: Callable[[], None] | None = None,
    trust: Trust | None = None,
) -> tuple[int | None, int | None]:
    """Return the bits a second of a switch's link and the bytes that its cores sum, as it says.

    Raises `fanin.errors`.

    Waits for a switch that is not there yet, and says so as `rank`. What `look` raises ends that.
    """

def check_scenario(name: str, text: str) -> None:
    """Read a scenario file's text, and play nothing.

    Raises `ValueError` with the first mistake; its text begins with `name`, line and column.
    """

def layers(name: str, text: str) -> list[tuple[int, float, float]]:
    """Return the layers of a file of `[[layer]]` tables, in the order of the forward pass.

    Each is its parameters, and the seconds of its forward and its backward pass. Raises
    `ValueError` for a mistake.
    """

def whole_scenario(name: str, text: str) -> str:
    """Return a scenario file's text as JSON, with the nodes and links of a file that it names.

    That file is looked for from the folder of `name`. Raises `ValueError` with what keeps either
    from being read; its text begins with the file, line and column.
    """

def check_report() -> None:
    """Raise `ValueError` if this fanin was built without the page that shows simulations."""

def report_page(
    command: str,
    runs: Sequence[tuple[str, Path]],
    sweep: str | None = None,
    reproduction: str | None = None,
) -> str:
    """Return the HTML file that shows runs of the simulator.

    Each run is a name and the path of what `fanin sim --json` wrote. `sweep` and `reproduction`
    are JSON as page/src/report/contract.ts has it. Raises `ValueError` with what cannot be read,
    or if this fanin was built without the page.
    """

def system_keys(system: str) -> list[str]:
    """Return the keys of the table `[job.SYSTEM]` that a simulated system has for itself.

    Raises `ValueError` where there is no such system.
    """

def simulated_sum(scenario: str, seed: int, contributions: bytes) -> tuple[bytes, str]:
    """Return the sum of `contributions` as a simulated job makes it, and the run's report as JSON.

    `scenario` is a scenario file's text: one job that sums one tensor (`tensors = 1`). The elements
    of all ranks stand one rank after the other, float32 or int32 by the job's `dtype`, in this
    machine's byte order, as those of the sum do. Raises `ValueError` for a mistake in the scenario
    or numbers that are not its job's, and `RuntimeError` where a rule was broken.
    """

def summed(contributions: Sequence[bytes], dtype: DType) -> bytes:
    """Return the sum of float32, float16 or bfloat16, as a summation service makes it.

    Little-endian, packet by packet in one slot. Raises `ValueError` for another dtype, for none or
    more than 64 contributions, and where they are not all as long, in multiples of 128 bytes.
    """

def rotated(values: bytes, block: int, seed: int, back: bool) -> bytes:
    """Return float32 values, in this machine's byte order, rotated by chance, or rotated `back`.

    In blocks of `block` of them (and what is left over in smaller ones): signs that `seed` and a
    value's place give, then the Hadamard matrix over the root of its size. A NaN or an infinity
    spreads to all of its block, as NaN. Raises `ValueError` for a block that is no power of two,
    and bytes that are no whole number of values.
    """

def feed_back(address: int, elements: int, dtype: DType, residual: int, wire_dtype: str) -> None:
    """Add a residual to floats, and leave of them what travels unchanged as "int8" or "int4".

    `residual` is the address of as many float32, in which what is missing is left: the elements
    are the nearest levels of their block. A block that is not finite keeps its elements, and has
    no residual. Nobody else may use either memory meanwhile. Raises `ValueError` for a dtype other
    than float32, float16 and bfloat16, another wire dtype, and for an address of none.
    """

def machine_id() -> str:
    """Name the machine: equal where kernel, network namespace, /dev/shm and user are."""

def switch_address(text: str) -> str:
    """Return "host:port" of what names a switch: "box", "box:4800", "4900" (of this machine).

    Raises `ValueError` for what names none.
    """

def rate_bps(text: str) -> int:
    """Return the bits a second of "500mbit" or "1gbit". Raises `ValueError` with what to write."""

def size_bytes(text: str) -> int:
    """Return the bytes of "25MB" (10^6 each) or "100MiB" (2^20). Raises `ValueError` as above."""

def warn_of_unknown_variables() -> None:
    """Say on stderr, once a process, which variables look like fanin's and are not."""
