"""A torch that is not as fanin knows it: what is a convenience is missed, and all else works."""

from __future__ import annotations

import logging

import fanin.torch
import pytest
from conftest import free_address
from programs import BY_TORCH, Start
from torch import distributed

OTHER_TORCH = """
import torch.autograd.graph
from torch._C._distributed_c10d import ProcessGroup, Work

del torch.autograd.graph._engine_run_backward, torch._C.Future.add_done_callback
del Work._get_op_type, ProcessGroup.split_group

dist.init_process_group("fanin")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((1, 3), float(rank))).sum().backward()
say("gradients", model.module.weight.grad.flatten().tolist())
dist.destroy_process_group()
"""


def test_where_torch_lacks_what_is_replaced_programs_train_and_are_warned(start: Start) -> None:
    host, port = free_address().split(":")
    environment = {"MASTER_ADDR": host, "MASTER_PORT": port}
    ranks = [start(BY_TORCH + OTHER_TORCH, rank, 2, "", **environment) for rank in range(2)]
    for rank in ranks:
        assert rank.wait() == 0, rank.text()
        assert "gradients [0.5, 0.5, 0.5]" in rank.lines, rank.text()
        warned = [line for line in rank.lines if "is not as fanin knows it" in line]
        for missed in ("backward()", "callbacks that begin", "is_completed()", "split_group()"):
            assert sum(missed in line for line in warned) == 1, rank.text()


def test_a_torch_that_does_not_take_the_backend_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def register_backend(*_: object, **__: object) -> None:
        raise TypeError("another torch")

    monkeypatch.delattr(distributed.Backend, "FANIN")
    monkeypatch.setattr(distributed.Backend, "register_backend", register_backend)
    with caplog.at_level(logging.WARNING):
        fanin.torch._register()
    assert "could not tell this torch of the backend 'fanin'" in caplog.text
    assert "another torch" in caplog.text
