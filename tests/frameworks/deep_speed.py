"""A loop under DeepSpeed: deep_speed.py STAGE [BACKEND]."""

from __future__ import annotations

import sys

import deepspeed
import results
import torch
import torch.distributed as dist

stage = int(sys.argv[1])
deepspeed.init_distributed(dist_backend=sys.argv[2] if len(sys.argv) > 2 else "gloo")
model = results.model()
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    training_data=results.data(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    },
)
losses = []
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
    parameters = results.flat(model)
results.write(dist.get_rank(), backend=dist.get_backend(), losses=losses, parameters=parameters)
dist.barrier()
dist.destroy_process_group()
