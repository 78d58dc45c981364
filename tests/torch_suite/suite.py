"""PyTorch's own test suite of process groups, pointed at a backend.

The wheel of torch holds it: ``torch.testing._internal.distributed.distributed_test``. Its
decorators read ``BACKEND`` when it is imported, and few admit a name that they do not know. So it
is imported under names that they know, and told the true one afterwards: it then asks of fanin what
it asks of Gloo, and, for what it believes no backend but MPI can do on CPUs, what it asks of MPI.
Imported as "fanin" it shows what it expects of a stranger.

Not asked are, of fanin, the names of events in torch's profiler: the suite looks for them only
where it knows the backend, and fanin's events are torch's own and those of the Gloo group inside.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any

MODULE = "torch.testing._internal.distributed.distributed_test"

# Tests whose body, not only a decorator, knows what to do for no backend but Gloo, MPI and NCCL:
# they are told that it is Gloo once the process group, of the true backend, has been made.
GLOO_BODIES = (
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
)

# Ranks say where they are, this long before they are killed for taking too long, in seconds.
LAST_WORDS = 3.0

Case = type[unittest.TestCase]


def load(backend: str, import_as: Sequence[str], world_size: int, limit: float) -> dict[str, Case]:
    """The tests, each from the first import that admits it; each may take `limit` seconds.

    To be called once in a process, which is left without further threads, so that it can be forked.
    """
    os.environ.update(
        WORLD_SIZE=str(world_size),
        # Some tests run only with a file; each test sets its own before it starts.
        INIT_METHOD="file:///",
        TEMP_DIR=tempfile.gettempdir(),
        OMP_NUM_THREADS="1",
        # With fewer GPUs than ranks, but one or more, the suite would skip everything.
        CUDA_VISIBLE_DEVICES="",
    )
    # DistributedDataParallel imports it when one is made.
    importlib.import_module("torch._dynamo")
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    if backend == "fanin":
        importlib.import_module("fanin.torch.backend")
        for feature in ("ddp", "subgroup", "plugin"):
            common.DistTestCases.backend_feature[feature].add(backend)
    # The runner says what hangs: the suite is not to be faster, nor more patient.
    common.TIMEOUT_DEFAULT = 2 * limit
    common.TIMEOUT_OVERRIDE.clear()

    tests: dict[str, Case] = {}
    for name in import_as:
        case = _case(_suite(backend, name), limit)
        for test in unittest.TestLoader().getTestCaseNames(case):
            if test not in tests or (_excluded(tests[test], test) and not _excluded(case, test)):
                tests[test] = case
    return tests


def _suite(backend: str, import_as: str) -> Any:
    os.environ["BACKEND"] = import_as
    sys.modules.pop(MODULE, None)
    suite: Any = importlib.import_module(MODULE)
    os.environ["BACKEND"] = suite.BACKEND = backend
    return suite


def _excluded(case: Case, test: str) -> bool:
    """Whether a decorator said so; a test can still find out while it runs."""
    return getattr(getattr(case, test), "__unittest_skip__", False)


def _case(suite: Any, limit: float) -> Case:
    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            # Objects of its classes are pickled, so it must be the one that is found by name.
            sys.modules[MODULE] = suite
            super().setUp()
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            # Forked, where the suite itself spawns: a rank then costs no import of torch.
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **keywords: Any) -> None:
            faulthandler.dump_traceback_later(max(limit - LAST_WORDS, limit / 2))
            super()._run(*args, **keywords)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            if test_name in GLOO_BODIES:
                suite.BACKEND = "gloo"
            super().run_test(test_name, parent_pipe)

    return TorchSuite
