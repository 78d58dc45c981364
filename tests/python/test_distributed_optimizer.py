"""Training that waits for no gradient before its layer needs it: the same as with DDP, to the bit."""

from __future__ import annotations

from typing import Any

import fanin.torch
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin.torch import DistributedOptimizer, Options
from ranks import Me
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

STEPS = 6

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda of: optim.SGD(of, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda of: optim.AdamW(of, lr=0.01),
}


class Net(nn.Module):
    """Of many kinds: small and large layers, a shared weight, one that its module does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(32, 4000), nn.Tanh(), nn.Linear(4000, 32))
        self.norm = nn.BatchNorm1d(32)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.recurrent(x)[0]
        x = self.norm(self.wide(x).mean(1))
        out: torch.Tensor = self.head(self.branches[branch](x))
        return out


def batches(me: Me) -> Any:
    dice = torch.Generator().manual_seed(me.rank)
    for step in range(STEPS):
        tokens = torch.randint(0, 50, (8, 5), generator=dice)
        # The ranks never agree, and nobody ever uses the last branch.
        yield tokens, tokens[:, 0], (me.rank + step) % 2


def trained(me: Me, kind: str, exact: bool, overlapped: bool) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(me.rank if overlapped else 0)
    net = Net()
    if overlapped:
        optimizer = DistributedOptimizer(OPTIMIZERS[kind](net.parameters()), net)
        model: Any = net
    else:
        model = DistributedDataParallel(net, find_unused_parameters=True, broadcast_buffers=False)
        optimizer = OPTIMIZERS[kind](net.parameters())
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for tokens, labels, branch in batches(me):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens, branch), labels).backward()
        optimizer.step()
        schedule.step()
    return [each.detach().clone() for each in net.parameters()], optimizer.state_dict()


def on_both(me: Me, kind: str, exact: bool) -> Any:
    me.init("fanin", pg_options=Options(exact=exact))
    return trained(me, kind, exact, False), trained(me, kind, exact, True)


def differences(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("kind", "exact"), [("sgd", True), ("adamw", True), ("sgd", False)])
def test_parameters_are_those_of_ddp(launch: Launch, kind: str, exact: bool) -> None:
    found = launch(on_both, 3, kind, exact).results()
    for (ddp, their_state), (ours, state) in found:
        assert differences(ours, found[0][1][0]) == 0, "on all ranks"
        assert differences(ours, ddp) <= (0 if exact else 1e-6)
        assert state["param_groups"] == their_state["param_groups"]
        assert state["state"].keys() == their_state["state"].keys()
