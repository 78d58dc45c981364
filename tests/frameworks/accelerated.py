"""A loop under Accelerate: in processes that a launcher started, or that a notebook does.

    accelerated.py [launched | notebook | before]

"before" makes the group itself, on "fanin", which Accelerate then takes.
"""

from __future__ import annotations

import sys

import results
import torch
import torch.distributed as dist
from accelerate import Accelerator, notebook_launcher


def train(way: str) -> None:
    if way == "before":
        dist.init_process_group("fanin")
    accelerator = Accelerator(cpu=True)
    model = results.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(results.data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    results.write(
        accelerator.process_index,
        backend=dist.get_backend(),
        losses=losses,
        gathered=accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
        parameters=results.flat(model),
    )
    accelerator.end_training()


if __name__ == "__main__":
    if sys.argv[1] == "notebook":
        notebook_launcher(train, ("notebook",), num_processes=2)
    else:
        train(sys.argv[1])
