"""Many ranks as threads of one process, without torch: `many_ranks.py SWITCH FIRST COUNT OF BY`."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any, Literal

import fanin
import numpy as np
from fanin import errors

Protocol = Literal["switchml", "atp"]


def ranks_of_a_rack(
    switch: str, first: int, count: int, world_size: int, protocol: Protocol
) -> dict[str, Any]:
    """What ranks `first` and after get, each a thread of this process."""
    sums: list[Any] = [None] * count

    def rank(number: int) -> None:
        try:
            with fanin.connect(
                switch, job="many", rank=number, world_size=world_size, protocol=protocol
            ) as group:
                long = group.all_reduce(np.full(20_000, number % 7, dtype=np.float32))
                short = group.all_reduce(np.arange(100, dtype=np.float32) + number)
            sums[number - first] = [sorted(set(long.tolist())), short.tolist()]
        except errors.FaninError as error:
            sums[number - first] = str(error)

    threads = [threading.Thread(target=rank, args=(first + i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"alike": all(each == sums[0] for each in sums), "sum": sums[0]}


if __name__ == "__main__":
    at, *numbers, by = sys.argv[1:]
    first, count, world_size = map(int, numbers)
    summed = ranks_of_a_rack(at, first, count, world_size, "atp" if by == "atp" else "switchml")
    print(json.dumps(summed))
