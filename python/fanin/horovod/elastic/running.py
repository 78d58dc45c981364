"""`run`: from one state that all ranks have to the next."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from fanin.horovod.elastic.state import State
from fanin.horovod.errors import (
    Apart,
    Disagreement,
    HorovodInternalError,
    HostsUpdatedInterrupt,
)
from fanin.horovod.starting import init_again
from fanin.horovod.world import shutdown, world

log = logging.getLogger(__name__)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a `State`.

    Each call of it begins with the state of rank 0. A `HorovodInternalError` that it raises undoes
    what came after the last `State.commit`; a `HostsUpdatedInterrupt` does not. Then the ranks that
    are there meet anew, and it is called once more; but not after an error that tells of a mistake,
    as the same steps would come to it again. It calls no collective before the state is used, as
    ranks may come from different places.
    """

    @functools.wraps(func)
    def training(state: State, *args: Any, **keywords: Any) -> Any:
        before: list[Callable[[], None]] = [state.sync]
        while True:
            try:
                while before:
                    before[0]()
                    del before[0]
                world().meeting.has_state()
                return func(state, *args, **keywords)
            except (Apart, Disagreement):
                raise
            except HorovodInternalError as error:
                log.warning("[fanin] ranks meet anew, from the last commit: %s", error)
                before = [state.restore, shutdown, init_again, state.on_reset, state.sync]
            except HostsUpdatedInterrupt:
                # Also where some only leave: others may have come before all have met.
                before = [shutdown, init_again, state.on_reset, state.sync]

    return training
