"""The backend "fanin": which collectives the services serve, and Gloo for all others.

`fanin_backend` is the backend of one rank, `channel` its way to the services, `delegating` its way
to the Gloo group inside, and `groups` what a program asks of a group. How ranks find each other is
`fanin.torch.rendezvous`; what a collective is until it is over, `fanin.torch.works`.
"""

from fanin._bounds import loss_bound
from fanin._layers import priority
from fanin.torch.backend.fanin_backend import FaninBackend, create
from fanin.torch.backend.groups import (
    backend_of,
    lost,
    named_apart,
    plan,
    replan,
    same_ranks,
    shrink,
)

__all__ = [
    "FaninBackend",
    "backend_of",
    "create",
    "loss_bound",
    "lost",
    "named_apart",
    "plan",
    "priority",
    "replan",
    "same_ranks",
    "shrink",
]
