"""DDP's communication hook that compresses, and what it remembers.

Ranks must start their collectives in one order, and a callback of a future runs when it likes. So
only the hook starts any, which DDP calls for its buckets in one order: the second half of a
bucket's exchange is started in the hook's call for the next one, or for the last bucket at once.
"""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, Work
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as plain_hook

from fanin.torch.compression.compressors import Compressor, RandomK, TwoWay, check_gradient
from fanin.torch.compression.cut import Cut
from fanin.torch.compression.memory import Memory, Momentum, is_finite
from fanin.torch.compression.resumed import VERSION, Bucket, FirstStep, Saved

Averaged = torch.futures.Future[Tensor]

MIN_BYTES: Final = 65536
"""Buckets below it are sent as they are: BytePS' BYTEPS_MIN_COMPRESS_BYTES."""
TERMS_BYTES: Final = 512


@dataclass
class _Halfway:
    """A bucket whose shards are on their way to their owners."""

    memory: Memory
    work: Work
    received: Tensor
    buffer: Tensor
    done: Averaged


class CompressionState:
    """What `compression_hook` needs: how gradients are compressed, and what is left of them.

        state = CompressionState(TopK(0.01))
        model.register_comm_hook(state, compression_hook)

    One for each `DistributedDataParallel`, the same on all ranks of `process_group` (None: the
    default group). `error_feedback` adds what was not sent to the next gradient. `momentum` (0:
    none) adds Nesterov's momentum before, in place of the optimizer's, which then has to be 0. The
    gradients of the first `uncompressed_steps` are sent as they are, at least those of one: DDP
    forms its buckets anew after it. So are always buckets of less than `min_bytes`. After a step
    whose average is not finite somewhere, which no optimizer takes, both begin anew.

    Both are in `state_dict`, which is this rank's own: every rank saves and loads its own.

    Raises `TypeError` and `ValueError` for what is no such parameter; the first backward pass
    raises `ValueError` on all ranks if some rank's parameters are others, and a later one if it is
    another model's.
    """

    def __init__(
        self,
        compressor: Compressor,
        *,
        error_feedback: bool = True,
        momentum: float = 0.0,
        uncompressed_steps: int = 1,
        min_bytes: int = MIN_BYTES,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(compressor, TwoWay | RandomK):
            raise TypeError(
                f"compressor is {compressor!r}: give one of fanin.torch.compression's, as "
                "TopK(0.01)"
            )
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}: at least 0, and below 1")
        if uncompressed_steps < 1:
            raise ValueError(
                f"uncompressed_steps is {uncompressed_steps!r}: at least 1, as DDP forms its "
                "buckets anew after the first step, and what is left of a bucket would be another's"
            )
        if min_bytes < 0:
            raise ValueError(f"min_bytes is {min_bytes!r}: at least 0")
        self.compressor: TwoWay | RandomK = compressor
        self.error_feedback = error_feedback
        self.momentum = momentum
        self.uncompressed_steps = uncompressed_steps
        self.min_bytes = min_bytes
        self.process_group = process_group
        self._step = 0
        self._agreed = False
        # The model's parameters with their numbers, and those of each bucket once DDP has formed
        # the buckets anew.
        self._parameters: dict[Tensor, int] = {}
        self._buckets: dict[int, list[Tensor]] = {}
        # Whether each average of this step is finite.
        self._sound: list[Tensor] = []
        self._memories: dict[int, Memory] = {}
        self._momentum = Momentum(momentum) if momentum else None
        self._dice: torch.Generator | None = None
        self._halfway: _Halfway | None = None
        # The checkpoint that was loaded, until the first step after it.
        self._first: FirstStep | None = None

    def __repr__(self) -> str:
        return (
            f"{self.compressor}, error_feedback={self.error_feedback}, momentum={self.momentum}, "
            f"uncompressed_steps={self.uncompressed_steps}, min_bytes={self.min_bytes}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps from step to step, for a checkpoint.

        It is for `torch.save`: tensors, numbers and text. Call it between two steps, on every rank,
        and save every rank's own: what was not sent yet differs from rank to rank.
        """
        if self._first is not None:
            saved = self._first.saved
        else:
            self._forget_unsound()
            unsent = {index: memory.unsent() for index, memory in self._memories.items()}
            numbers = self._parameters
            velocities = {} if self._momentum is None else self._momentum.velocities()
            saved = Saved(
                self._step,
                [list(parameter.shape) for parameter in self._parameters],
                [
                    [numbers[parameter] for parameter in self._buckets[index]]
                    for index in range(len(self._buckets))
                ],
                {
                    index: (each[0].clone(), each[1].clone())
                    for index, each in unsent.items()
                    if each is not None
                },
                {numbers[parameter]: each.clone() for parameter, each in velocities.items()},
                None if self._dice is None else self._dice.get_state(),
            )
        return {"version": VERSION, **self._terms(), **vars(saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned to this rank, before a backward pass.

        On all ranks, with the checkpoint of the same step. The next step then has the bits that it
        would have had without the interruption, if the checkpoint is of the second step or a later
        one; before it there is the momentum alone. Raises `ValueError`, and loads nothing, if the
        checkpoint is of another compressor, of other numbers, of another rank or of another number
        of ranks. If it is of another model, the next backward pass raises it.
        """
        saved = Saved.of(state, self._terms())
        known = list(self._parameters) if self._first is None else self._first.known
        if known:
            saved.check(known)
        self._memories.clear()
        self._sound = []
        self._halfway = None
        self._buckets = {}
        self._parameters = {}
        self._agreed = False
        self._dice = None
        if self._momentum is not None:
            self._momentum.forget()
        # Before its second step DDP has not formed its buckets, and nothing is left but momentum.
        self._step = saved.step if saved.buckets else 0
        self._first = FirstStep(saved, known) if saved.step else None

    def _terms(self) -> dict[str, Any]:
        group = self.process_group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        return {"compressor": repr(self), "ranks": ranks, "rank": rank}

    def _resume(self, parameters: list[Tensor]) -> None:
        """Take over what was loaded, of parameters that are its own."""
        assert self._first is not None
        saved = self._first.saved
        if saved.dice is not None:
            try:
                self._own_dice(parameters[0].device).set_state(saved.dice.cpu())
            except RuntimeError as error:
                raise ValueError(
                    f"the checkpoint has the state of chance of another kind of device: {error}"
                ) from None
        memories: dict[int, Memory] = {}
        self._parameters = {parameter: number for number, parameter in enumerate(parameters)}
        self._buckets = {
            index: [parameters[number] for number in numbers]
            for index, numbers in enumerate(saved.buckets)
        }
        for index, unsent in saved.unsent.items():
            elements = sum(parameter.numel() for parameter in self._buckets[index])
            memories[index] = self._new_memory(elements, parameters[0].device)
            memories[index].resume(unsent)
        self._memories = memories
        if self._momentum is not None:
            self._momentum.resume({parameters[n]: each for n, each in saved.velocities.items()})
        self._first = None

    def average(self, bucket: GradBucket) -> Averaged:
        """Start averaging a bucket over the ranks: `compression_hook`."""
        check_gradient(bucket.buffer())
        if self._first is not None:
            return self._first.take(bucket, self._resume, self._average)
        return self._average(bucket)

    def _average(self, bucket: GradBucket | Bucket) -> Averaged:
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin_step()
        self._recognise(bucket)
        if not self._agreed:
            self._agree(buffer.device)
        if self._momentum is not None:
            self._momentum.add_to(bucket.parameters(), bucket.gradients())
        before = self._halfway
        self._halfway = None
        # There is nothing to compress of parameters without elements.
        if self._step <= self.uncompressed_steps or buffer.nbytes < max(self.min_bytes, 1):
            group = self.process_group or dist.group.WORLD
            assert group is not None  # DDP has one
            averaged = plain_hook(group, cast(GradBucket, bucket)).then(self._looking())
        else:
            self.compressor.check(buffer.numel())
            memory = self._memory(bucket.index(), buffer)
            if isinstance(self.compressor, RandomK):
                averaged = self._start_drawn(memory, buffer, bucket.index())
            else:
                averaged = self._start_two_way(memory, buffer)
        if before is not None:
            self._go_on(before)
        if bucket.is_last() and self._halfway is not None:
            self._go_on(self._halfway)
            self._halfway = None
        return averaged

    def _begin_step(self) -> None:
        self._step += 1
        self._halfway = None  # of a backward pass that an error ended
        self._forget_unsound()

    def _forget_unsound(self) -> None:
        sound, self._sound = self._sound, []
        if sound and not torch.stack(sound).all():
            # Nobody applied that step: a GradScaler skips it, and halves its scale. The rests of it
            # and of earlier steps would come late, and at twice their weight. All ranks have the
            # same averages, so all of them forget.
            self._memories.clear()
            if self._momentum is not None:
                self._momentum.forget()

    def _recognise(self, bucket: GradBucket | Bucket) -> None:
        """Raise `ValueError` unless a bucket is of the model whose buckets there were."""
        parameters = bucket.parameters()
        if self._step == 1:
            for parameter in parameters:
                self._parameters.setdefault(parameter, len(self._parameters))
        elif self._step == 2:
            self._buckets[bucket.index()] = parameters
        formed = self._buckets.get(bucket.index(), parameters)
        same = list(map(id, formed)) == list(map(id, parameters))
        if not same or not self._parameters.keys() >= set(parameters):
            raise ValueError(
                "the gradients are of other parameters than in the steps before, and what was not "
                "sent of those would be added to these: a CompressionState is for one "
                "DistributedDataParallel. Make one for each model, and a new one when a model is "
                "wrapped anew"
            )

    def _looking(self) -> Callable[[Averaged], Tensor]:
        """Return what hands an average on, and keeps in mind whether it is finite."""
        sound = self._sound

        def look(future: Averaged) -> Tensor:
            average = future.value()
            if average.numel():
                sound.append(is_finite(average))
            return average

        return look

    def _start_drawn(self, memory: Memory, buffer: Tensor, index: int) -> Averaged:
        assert isinstance(self.compressor, RandomK)
        # The same on all ranks, another one in each step and bucket.
        dice = torch.Generator().manual_seed(_mixed(self.compressor.seed, self._step, index))
        indices, values = memory.drawn(buffer, self.compressor, dice)
        size = dist.get_world_size(self.process_group)
        work = dist.all_reduce(values, group=self.process_group, async_op=True)

        def place(future: torch.futures.Future[Any]) -> Tensor:
            future.value()  # raises what it ended with
            if indices.is_cuda:
                # A callback has a stream of its own, and torch keeps only the future's value for
                # it. The other stream would be given the memory as soon as this function is gone.
                indices.record_stream(torch.cuda.current_stream(indices.device))
            buffer.zero_()
            buffer[indices] = values.div_(size).to(buffer.dtype)
            return buffer

        return _future_of(work).then(place).then(self._looking())

    def _start_two_way(self, memory: Memory, buffer: Tensor) -> Averaged:
        assert isinstance(self.compressor, TwoWay)
        messages = memory.messages(buffer, self.compressor, self._own_dice(buffer.device))
        received = torch.empty_like(messages)
        work = dist.all_to_all_single(received, messages, group=self.process_group, async_op=True)
        assert work is not None
        on_device = buffer.device.type != "cpu"
        done: Averaged = torch.futures.Future(devices=[buffer.device] if on_device else None)
        self._halfway = _Halfway(memory, work, received, buffer, done)
        # DDP dies of an exception in a future that was made in Python, and not of one in its child.
        return done.then(self._looking())

    def _go_on(self, halfway: _Halfway) -> None:
        """Sum the own shard, and start to say the sum to all."""
        assert isinstance(self.compressor, TwoWay)
        compressor, memory, done = self.compressor, halfway.memory, halfway.done
        halfway.work.wait()
        dice = self._own_dice(halfway.buffer.device)
        message = memory.sum_message(halfway.received, compressor, dice)
        gathered = halfway.received  # of the same shape, and read already
        work = dist.all_gather_single(gathered, message, group=self.process_group, async_op=True)

        def finish(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
                halfway.buffer.copy_(memory.average(gathered, compressor))
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
            else:
                done.set_result(halfway.buffer)

        _future_of(work).then(finish)

    def _memory(self, index: int, buffer: Tensor) -> Memory:
        cut = Cut.of(buffer.numel(), dist.get_world_size(self.process_group))
        memory = self._memories.get(index)
        if memory is None or memory.cut != cut:
            memory = self._memories[index] = self._new_memory(buffer.numel(), buffer.device)
        return memory

    def _new_memory(self, elements: int, device: torch.device) -> Memory:
        group = self.process_group
        cut = Cut.of(elements, dist.get_world_size(group))
        return Memory(cut, dist.get_rank(group), device, self.error_feedback)

    def _own_dice(self, device: torch.device) -> torch.Generator:
        """Return the chance of this rank alone."""
        if self._dice is None:
            seed = getattr(self.compressor, "seed", 0)
            rank = dist.get_rank(self.process_group)
            self._dice = torch.Generator(device).manual_seed(_mixed(seed, rank, 0))
        return self._dice

    def _agree(self, device: torch.device) -> None:
        """Raise `ValueError` on all ranks unless all say the same.

        By a collective, so that a rank without this hook, which sums at the same place, is told of.
        """
        size = dist.get_world_size(self.process_group)
        # After a checkpoint all are at the same step, or some rank has not loaded it.
        step = f" at step {self._step}" if self._step > 1 else ""
        own = f"{self}{step}".encode().ljust(TERMS_BYTES)
        said = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
        heard = torch.empty(size * TERMS_BYTES, dtype=torch.uint8, device=device)
        dist.all_gather_single(heard, said, group=self.process_group)
        terms = [bytes(each.tolist()).decode().strip() for each in heard.cpu().chunk(size)]
        ranks: dict[str, list[int]] = {}
        for rank, term in enumerate(terms):
            ranks.setdefault(term, []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"ranks {those}: {term}" for term, those in ranks.items())
            raise ValueError(f"the ranks compress gradients differently: {found}. Make it the same")
        self._agreed = True


def compression_hook(state: CompressionState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the ranks, in fewer bytes."""
    return state.average(bucket)


def _future_of(work: Work | None) -> torch.futures.Future[Any]:
    assert work is not None  # it is asynchronous, and this rank is in the group
    return work.get_future()


def _mixed(*numbers: int) -> int:
    """Make one seed of several numbers, such that no two are near each other."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ number) * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63
