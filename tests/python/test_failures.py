"""What ends the joining of one rank is told to the others."""

from __future__ import annotations

import pytest
from fanin import errors
from fanin._failures import Failures
from torch._C._distributed_c10d import HashStore


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.PoolExhausted("no memory is left"), "rank 1: no memory is left"),
        (MemoryError("none left"), "rank 1: MemoryError: none left"),
        # All ranks may raise these, and rank 1 was only the first to tell.
        (errors.SwitchUnreachable("rank 0 cannot host a service"), "rank 0 cannot host a service"),
        (errors.SettingMismatch("the ranks differ"), "the ranks differ"),
    ],
)
def test_others_hear_which_rank_cannot_join_and_why(error: Exception, told: str) -> None:
    store = HashStore()
    Failures(store, 1, 3).tell(error)
    Failures(store, 0, 3).tell(RuntimeError("later"))
    Failures(store, 1, 3).look()
    for other in (0, 2):
        with pytest.raises(errors.FaninError) as raised:
            Failures(store, other, 3).look("; all end")
        assert str(raised.value) == f"{told}; all end"
