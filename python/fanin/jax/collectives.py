"""Collectives of arrays and pytrees as functions of JAX, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax import core
from jax._src import core as jax_core
from jax._src import effects  # there is no public way to order calls; mpi4jax does it so, too
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from fanin.arrays.group import Group, Handle
from fanin.arrays.operators import OPS, Array, Op, checked, rows_of
from fanin.jax import foreign

Tree = TypeVar("Tree")


class _Ordered(effects.Effect):
    """The calls of a process are in the order of the program."""

    def __repr__(self) -> str:
        return "fanin's collectives"


_ordered = _Ordered()
for _kind in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _kind.add_type(_Ordered)

# Any: jax does not say the types of what makes a primitive.
_collective: Any = Primitive("fanin")
_collective.multiple_results = True


def all_reduce(tree: Tree, group: Group, op: Op = "sum") -> Tree:
    """Combine the ranks' arrays leaf by leaf, as `fanin.Group.all_reduce` does.

    The gradient of "sum" and "avg" is that of the sum of all ranks' losses: the cotangents are
    reduced alike. The other operators have none. Raises `ValueError` and `TypeError` as the group's
    method does; what the network raises comes as `jax.errors.JaxRuntimeError`, which names it.
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; supported: {', '.join(OPS)}")
    reduce = _reduced if op in ("sum", "avg") else _all_reduced
    return _of_leaves(tree, lambda leaves: reduce(group, op, leaves))


def broadcast(tree: Tree, group: Group, root: int = 0) -> Tree:
    """Return on all ranks what the rank `root` gives. Its gradient is the sum of the ranks'."""
    return _of_leaves(tree, lambda leaves: _spread(group, root, leaves))


def all_gather(tree: Tree, group: Group) -> Tree:
    """Return the ranks' arrays one behind the other along the first axis, on all ranks."""
    return _of_leaves(tree, lambda leaves: _gathered(group, [*map(_with_axis, leaves)]))


def reduce_scatter(tree: Tree, group: Group, op: Op = "sum") -> Tree:
    """Combine as `all_reduce`, and return this rank's part of the first axis."""
    if op not in OPS:
        raise ValueError(f"op is {op!r}; supported: {', '.join(OPS)}")
    scatter = _scattered if op in ("sum", "avg") else _reduce_scattered
    return _of_leaves(tree, lambda leaves: scatter(group, op, leaves))


def all_reduce_with_residuals(
    leaves: Sequence[Any], residuals: Sequence[Any], group: Group
) -> tuple[list[Any], list[Any]]:
    """Average arrays after they were rounded to what the wire dtype can say.

    Each has a residual of its shape in float32: what rounding took before is added first. Returns
    the averages, and the residuals for the next time (`docs/compression.md`).
    """
    wanted = [(leaf.size, "float32") for leaf in leaves]
    if [(each.size, each.dtype.name) for each in residuals] != wanted:
        raise ValueError(
            "the state does not fit the gradients: it was made of other parameters, or with "
            "another bucket_bytes; make it anew with init"
        )
    made = _bind(
        group,
        ("all_reduce", "avg"),
        _all_reduce_of("avg"),
        [*leaves, *residuals],
        [jax.typeof(leaf) for leaf in (*leaves, *residuals)],
        residuals=len(residuals),
        in_place=True,
    )
    return made[: len(leaves)], made[len(leaves) :]


def called(of: object, key: Any, begin: foreign.Begin, leaves: Sequence[Any]) -> list[Any]:
    """Call `begin` of each leaf, in whose place its result comes, in the order of the program.

    `of` is given to it, and kept by its caller. `key` is the same for each `begin`.
    """
    return _bind(of, key, begin, leaves, [*map(jax.typeof, leaves)], in_place=True)


def _of_leaves(tree: Tree, work: Callable[[list[Any]], Sequence[Any]]) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    return cast("Tree", jax.tree.unflatten(structure, work([*map(jax.numpy.asarray, leaves)])))


def _with_axis(leaf: Any) -> Any:
    return jax.numpy.atleast_1d(leaf)


# These functions begin a collective of an operand, and write its result into XLA's memory.


def _all_reduce_of(op: Op) -> foreign.Begin:
    def begin(group: Group, _: int, operand: Array, result: Array) -> Handle:
        foreign.copy(operand, result)
        return group.all_reduce_async(result, op)

    return begin


def _broadcast_of(root: int) -> foreign.Begin:
    def begin(group: Group, _: int, operand: Array, result: Array) -> Handle:
        foreign.copy(operand, result)
        return group.broadcast_async(result, root)

    return begin


def _all_gather(group: Group, _: int, operand: Array, result: Array) -> Handle:
    return group.all_gather_async(operand, out=result)


def _reduce_scatter_of(op: Op) -> foreign.Begin:
    def begin(group: Group, _: int, operand: Array, result: Array) -> Handle:
        return group.reduce_scatter_async(operand, op, out=result)

    return begin


def _checked(op: Op, leaves: list[Any]) -> Op:
    """Return the operator. Raises as the group's own methods do, before anything runs."""
    for leaf in leaves:
        op = checked(op, np.dtype(leaf.dtype))
    return op


def _all_reduced(group: Group, op: Op, leaves: list[Any]) -> list[Any]:
    op = _checked(op, leaves)
    likes = [*map(jax.typeof, leaves)]
    key, begin = ("all_reduce", op), _all_reduce_of(op)
    return _bind(group, key, begin, leaves, likes, in_place=True)


def _broadcasted(group: Group, root: int, leaves: list[Any]) -> list[Any]:
    if not 0 <= root < group.world_size:
        raise ValueError(f"rank {root} is not in a group of {group.world_size}")
    likes = [*map(jax.typeof, leaves)]
    key, begin = ("broadcast", root), _broadcast_of(root)
    return _bind(group, key, begin, leaves, likes, in_place=True)


def _all_gathered(group: Group, leaves: list[Any]) -> list[Any]:
    likes = [_like(leaf, leaf.shape[0] * group.world_size) for leaf in leaves]
    return _bind(group, "all_gather", _all_gather, leaves, likes)


def _reduce_scattered(group: Group, op: Op, leaves: list[Any]) -> list[Any]:
    op = _checked(op, leaves)
    size = group.world_size
    likes = [_like(leaf, rows_of(leaf.shape, size, "reduce_scatter")) for leaf in leaves]
    return _bind(group, ("reduce_scatter", op), _reduce_scatter_of(op), leaves, likes)


def _like(leaf: Any, rows: int) -> Any:
    return core.ShapedArray((rows, *leaf.shape[1:]), leaf.dtype)


# Their gradients, of the sum of all ranks' losses.


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reduced(group: Group, op: Op, leaves: list[Any]) -> list[Any]:
    return _all_reduced(group, op, leaves)


_reduced.defvjp(
    lambda group, op, leaves: (_reduced(group, op, leaves), None),
    lambda group, op, _, cotangents: (
        _of_numbers(cotangents, lambda leaves: _reduced(group, op, leaves)),
    ),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _spread(group: Group, root: int, leaves: list[Any]) -> list[Any]:
    return _broadcasted(group, root, leaves)


def _to_root(group: Group, root: int, _: None, cotangents: list[Any]) -> tuple[list[Any]]:
    sums = _of_numbers(cotangents, lambda leaves: _reduced(group, "sum", leaves))
    if group.rank == root:
        return (sums,)
    return (_of_numbers(sums, lambda leaves: [*map(jax.numpy.zeros_like, leaves)]),)


_spread.defvjp(lambda group, root, leaves: (_spread(group, root, leaves), None), _to_root)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(group: Group, leaves: list[Any]) -> list[Any]:
    return _all_gathered(group, leaves)


def _summed_parts(group: Group, leaves: list[Any]) -> list[Any]:
    return _scattered(group, "sum", leaves)


_gathered.defvjp(
    lambda group, leaves: (_gathered(group, leaves), None),
    lambda group, _, cotangents: (_of_numbers(cotangents, partial(_summed_parts, group)),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scattered(group: Group, op: Op, leaves: list[Any]) -> list[Any]:
    return _reduce_scattered(group, op, leaves)


def _to_all(group: Group, op: Op, _: None, cotangents: list[Any]) -> tuple[list[Any]]:
    def gathered(leaves: list[Any]) -> list[Any]:
        whole = _gathered(group, leaves)
        return whole if op == "sum" else [each / group.world_size for each in whole]

    return (_of_numbers(cotangents, gathered),)


_scattered.defvjp(lambda group, op, leaves: (_scattered(group, op, leaves), None), _to_all)


def _of_numbers(cotangents: Sequence[Any], work: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Do it to the cotangents of floats: those of integers say nothing."""
    is_number = [each.dtype != jax.dtypes.float0 for each in cotangents]
    chosen = [each for each, is_one in zip(cotangents, is_number, strict=True) if is_one]
    done = iter(work(chosen) if chosen else [])
    return [
        next(done) if is_one else each for each, is_one in zip(cotangents, is_number, strict=True)
    ]


def _bind(
    group: object,
    key: Any,
    begin: foreign.Begin,
    leaves: Sequence[Any],
    likes: Sequence[Any],
    *,
    residuals: int = 0,
    in_place: bool = False,
) -> list[Any]:
    for leaf in leaves:
        if leaf.dtype.name not in foreign.DTYPES:
            raise TypeError(f"cannot sum or send dtype {leaf.dtype}: convert it first")
    return list(
        _collective.bind(
            *leaves,
            group=foreign.group_number(group),
            call=foreign.call_number(key, begin),
            shapes=tuple(like.shape for like in likes),
            residuals=residuals,
            in_place=in_place,
        )
    )


def _abstract(*leaves: Any, shapes: Any, **_: Any) -> Any:
    made = [core.ShapedArray(shape, leaf.dtype) for leaf, shape in zip(leaves, shapes, strict=True)]
    return made, {_ordered}


# Outside of `jit` a call is a program of its own, which is compiled once.
_run = jax.jit(
    _collective.bind,
    static_argnames=("group", "call", "shapes", "residuals", "in_place"),
)


_collective.def_effectful_abstract_eval(_abstract)
_collective.def_impl(_run)


def _batched(leaves: Any, dims: Any, *, shapes: Any, in_place: bool, **said: Any) -> Any:
    """Put the new axis last: what is done, is done along the first one, or to each element."""
    size = next(leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None)
    moved = [
        jax.numpy.broadcast_to(leaf[..., None], (*leaf.shape, size))
        if dim is None
        else jax.numpy.moveaxis(leaf, dim, -1)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    wider = tuple((*shape, size) for shape in shapes)
    made = _collective.bind(*moved, shapes=wider, in_place=in_place, **said)
    return made, [len(shape) for shape in shapes]


batching.primitive_batchers[_collective] = _batched


def _lowered(ctx: Any, *leaves: Any, shapes: Any, in_place: bool, **said: int) -> Any:
    del shapes
    token = ctx.tokens_in.get(_ordered)
    with_token = ctx.replace(
        avals_in=[jax_core.abstract_token, *ctx.avals_in],
        avals_out=[jax_core.abstract_token, *ctx.avals_out],
    )
    # The token is the first operand, and the first result.
    aliases = {index: index for index in range(1, len(leaves) + 1)} if in_place else None
    call = jax.ffi.build_ffi_lowering_function(
        foreign.TARGET, has_side_effect=True, operand_output_aliases=aliases
    )
    made = call(with_token, token, *leaves, **{name: np.int64(v) for name, v in said.items()})
    token, *results = made.results
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ordered: token})))
    return results


mlir.register_lowering(_collective, _lowered, platform="cpu")
