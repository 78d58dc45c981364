"""Gradients averaged among ranks, as a transformation of optax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from fanin._settings import PACKED
from fanin.arrays.group import Group
from fanin.jax.collectives import all_reduce, all_reduce_with_residuals

if TYPE_CHECKING:
    import optax

# Gradients that are shorter travel together: packets are full, and a sum's fixed costs are paid
# once.
BUCKET_BYTES: Final = 4 << 20
# Up to so many elements travel as they are, whatever was asked for (docs/wire.md).
_AS_IT_IS_MAX: Final = 4096
_ROUNDED: Final = ("float32", "float16", "bfloat16")


class ErrorFeedbackState(NamedTuple):
    """The parts of this rank's gradients that rounding has taken, by bucket."""

    residuals: tuple[Any, ...]


def average_gradients(
    group: Group, *, error_feedback: bool = False, bucket_bytes: int = BUCKET_BYTES
) -> optax.GradientTransformation:
    """Return a transformation that averages gradients over the group's ranks.

    It stands before the optimizer: ``optax.chain(average_gradients(group), optax.adam(1e-3))``. The
    last gradients of the tree go first, as a backward pass makes those first, and short ones
    together, up to `bucket_bytes`. With `error_feedback`, for a group of ``wire_dtype="int8"``
    or ``"int4"``, what rounding takes of a rank's gradients is added to its next ones. Needs optax.
    """
    import optax

    if error_feedback and group.wire_dtype not in PACKED:
        raise ValueError(
            f'error_feedback is for a group of wire_dtype="int8" or "int4", and this one\'s is '
            f"{group.wire_dtype}: nothing else takes so much of gradients that it has to be kept"
        )

    def init(params: Any) -> optax.OptState:
        if not error_feedback:
            return optax.EmptyState()
        leaves = jax.tree.leaves(params)
        lengths = [
            sum(leaves[index].size for index in bucket)
            for bucket in _buckets(leaves, bucket_bytes)
            if _is_rounded(leaves, bucket)
        ]
        return ErrorFeedbackState(tuple(jnp.zeros(length, jnp.float32) for length in lengths))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        buckets = _buckets(leaves, bucket_bytes)
        packed = [_packed(leaves, bucket) for bucket in buckets]
        if error_feedback:
            rounded = [_is_rounded(leaves, bucket) for bucket in buckets]
            chosen = [each for each, is_one in zip(packed, rounded, strict=True) if is_one]
            others = [each for each, is_one in zip(packed, rounded, strict=True) if not is_one]
            sums, residuals = (
                all_reduce_with_residuals(chosen, state.residuals, group) if chosen else ([], [])
            )
            state = ErrorFeedbackState(tuple(residuals))
            of_chosen, of_others = iter(sums), iter(all_reduce(others, group, "avg"))
            averages = [next(of_chosen) if is_one else next(of_others) for is_one in rounded]
        else:
            averages = all_reduce(packed, group, "avg")
        found = list(leaves)
        for bucket, average in zip(buckets, averages, strict=True):
            begin = 0
            for index in bucket:
                leaf = leaves[index]
                found[index] = average[begin : begin + leaf.size].reshape(leaf.shape)
                begin += leaf.size
        return jax.tree.unflatten(structure, found), state

    return optax.GradientTransformation(init, update)


def _buckets(leaves: Sequence[Any], most: int) -> list[list[int]]:
    """Return which leaves travel together, the last ones first."""
    buckets: list[list[int]] = []
    # For each dtype, so that leaves of others change nothing: some have no gradient.
    last: dict[Any, tuple[list[int], int]] = {}
    for index in reversed(range(len(leaves))):
        leaf = leaves[index]
        size = leaf.size * leaf.dtype.itemsize
        bucket, held = last.get(leaf.dtype, ([], most))
        if held + size > most:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(index)
        last[leaf.dtype] = bucket, held + size
    return buckets


def _is_rounded(leaves: Sequence[Any], bucket: Sequence[int]) -> bool:
    dtype, length = leaves[bucket[0]].dtype, sum(leaves[index].size for index in bucket)
    return dtype.name in _ROUNDED and length > _AS_IT_IS_MAX


def _packed(leaves: Sequence[Any], bucket: Sequence[int]) -> Any:
    flat = [leaves[index].reshape(-1) for index in bucket]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)
