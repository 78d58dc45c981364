"""Horovod's interface for PyTorch: `import fanin.horovod as hvd` in place of `horovod.torch`.

docs/horovod.md says what differs. A program submits tensors under names, in any order; a thread of
each process executes them in the order on which all ranks agree, on torch's groups of fanin's
backend. `engine.py` is where that begins.

`fanin.horovod.tensorflow` and `fanin.horovod.keras` are the same for TensorFlow and for Keras
(docs/tensorflow.md). They share the engine, and need no torch: names of this module are loaded when
they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanin.horovod import elastic as elastic
    from fanin.horovod.built import ccl_built as ccl_built
    from fanin.horovod.built import cuda_built as cuda_built
    from fanin.horovod.built import ddl_built as ddl_built
    from fanin.horovod.built import gloo_built as gloo_built
    from fanin.horovod.built import gloo_enabled as gloo_enabled
    from fanin.horovod.built import mpi_built as mpi_built
    from fanin.horovod.built import mpi_enabled as mpi_enabled
    from fanin.horovod.built import mpi_threads_supported as mpi_threads_supported
    from fanin.horovod.built import nccl_built as nccl_built
    from fanin.horovod.built import rocm_built as rocm_built
    from fanin.horovod.compression import Compression as Compression
    from fanin.horovod.differentiable import allgather as allgather
    from fanin.horovod.differentiable import allreduce as allreduce
    from fanin.horovod.differentiable import alltoall as alltoall
    from fanin.horovod.differentiable import broadcast as broadcast
    from fanin.horovod.differentiable import grouped_allgather as grouped_allgather
    from fanin.horovod.differentiable import grouped_allreduce as grouped_allreduce
    from fanin.horovod.differentiable import grouped_reducescatter as grouped_reducescatter
    from fanin.horovod.differentiable import reducescatter as reducescatter
    from fanin.horovod.errors import HorovodInternalError as HorovodInternalError
    from fanin.horovod.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
    from fanin.horovod.functions import broadcast_optimizer_state as broadcast_optimizer_state
    from fanin.horovod.functions import broadcast_parameters as broadcast_parameters
    from fanin.horovod.objects import allgather_object as allgather_object
    from fanin.horovod.objects import broadcast_object as broadcast_object
    from fanin.horovod.operations import allgather_async as allgather_async
    from fanin.horovod.operations import allreduce_ as allreduce_
    from fanin.horovod.operations import allreduce_async as allreduce_async
    from fanin.horovod.operations import allreduce_async_ as allreduce_async_
    from fanin.horovod.operations import alltoall_async as alltoall_async
    from fanin.horovod.operations import broadcast_ as broadcast_
    from fanin.horovod.operations import broadcast_async as broadcast_async
    from fanin.horovod.operations import broadcast_async_ as broadcast_async_
    from fanin.horovod.operations import grouped_allgather_async as grouped_allgather_async
    from fanin.horovod.operations import grouped_allreduce_ as grouped_allreduce_
    from fanin.horovod.operations import grouped_allreduce_async as grouped_allreduce_async
    from fanin.horovod.operations import grouped_allreduce_async_ as grouped_allreduce_async_
    from fanin.horovod.operations import grouped_reducescatter_async as grouped_reducescatter_async
    from fanin.horovod.operations import join as join
    from fanin.horovod.operations import reducescatter_async as reducescatter_async
    from fanin.horovod.operations import sparse_allreduce_async as sparse_allreduce_async
    from fanin.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
    from fanin.horovod.process_sets import ProcessSet as ProcessSet
    from fanin.horovod.process_sets import add_process_set as add_process_set
    from fanin.horovod.process_sets import global_process_set as global_process_set
    from fanin.horovod.process_sets import remove_process_set as remove_process_set
    from fanin.horovod.submission import Adasum as Adasum
    from fanin.horovod.submission import Average as Average
    from fanin.horovod.submission import Max as Max
    from fanin.horovod.submission import Min as Min
    from fanin.horovod.submission import Product as Product
    from fanin.horovod.submission import Sum as Sum
    from fanin.horovod.submission import barrier as barrier
    from fanin.horovod.submission import poll as poll
    from fanin.horovod.submission import synchronize as synchronize
    from fanin.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from fanin.horovod.torch_job import init as init
    from fanin.horovod.world import cross_rank as cross_rank
    from fanin.horovod.world import cross_size as cross_size
    from fanin.horovod.world import is_homogeneous as is_homogeneous
    from fanin.horovod.world import is_initialized as is_initialized
    from fanin.horovod.world import local_rank as local_rank
    from fanin.horovod.world import local_size as local_size
    from fanin.horovod.world import rank as rank
    from fanin.horovod.world import shutdown as shutdown
    from fanin.horovod.world import size as size
    from fanin.horovod.world import start_timeline as start_timeline
    from fanin.horovod.world import stop_timeline as stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_MODULES = {
    "Adasum": "submission",
    "Average": "submission",
    "Compression": "compression",
    "DistributedOptimizer": "optimizer",
    "HorovodInternalError": "errors",
    "HostsUpdatedInterrupt": "errors",
    "Max": "submission",
    "Min": "submission",
    "ProcessSet": "process_sets",
    "Product": "submission",
    "Sum": "submission",
    "SyncBatchNorm": "sync_batch_norm",
    "add_process_set": "process_sets",
    "allgather": "differentiable",
    "allgather_async": "operations",
    "allgather_object": "objects",
    "allreduce": "differentiable",
    "allreduce_": "operations",
    "allreduce_async": "operations",
    "allreduce_async_": "operations",
    "alltoall": "differentiable",
    "alltoall_async": "operations",
    "barrier": "submission",
    "broadcast": "differentiable",
    "broadcast_": "operations",
    "broadcast_async": "operations",
    "broadcast_async_": "operations",
    "broadcast_object": "objects",
    "broadcast_optimizer_state": "functions",
    "broadcast_parameters": "functions",
    "ccl_built": "built",
    "cross_rank": "world",
    "cross_size": "world",
    "cuda_built": "built",
    "ddl_built": "built",
    "global_process_set": "process_sets",
    "gloo_built": "built",
    "gloo_enabled": "built",
    "grouped_allgather": "differentiable",
    "grouped_allgather_async": "operations",
    "grouped_allreduce": "differentiable",
    "grouped_allreduce_": "operations",
    "grouped_allreduce_async": "operations",
    "grouped_allreduce_async_": "operations",
    "grouped_reducescatter": "differentiable",
    "grouped_reducescatter_async": "operations",
    "init": "torch_job",
    "is_homogeneous": "world",
    "is_initialized": "world",
    "join": "operations",
    "local_rank": "world",
    "local_size": "world",
    "mpi_built": "built",
    "mpi_enabled": "built",
    "mpi_threads_supported": "built",
    "nccl_built": "built",
    "poll": "submission",
    "rank": "world",
    "reducescatter": "differentiable",
    "reducescatter_async": "operations",
    "remove_process_set": "process_sets",
    "rocm_built": "built",
    "shutdown": "world",
    "size": "world",
    "sparse_allreduce_async": "operations",
    "start_timeline": "world",
    "stop_timeline": "world",
    "synchronize": "submission",
}
"""Where each name is."""


def __getattr__(name: str) -> object:
    if name == "elastic":
        return import_module(f"{__name__}.elastic")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It says what to install where there is no torch.
    import_module("fanin.torch")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
