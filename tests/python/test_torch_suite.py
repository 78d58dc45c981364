"""A part of PyTorch's own process group tests; `make test-torch` runs them all, beside Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare import compare

RUN = Path(__file__).parents[1] / "torch_suite" / "run.py"

# Tests of each kind, one or two, that a machine without GPUs can run.
TESTS = [
    # all-reduce: ops, dtypes, groups, async, coalesced, sparse
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_max",
    "test_all_reduce_full_group_product",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_coalesced_full_group_min",
    "test_sparse_all_reduce_sum",
    "test_get_future",
    # the other collectives
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_broadcast",
    "test_gather_full_group",
    "test_reduce_sum_twice",
    "test_scatter_object_list",
    # point to point
    "test_batch_isend_irecv_gloo_tags",
    "test_irecv",
    "test_send_recv_any_source",
    # groups and barriers
    "test_barrier_timeout_global",
    "test_destroy_group",
    "test_get_backend",
    "test_monitored_barrier_gloo_subgroup",
    # DistributedDataParallel
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_grads_same_across_ranks_with_no_sync",
    "test_static_graph_api_cpu",
]


def table(**outcomes: str) -> dict[str, dict[str, Any]]:
    return {name: {"outcome": what, "reason": "so"} for name, what in outcomes.items()}


def test_the_comparison_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    gloo = table(a="passed", b="passed", c="skipped", d="failed")
    equal = table(a="passed", b="passed", c="skipped", d="failed")
    assert compare(equal, gloo, {}) == 0
    printed = capsys.readouterr().out
    assert "skipped under fanin (1):\n  so (1)\n    c\n" in printed  # by name
    assert "failed under both (1):\n  d: failed" in printed
    for outcome in ("failed", "skipped"):
        behind = equal | table(b=outcome)
        assert compare(behind, gloo, {}) == 1
        assert compare(behind, gloo, {"b": "a reason"}) == 0
        assert f"b: {outcome}, because a reason" in capsys.readouterr().out
    # Exceptions that are none: one passes, one fails under Gloo too, one is skipped by both.
    for name in ("a", "c", "d"):
        assert compare(equal, gloo, {name: "a reason"}) == 1
    assert compare(equal, gloo, {"elsewhere": "only with more ranks"}) == 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of each of `TESTS`. The suite goes by the environment: hence the process."""
    file = tmp_path_factory.mktemp("torch_suite") / "fanin.json"
    command = [sys.executable, str(RUN), "--backend", "fanin", "--world-size", "2"]
    command += ["--timeout", "60", "--jobs", "2", "--json", str(file)]
    for test in TESTS:
        command += ["--only", test]
    subprocess.run(command, check=True, timeout=600)
    tests: dict[str, dict[str, Any]] = json.loads(file.read_text())["tests"]
    return tests


@pytest.mark.parametrize("test", TESTS)
def test_the_backend_passes_pytorchs_own(test: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[test]
    assert outcome["outcome"] == "passed", f"{outcome['reason']}\n{outcome['output']}"
