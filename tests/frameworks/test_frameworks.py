"""Programs of frameworks, unchanged: the same on Gloo and on fanin, whose switch did the sums.

Run by `make test-frameworks`; the programs lie beside this file.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from programs import Program

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
# The frameworks alone take a minute to import on a busy machine.
DEADLINE = 600
SAID = 'fanin: the program asks for "gloo"'
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
TORCHRUN_OF_4 = (*TORCHRUN[:-1], "4")
# Gloo through the Accelerate launcher's torchrun; without a GPU, its own flag for "several".
ACCELERATE = (
    "-m",
    "accelerate.commands.accelerate_cli",
    "launch",
    *("--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)
STRATEGIES = [
    "ddp",
    "ddp_find_unused_parameters_true",
    "ddp_spawn",
    "ddp_fork",
    "ddp_notebook",
    "model_parallel",
]
WAYS_IN_DETAIL = [
    "ddp",
    "allreduce_hook",
    "machine_hook",
    "compression_hook",
    "DistributedOptimizer",
    "AsynchronousOptimizer",
]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FANIN_")]:
        monkeypatch.delenv(name)


def summed(switch: str) -> int:
    """How many sums the switch has completed for all its jobs."""
    with urllib.request.urlopen(f"http://{switch}/metrics") as answer:
        found = re.search(r"^fanin_results_total (\d+)$", answer.read().decode(), re.M)
    assert found
    return int(found[1])


def run(folder: Path, *command: str, **variables: str) -> tuple[int, str]:
    """Run a program to its end; return its exit status, and all that was said."""
    folder.mkdir()
    ours = {
        "RESULTS": str(folder),
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # DeepSpeed compiles into it, and a run that was killed leaves a lock behind for good.
        "TORCH_EXTENSIONS_DIR": str(folder.parent.parent / "extensions"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(DEADLINE),
    }
    arguments = [str(HERE / each) if each.endswith(".py") else each for each in command]
    program = Program([sys.executable, *arguments], ours | variables, str(folder))
    try:
        return program.wait(DEADLINE), program.text()
    finally:
        program.end()


def play(folder: Path, *command: str, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """Run a program that succeeds; return what each rank left, and all that was said."""
    status, said = run(folder, *command, **variables)
    assert status == 0, f"{command}:\n{said[-12000:]}"
    left = sorted(folder.glob("[0-9].json"))
    assert len(left) >= 2
    return [json.loads(each.read_text()) for each in left], said


def same_on_both(folder: Path, switch: str, *command: str) -> int:
    """Run an unchanged program on Gloo and on fanin, and compare; return the switch's sums."""
    before = summed(switch)
    on_gloo, _ = play(folder / "gloo", *command)
    assert summed(switch) == before
    on_fanin, said = play(folder / "fanin", *command, FANIN_AS="gloo", FANIN_SWITCH=switch)
    assert SAID in said
    assert summed(switch) > before
    assert_same(on_fanin, on_gloo)
    return summed(switch) - before


def named(folder: Path, switch: str, gloo: list[str], fanin: list[str]) -> None:
    """Run a program that takes the backend's name from its user, on Gloo and on fanin."""
    on_gloo, _ = play(folder / "gloo", *gloo)
    before = summed(switch)
    on_fanin, said = play(folder / "fanin", *fanin, FANIN_SWITCH=switch)
    assert SAID not in said
    assert summed(switch) > before
    assert {rank.pop("backend") for rank in on_fanin} == {"fanin"}
    for rank in on_gloo:
        del rank["backend"]
    assert_same(on_fanin, on_gloo)


def assert_same(on_fanin: list[dict[str, Any]], on_gloo: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(on_fanin, on_gloo, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name in ("backend", "gathered"):
                assert ours[name] == value
            elif name != "node":
                # A sum's error is 2^-22 of its largest element or less; these are some tens of
                # steps of parameters about one.
                assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_hugging_face_trainer(tmp_path: Path, switch: str) -> None:
    same_on_both(tmp_path, switch, *TORCHRUN, "hugging_face.py")


def test_hugging_face_trainer_refuses_the_name(tmp_path: Path, switch: str) -> None:
    command = [*TORCHRUN, "hugging_face.py", "fanin"]
    status, said = run(tmp_path / "fanin", *command, FANIN_SWITCH=switch)
    assert status != 0
    assert "backend fanin is not available" in said


def test_hugging_face_trainer_takes_a_group_that_was_made_before(
    tmp_path: Path, switch: str
) -> None:
    gloo = [*TORCHRUN, "hugging_face.py"]
    named(tmp_path, switch, gloo, [*gloo, "before"])


def test_accelerate_launch(tmp_path: Path, switch: str) -> None:
    same_on_both(tmp_path, switch, *ACCELERATE, "accelerated.py", "launched")


def test_accelerate_launch_on_a_cpu_starts_one_process(tmp_path: Path) -> None:
    command = [*("--cpu" if each == "--multi_gpu" else each for each in ACCELERATE)]
    status, said = run(tmp_path / "one", *command, "accelerated.py", "launched")
    assert status != 0
    assert "process group has not been initialized" in said


def test_accelerate_notebook_launcher(tmp_path: Path, switch: str) -> None:
    same_on_both(tmp_path, switch, "accelerated.py", "notebook")


def test_accelerate_takes_a_group_that_was_made_before(tmp_path: Path, switch: str) -> None:
    gloo = [*TORCHRUN, "accelerated.py", "launched"]
    named(tmp_path, switch, gloo, [*TORCHRUN, "accelerated.py", "before"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightning(tmp_path: Path, switch: str, strategy: str) -> None:
    same_on_both(tmp_path, switch, "lit.py", strategy)


@pytest.mark.parametrize("strategy", ["ddp", "model_parallel"])
def test_lightning_by_name(tmp_path: Path, switch: str, strategy: str) -> None:
    named(tmp_path, switch, ["lit.py", strategy], ["lit.py", strategy, "fanin"])


@pytest.mark.parametrize(
    ("strategy", "why"), [("fsdp", "requires a GPU"), ("deepspeed", "only supported on CUDA GPUs")]
)
def test_lightning_asks_for_a_gpu(tmp_path: Path, switch: str, strategy: str, why: str) -> None:
    command = ["lit.py", strategy]
    status, said = run(tmp_path / "fanin", *command, FANIN_AS="gloo", FANIN_SWITCH=switch)
    assert status != 0
    assert why in said


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_deepspeed(tmp_path: Path, switch: str, stage: str) -> None:
    sums = same_on_both(tmp_path, switch, *TORCHRUN, "deep_speed.py", stage)
    # Each of the four steps sums its gradients, and one small tensor at least.
    assert sums >= 8


def test_deepspeed_by_name(tmp_path: Path, switch: str) -> None:
    gloo = [*TORCHRUN, "deep_speed.py", "1"]
    named(tmp_path, switch, gloo, [*gloo, "fanin"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_distributed_checkpoint(tmp_path: Path, switch: str, kind: str) -> None:
    sums = same_on_both(tmp_path, switch, *TORCHRUN, "checkpointed.py", kind)
    if kind == "fsdp":
        # The program sums 10 losses itself, and FSDP gathers and scatters besides.
        assert sums >= 10 + 10


def test_distributed_checkpoint_by_name(tmp_path: Path, switch: str) -> None:
    gloo = [*TORCHRUN, "checkpointed.py", "fsdp"]
    named(tmp_path, switch, gloo, [*gloo, "fanin"])


@pytest.mark.parametrize("edges", ["0", "1"])
def test_pipelining(
    tmp_path: Path, switch: str, monkeypatch: pytest.MonkeyPatch, edges: str
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P", edges)
    same_on_both(tmp_path, switch, *TORCHRUN_OF_4, "pipelined.py")
    ranks = [json.loads((tmp_path / "fanin" / f"{rank}.json").read_text()) for rank in range(4)]
    assert [rank["edges"] for rank in ranks] == 4 * [2 * int(edges)]


def test_pipelining_by_name_with_a_group_for_each_edge(
    tmp_path: Path, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P", "1")
    gloo = [*TORCHRUN_OF_4, "pipelined.py"]
    named(tmp_path, switch, gloo, [*gloo, "fanin"])


@pytest.mark.parametrize("way", WAYS_IN_DETAIL)
def test_torchs_own_debugging_in_detail(tmp_path: Path, switch: str, way: str) -> None:
    program = [*TORCHRUN, "detailed.py"]
    named(tmp_path, switch, [*program, "ddp", "gloo"], [*program, way, "fanin", "detail"])


def test_torchs_own_debugging_in_detail_of_an_unchanged_program(
    tmp_path: Path, switch: str
) -> None:
    program = [*TORCHRUN, "detailed.py", "ddp", "gloo"]
    on_gloo, _ = play(tmp_path / "gloo", *program)
    before = summed(switch)
    both = {"FANIN_AS": "gloo", "FANIN_SWITCH": switch}
    on_fanin, said = play(tmp_path / "fanin", *program, "detail", **both)
    assert SAID in said
    assert summed(switch) > before
    assert_same(on_fanin, on_gloo)


def test_ddp_on_gloo_crashes_under_torchs_debugging_in_detail(tmp_path: Path) -> None:
    status, said = run(tmp_path / "gloo", *TORCHRUN, "detailed.py", "ddp", "gloo", "detail")
    assert status != 0
    assert "SIGSEGV" in said, "torch has mended it: let both sides run under it"


def test_the_fine_tuning_of_the_examples(tmp_path: Path, switch: str) -> None:
    example = [str(EXAMPLES / "finetune.py"), "--pretrain-steps", "10", "--steps", "10"]
    before = summed(switch)
    said = [
        run(tmp_path / backend, *TORCHRUN, *example, "--backend", backend, FANIN_SWITCH=switch)
        for backend in ("gloo", "fanin")
    ]
    assert [status for status, _ in said] == [0, 0], said
    assert summed(switch) > before + 20
    gloo, fanin = (re.search(r"accuracy (\S+) and loss (\S+) on", text) for _, text in said)
    assert gloo
    assert fanin
    assert float(fanin[2]) == pytest.approx(float(gloo[2]), abs=1e-3)
    # There are four packages, and hardly any training.
    assert min(float(gloo[1]), float(fanin[1])) > 0.3


def test_the_fine_tuning_refuses_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    example = [str(EXAMPLES / "finetune.py"), "--checkpoint", str(tmp_path)]
    status, said = run(tmp_path / "none", *example)
    assert status == 2
    assert "has no config.json; is it a checkpoint?" in said


def test_ray_train_on_two_nodes(tmp_path: Path, switch: str) -> None:
    same_on_both(tmp_path, switch, "ray_train.py", "gloo")
    ranks = [json.loads((tmp_path / "fanin" / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["node"] != ranks[1]["node"]


def test_ray_train_by_name(tmp_path: Path, switch: str) -> None:
    named(tmp_path, switch, ["ray_train.py", "gloo"], ["ray_train.py", "fanin"])


def test_ray_without_its_runtime_env_sums_in_its_workers(tmp_path: Path, switch: str) -> None:
    before = summed(switch)
    command = ["ray_train.py", "fanin", "forgotten"]
    status, said = run(tmp_path / "fanin", *command, FANIN_SWITCH=switch)
    assert status == 0, said
    assert summed(switch) == before


def test_torchft(tmp_path: Path, switch: str) -> None:
    named(tmp_path, switch, ["fault_tolerant.py", "gloo"], ["fault_tolerant.py", "fanin"])


@pytest.mark.parametrize("backend", ["gloo", "fanin"])
def test_torchfts_own_tests_of_groups(tmp_path: Path, switch: str, backend: str) -> None:
    status, said = run(tmp_path, "torchft_suite.py", backend, FANIN_SWITCH=switch)
    assert status == 0, said


def test_torchft_makes_gloo_groups_by_their_class(tmp_path: Path, switch: str) -> None:
    before = summed(switch)
    command = ["fault_tolerant.py", "gloo"]
    _, said = play(tmp_path / "gloo", *command, FANIN_AS="gloo", FANIN_SWITCH=switch)
    assert SAID not in said
    assert summed(switch) == before
