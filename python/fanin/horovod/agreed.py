"""Operations on which all ranks have agreed before: a number stands for a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from fanin.horovod.requests import Batch, Decision, Kind, Operation, Repeat, Request

AGREED_MAX: Final = 1024
"""So many operations have numbers, the first ones that came twice."""
UNNAMED: Final = "noname."
"""The beginning of a name that an operation gets if the program gives none."""


class Agreed:
    """Operations by number. All ranks hear of them in one order, so they have the same numbers."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._numbers: dict[Request, int] = {}
        # By identity, as those that are decided again are mostly these.
        self._places: dict[int, int] = {}
        # The latest that came once: a name may have a step in it, and never come again.
        self._once: dict[Request, None] = {}

    def __getitem__(self, number: int) -> Request:
        return self._requests[number]

    def number(self, request: Request) -> int | None:
        """Return the number of a request, whichever rank's it is; None if it has none."""
        place = self._places.get(id(request))
        return self._numbers.get(replace(request, rank=0)) if place is None else place

    def learn(self, decisions: Sequence[Decision]) -> list[int]:
        """Remember what is to be executed, and return the numbers that are new."""
        first = len(self._requests)
        for decision in decisions:
            for operation in decision.operations if isinstance(decision, Batch) else ():
                if id(operation.request) in self._places:
                    continue
                one = replace(operation.request, rank=0)
                if one in self._numbers or not _recurs(one):
                    continue
                if one not in self._once:
                    self._once[one] = None
                    if len(self._once) > AGREED_MAX:
                        del self._once[next(iter(self._once))]
                elif len(self._requests) < AGREED_MAX:
                    del self._once[one]
                    self._numbers[one] = self._places[id(one)] = len(self._requests)
                    self._requests.append(one)
        return list(range(first, len(self._requests)))

    def shortened(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Return decisions with numbers for batches that have them."""
        return [self._shortened(decision) for decision in decisions]

    def whole(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Return decisions as they were before they were shortened."""
        return [
            Batch(tuple(Operation(self[number], 0.0) for number in decision.numbers))
            if isinstance(decision, Repeat)
            else decision
            for decision in decisions
        ]

    def _shortened(self, decision: Decision) -> Decision:
        if not isinstance(decision, Batch):
            return decision
        numbers = [self.number(operation.request) for operation in decision.operations]
        known = tuple(number for number in numbers if number is not None)
        return Repeat(known) if len(known) == len(numbers) else decision


def _recurs(request: Request) -> bool:
    """Return whether it may come again, and is decided by nothing but what is in it."""
    dense = request.kind is Kind.ALLREDUCE and not request.sparse
    return dense and request.process_set == 0 and not request.name.startswith(UNNAMED)


def numbers_in(mask: int) -> Iterator[int]:
    """Yield the numbers whose bits are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
