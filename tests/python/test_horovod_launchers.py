"""Ranks as each launcher says them, what is told where it says too little, and forked children."""

from __future__ import annotations

import atexit
import gc
import os
import warnings

import fanin.horovod as hvd
import pytest
import torch
from conftest import Launch, free_address
from fanin._launchers import launched
from fanin.horovod.errors import LaunchIncomplete
from fanin.horovod.rendezvous import Rendezvous
from ranks import Me
from torch import distributed
from torch._C._distributed_c10d import HashStore

# Each launcher's variables for a rank of a job.
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{size}"}
PMI = {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}"}
SRUN = {
    "SLURM_PROCID": "{rank}",
    "SLURM_STEP_NUM_TASKS": "{size}",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "7",  # of the allocation, of which a step may have a part
}
LAUNCHERS = {
    "by hand": {"RANK": "{rank}", "WORLD_SIZE": "{size}"},
    "mpirun": OPEN_MPI | {"PMIX_RANK": "{rank}"},
    # Its daemons are started by srun, one on each machine.
    "mpirun in Slurm": OPEN_MPI | dict.fromkeys(SRUN, "0"),
    "mpiexec": PMI,
    "srun": SRUN,
    "srun --mpi=pmix": SRUN | {"PMIX_RANK": "{rank}"},
    "jsrun": {"JSM_NAMESPACE_RANK": "{rank}", "JSM_NAMESPACE_SIZE": "{size}"} | OPEN_MPI,
    "horovodrun": {"HOROVOD_RANK": "{rank}", "HOROVOD_SIZE": "{size}"},
    "PMIx and a size": {"PMIX_RANK": "{rank}", "WORLD_SIZE": "{size}"},
}
CURES = {
    "by hand": "set MASTER_ADDR=HOST and MASTER_PORT=29500 on all ranks",
    "mpirun": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
    "mpirun in Slurm": "mpirun -x MASTER_ADDR=HOST",
    "mpiexec": "mpiexec -genv MASTER_ADDR HOST",
    "srun": "MASTER_ADDR=$(scontrol show hostnames",
    "srun --mpi=pmix": "MASTER_ADDR=$(scontrol show hostnames",
    "jsrun": "jsrun -E MASTER_ADDR=HOST",
    "horovodrun": "fanin run -np",
    "PMIx and a size": "MASTER_PORT=29500 on all ranks",
}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ALONE = {
    "nobody": {},
    "the shell of an allocation": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},
    "a batch script": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    "an interactive step": SRUN
    | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "0"},
}


def of(launcher: str, rank: int, size: int) -> dict[str, str]:
    return {name: value.format(rank=rank, size=size) for name, value in LAUNCHERS[launcher].items()}


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without any launcher's variables."""
    for variables in (*LAUNCHERS.values(), MEETING):
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fanin.horovod.torch_job._launched", None)  # of a test before
    return monkeypatch


def started(me: Me, launcher: str, port: str) -> tuple[int, int, int, int, float]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 has the store, as nobody else does
    os.environ["MASTER_PORT"] = port
    os.environ.update(of(launcher, me.rank, me.world_size))
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    where = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total
    hvd.shutdown()
    return where


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_are_the_launcher_s(launch: Launch, launcher: str) -> None:
    port = free_address().rpartition(":")[2]
    results = launch(started, 2, launcher, port).results()
    assert results == [(rank, 2, rank, 2, 2.0) for rank in range(2)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_several_ranks_that_cannot_meet_are_no_job_of_one(
    nobody: pytest.MonkeyPatch, launcher: str
) -> None:
    for name, value in of(launcher, 3, 4).items():
        nobody.setenv(name, value)
    with pytest.raises(ValueError, match="4 ranks, and nothing says where they meet") as caught:
        hvd.init()
    assert isinstance(caught.value, LaunchIncomplete)
    assert "(MASTER_ADDR and MASTER_PORT not set)" in str(caught.value)
    assert CURES[launcher] in str(caught.value)
    nobody.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(LaunchIncomplete, match=r"\(MASTER_PORT not set\)"):
        hvd.init()
    assert not hvd.is_initialized()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_rank_needs_no_meeting(nobody: pytest.MonkeyPatch, launcher: str) -> None:
    for name, value in of(launcher, 0, 1).items():
        nobody.setenv(name, value)
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (0, 1)
    hvd.shutdown()


@pytest.mark.parametrize("where", ALONE)
def test_a_process_that_nobody_launched_is_a_job_of_one(where: str) -> None:
    environment = {name: value.format(rank=0, size=4) for name, value in ALONE[where].items()}
    assert launched(environment) is None
    assert launched(environment | MEETING) is None


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "0"}, "RANK is set, and WORLD_SIZE is not: set WORLD_SIZE, MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, and RANK is not"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is set, and WORLD_SIZE is not"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK is 4 and PMI_SIZE is 4"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', and no number"),
    ],
)
def test_what_a_launcher_leaves_out_is_named(environment: dict[str, str], told: str) -> None:
    with pytest.raises(LaunchIncomplete, match=told):
        launched(environment | MEETING)


def test_a_size_that_was_left_over_is_not_believed_before_the_launcher_s() -> None:
    said = launched(of("mpirun", 0, 4) | MEETING | {"WORLD_SIZE": "1"})
    assert said is not None
    assert (said.rank, said.size) == (0, 4)


def test_variables_that_are_ignored_are_named_once(nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv("HOROVOD_AUTOTUNE", "1")
    nobody.setenv("HOROVOD_CACHE_CAPACITY", "5")
    nobody.setenv("HOROVOD_CYCLE_TIME", "5")
    nobody.setenv("HOROVOD_TIMELINE", "dynamic")
    nobody.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    with pytest.warns(UserWarning, match="ignores HOROVOD_AUTOTUNE, HOROVOD_CACHE_CAP") as told:
        hvd.init()
    assert len(told) == 1
    hvd.shutdown()
    nobody.delenv("HOROVOD_AUTOTUNE")
    nobody.delenv("HOROVOD_CACHE_CAPACITY")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.init()
    hvd.shutdown()


def forked(me: Me) -> tuple[int, float]:
    hvd.init()
    hvd.barrier()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # A data loader's worker may ask these.
            assert (hvd.rank(), hvd.size()) == (me.rank, me.world_size)
            for call in (hvd.barrier, lambda: hvd.allreduce(torch.ones(1)), hvd.join):
                with pytest.raises(ValueError, match="forked from rank"):
                    call()
            hvd.shutdown()
            atexit._run_exitfuncs()  # as `sys.exit` does
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return status, total


def test_a_forked_child_that_exits_ends_nobody_s_job(launch: Launch) -> None:
    assert launch(forked, 2).results() == [(0, 2.0)] * 2


def test_groups_that_the_program_has_left_are_not_kept(nobody: pytest.MonkeyPatch) -> None:
    del nobody
    gc.collect()
    before = sum(type(each) is Rendezvous for each in gc.get_objects())
    for _ in range(4):
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        hvd.init()
        hvd.shutdown()
        distributed.destroy_process_group()
    gc.collect()
    after = sum(type(each) is Rendezvous for each in gc.get_objects())
    assert after - before <= 1
