"""Horovod's interface for Keras 3 on any backend: `import fanin.horovod.keras as hvd`.

docs/tensorflow.md says what differs. Tensors go to the engine as NumPy arrays. On TensorFlow that
is done by operations of the graph.
"""

from __future__ import annotations

from fanin.horovod.array_job import (
    init,
)
from fanin.horovod.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from fanin.horovod.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
)
from fanin.horovod.keras import (
    callbacks,
    elastic,
)
from fanin.horovod.keras.collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    load_model,
    reducescatter,
)
from fanin.horovod.keras.compression import (
    Compression,
)
from fanin.horovod.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from fanin.horovod.keras.tensors import (
    NotInJit,
)
from fanin.horovod.objects import (
    allgather_object,
    broadcast_object,
)
from fanin.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from fanin.horovod.submission import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    barrier,
)
from fanin.horovod.world import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "NotInJit",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
