"""What Horovod is asked about how it was built, and what is true of fanin."""

from __future__ import annotations

from fanin.horovod.world import world


def mpi_threads_supported() -> bool:
    """Whether MPI may be used beside it: there is none."""
    world()
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries the words of ranks."""
    return False


def mpi_built() -> bool:
    """Whether MPI could be used."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo is used: for what fanin's services do not serve."""
    return True


def gloo_built() -> bool:
    """Whether Gloo could be used: torch has it."""
    return True


def nccl_built() -> int:
    """Return the version of NCCL that is used: 0, as tensors of GPUs pass through the host."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL is used."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL is used."""
    return False


def cuda_built() -> bool:
    """Whether tensors of CUDA devices are taken."""
    import torch

    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether tensors of ROCm devices are taken."""
    return False
