"""A loop under Lightning, with one of its strategies: lit.py STRATEGY [BACKEND].

STRATEGY is a name that Lightning knows, or "model_parallel", which shards by FSDP2.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import results
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Logs a mean over the ranks of a float, and of a whole number, at each step."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.model = results.model()
        self.unused = torch.nn.Linear(4, 4) if unused else None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _index: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.log("tokens", torch.tensor(7 + self.global_rank), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _index: int) -> None:
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("evaluated", loss, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(self.trainer.logged_metrics["loss"].item())

    def on_fit_end(self) -> None:
        # The trainer reduces a whole number itself, as NCCL does: towards zero.
        count = torch.tensor(7 + self.global_rank)
        reduced = self.trainer.strategy.reduce(count, reduce_op="mean")
        logged = self.trainer.logged_metrics
        results.write(
            self.global_rank,
            backend=dist.get_backend(),
            losses=self.losses,
            tokens=logged["tokens"].item(),
            count=reduced.item(),
            evaluated=logged["evaluated"].item(),
            parameters=results.flat(self.model),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def main() -> None:
    strategy: Any = sys.argv[1]
    backend = sys.argv[2] if len(sys.argv) > 2 else None
    unused = "unused" in strategy
    if strategy == "model_parallel":
        strategy = ModelParallelStrategy(process_group_backend=backend)
    elif backend is not None:
        strategy = DDPStrategy(process_group_backend=backend)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loader = torch.utils.data.DataLoader(results.data(), batch_size=4)
    trainer.fit(Module(unused), loader, loader)
    if dist.is_initialized():
        # Lightning leaves it as it is, and threads of Gloo's then meet an interpreter that ends.
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
