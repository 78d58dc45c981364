"""A small GPT that learns Python's standard library, character by character, with plain DDP.

    fanin run --nproc-per-node 4 examples/gpt.py
    fanin run --nproc-per-node 4 examples/gpt.py --fsdp
    torchrun --nproc-per-node 4 examples/gpt.py --backend gloo

The only line that knows of fanin is the one that says `init_process_group`. With --fsdp each rank
keeps a part of the parameters (FSDP2), and gradients are summed by reduce-scatters. Seeds are
fixed: two runs with the same arguments see the same data and start from the same parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 128  # ASCII; anything else becomes "?"
TEXT_BYTES = 4_000_000
SEED = 20210412


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.attention_in(self.norm_1(x)).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed_forward(self.norm_2(x))
        return out


class Gpt(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map codes (batch, length) to logits (batch, length, vocabulary)."""
        positions = torch.arange(tokens.shape[1])
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library() -> Tensor:
    """Return the text of this Python's own library as character codes, alike on every rank."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).clamp(max=VOCABULARY - 1)


def batch_of(text: Tensor, size: int, context: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sequences, and the same shifted by one character."""
    starts = torch.randint(len(text) - context - 1, (size,), generator=dice)
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--backend", choices=["fanin", "gloo"], default="fanin")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters (FSDP2)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters a sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=10, help="print every so many steps")
    parser.add_argument("--json", metavar="FILE", help="write the loss curve there")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    # Ranks on one machine share its cores; threads of theirs would only fight over them.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    dist.init_process_group(args.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(SEED)
    gpt = Gpt(args.context, args.width, args.heads, args.layers)
    model: nn.Module
    if args.fsdp:
        mesh = init_device_mesh("cpu", (world_size,))
        for block in gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(gpt, mesh=mesh)
        model = gpt
    else:
        model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    text = standard_library()
    dice = torch.Generator().manual_seed(SEED + 1 + rank)  # every rank draws data of its own
    if rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{args.backend}: {world_size} ranks, {parameters:,} parameters", flush=True)

    tokens_per_step = args.batch * args.context * world_size
    losses: list[float] = []
    began = printed = time.monotonic()
    for step in range(1, args.steps + 1):
        inputs, targets = batch_of(text, args.batch, args.context, dice)
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # In float64, so that the report adds no error of its own to what it reports.
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        if rank == 0 and step % args.every == 0:
            now = time.monotonic()
            speed = args.every * tokens_per_step / (now - printed)
            printed = now
            print(f"step {step:5d}  loss {losses[-1]:.4f}  {speed:8.0f} tokens/s", flush=True)
    seconds = time.monotonic() - began

    if rank == 0 and args.json:
        curve = {
            "backend": args.backend,
            "world_size": world_size,
            "losses": losses,
            "tokens_per_second": args.steps * tokens_per_step / seconds,
        }
        Path(args.json).write_text(json.dumps(curve), encoding="utf-8")
    # No rank tears its connections down while another still works: Gloo may abort when they close.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
