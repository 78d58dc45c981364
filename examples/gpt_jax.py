"""The small GPT of gpt.py in JAX, with Equinox and optax.

    fanin run --nproc-per-node 4 examples/gpt_jax.py
    python examples/gpt_jax.py --batch 32     # one process, all ranks' sequences, the same curve

Three lines know of fanin: one joins the ranks, one has optax average the gradients, one averages
the loss that is shown. A step is one program of XLA, and the ranks' gradients are summed within it.
Seeds are fixed, as in gpt.py. It needs: pip install "fanin[jax]" equinox
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import fanin.jax
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY = 128  # ASCII; anything else becomes "?"
TEXT_BYTES = 4_000_000
SEED = 20210412


class Block(eqx.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    norm_1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm_2: eqx.nn.LayerNorm
    feed_forward: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: Any) -> None:
        first, second = jax.random.split(key)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=first)
        self.feed_forward = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=second)

    def __call__(self, x: Any) -> Any:
        """Map (length, width) to the same shape."""
        y = jax.vmap(self.norm_1)(x)
        past = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        x = x + self.attention(y, y, y, past)
        return x + jax.vmap(lambda each: self.feed_forward(self.norm_2(each)))(x)


class Gpt(eqx.Module):
    """Characters in, logits of the next character out."""

    tokens: Any
    positions: Any
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, context: int, width: int, heads: int, layers: int, key: Any) -> None:
        keys = jax.random.split(key, layers + 3)
        self.tokens = jax.random.normal(keys[0], (VOCABULARY, width))
        self.positions = jax.random.normal(keys[1], (context, width))
        self.blocks = [Block(width, heads, each) for each in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, VOCABULARY, use_bias=False, key=keys[2])

    def __call__(self, codes: Any) -> Any:
        """Map codes (length) to logits (length, vocabulary)."""
        x = self.tokens[codes] + self.positions[: codes.shape[0]]
        for block in self.blocks:
            x = block(x)
        return jax.vmap(lambda each: self.head(self.norm(each)))(x)


def standard_library() -> Any:
    """Return the text of this Python's own library as character codes, alike on every rank."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text += path.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
        if len(text) >= TEXT_BYTES:
            break
    return np.minimum(np.frombuffer(text[:TEXT_BYTES], np.uint8), VOCABULARY - 1)


def loss_of(model: Gpt, rows: Any) -> Any:
    """Return the mean cross entropy of each next character."""
    logits = jax.vmap(model)(rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
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
    group = fanin.jax.connect()
    rank, batch = group.rank, args.batch
    key = jax.random.key(SEED)
    model: Any = Gpt(args.context, args.width, args.heads, args.layers, key)
    optimizer = optax.chain(fanin.jax.average_gradients(group), optax.adam(args.learning_rate))
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    learn: Any = eqx.filter_value_and_grad(loss_of)

    @eqx.filter_jit(donate="all")
    def step(model: Gpt, state: Any, rows: Any) -> tuple[Gpt, Any, Any]:
        loss, gradients = learn(model, rows)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, fanin.jax.all_reduce(loss, group, "avg")

    text, dice = standard_library(), np.random.default_rng(SEED)
    curve, began = [], time.monotonic()
    for number in range(1, args.steps + 1):
        # All ranks draw all ranks' sequences, and each takes its own.
        starts = dice.integers(len(text) - args.context - 1, size=batch * group.world_size)
        own = starts[rank * batch :][:batch]
        rows = jnp.asarray(np.stack([text[at : at + args.context + 1] for at in own]))
        model, state, loss = step(model, state, rows.astype(jnp.int32))
        curve.append(float(loss))
        if rank == 0 and number % args.every == 0:
            seconds = (time.monotonic() - began) / number
            print(
                f"step {number}: loss {curve[-1]:.4f}, {1000 * seconds:.0f} ms a step", flush=True
            )
    if rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(curve))
    group.close()


if __name__ == "__main__":
    main()
