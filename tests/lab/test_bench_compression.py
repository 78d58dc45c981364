"""`fanin bench compression`: what it reads, and what it writes. Nothing here is about speed."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, get_args

import compression as program
import fanin_lab.bench
import pytest
import torch
from fanin._settings import WireDtype
from fanin.torch.compression import Dithering, TopK
from fanin_lab.bench import BenchError
from fanin_lab.bench.compression.command import Row, table
from fanin_lab.bench.compression.gradients import learned, read
from fanin_lab.bench.compression.methods import defaults, method

SHAPES = [[100, 60], [40], []]
ELEMENTS = 6041  # of a tensor short enough to travel as it is there are fewer


def saved(path: Path, found: Any) -> Path:
    torch.save(found, path)
    return path


def step(seed: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=dice) for shape in SHAPES]


def test_a_file_has_one_step_or_several_as_tensors_lists_or_dicts(tmp_path: Path) -> None:
    file = tmp_path / "gradients.pt"
    steps = [step(0), step(1)]
    several = read(saved(file, steps))
    assert several.shapes == SHAPES
    assert several.steps.shape == (2, ELEMENTS)
    assert torch.equal(several.steps[1][:6000].view(100, 60), steps[1][0])
    assert torch.equal(several.of(1, 1, 3), several.steps[0])
    named = [{f"p{at}": each for at, each in enumerate(of_step)} for of_step in steps]
    assert torch.equal(read(saved(file, named)).steps, several.steps)
    assert torch.equal(read(saved(file, steps[0])).steps, several.steps[:1])
    flat = read(saved(file, several.steps[0].half()))
    assert flat.shapes == [[ELEMENTS]]
    assert flat.steps.dtype == torch.float32


WRONG: list[tuple[Any, str]] = [
    ([], "no tensor in a step; save a list of steps"),
    ([step(0), step(0)[:2]], "step 1 has tensors of other shapes"),
    ([[1.0]], "a float among the tensors"),
    (torch.zeros(3, dtype=torch.float64), r"float64.*p\.grad\.float\(\)"),
    (torch.zeros(3, dtype=torch.int32), r"int32.*float32, float16 or bfloat16"),
    (torch.tensor([1.0, torch.nan]), "NaN or infinity"),
    (torch.zeros(0), "no element"),
]


@pytest.mark.parametrize(("found", "said"), WRONG)
def test_a_file_of_something_else_is_refused_with_what_to_do(
    tmp_path: Path, found: Any, said: str
) -> None:
    with pytest.raises(BenchError, match=said):
        read(saved(tmp_path / "gradients.pt", found))


def test_a_file_that_is_none_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no tensors")
    for name in ("text.pt", "absent.pt"):
        with pytest.raises(BenchError, match=r"(?s)cannot be read as gradients.*torch\.save"):
            read(tmp_path / name)


def test_a_network_that_learns_here_has_a_gradient_for_each_rank_and_step() -> None:
    found = learned("digits", 3, 2)
    assert found.steps.shape == (6, 4810)
    assert found.shapes[0] == [64, 64]
    assert found.of(2, 1, 2).equal(found.steps[5])


def test_methods_have_the_names_that_the_help_says() -> None:
    for name in defaults():
        assert method(name).name == name
    saving = set(get_args(WireDtype)) - {"shared_exponent"}
    assert {method(name).wire_dtype for name in defaults()} == saving
    assert method("topk:40").compressor == TopK(40)
    assert method("natural:5").compressor == Dithering(5, partition="natural")
    assert [method(name).has_feedback for name in ("int8", "int4", "int4:plain")] == [1, 1, 0]
    for wrong in ("top", "topk", "topk:0", "onebit:1", "powersgd:0", "bfloat16:plain", "x"):
        with pytest.raises(ArgumentTypeError, match=r"write float32, bfloat16.*onebit, topk:0\.01"):
            method(wrong)


def test_what_powersgd_sends_are_two_thin_matrices_and_what_is_short_as_it_is() -> None:
    factors = 4 * ((100 + 60) * 2 + 40 + 1)
    assert method("powersgd:2").sent_bytes(SHAPES, 4) == 2 * 3 * factors // 4
    assert method("powersgd:30").sent_bytes(SHAPES, 4) == method("float32").sent_bytes(SHAPES, 4)
    assert method("bfloat16").sent_bytes(SHAPES, 4) == 2 * 3 * 2 * ELEMENTS // 4


def test_the_command_writes_a_table_a_plot_and_all_figures(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason='the plot needs pip install "fanin[lab]"')
    file = saved(tmp_path / "gradients.pt", [step(seed) for seed in range(6)])
    result, picture = tmp_path / "result.json", tmp_path / "plot.png"
    names = ["float32", "bfloat16", "int4", "dithering:7", "powersgd:2"]
    command = ["compression", "--workers", "2", "--steps", "3", "--gradients", str(file)]
    command += ["--methods", ",".join(names), "--json", str(result), "--plot", str(picture)]
    assert fanin_lab.bench.main(command) == 0, capfd.readouterr().err
    shown = capfd.readouterr().out
    assert "2 workers, gradients of 6,041 elements, 24.16 kB of float32" in shown
    assert "100mbit, predicted" in shown
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    written = json.loads(result.read_text())
    rows = {each["method"]: Row(**each) for each in written["methods"]}
    assert list(rows) == names
    assert rows["float32"].sent_bytes == 4 * ELEMENTS
    assert rows["float32"].error_of_sum < 1e-6
    assert 1e-4 < rows["bfloat16"].error < 0.01
    for name in ("int4", "dithering:7"):
        of_sum = rows[name].error_of_sum_without_feedback
        assert of_sum is not None
        assert rows[name].error_of_sum < of_sum < 1
    assert rows["powersgd:2"].error > 0.1  # noise has no low rank


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "1"], "one worker sends nothing"),
        (["--steps", "1"], "--steps 2, or more"),
        (["--methods", "zip"], "'zip' is no way to send gradients"),
        (["--gradients", "absent.pt"], "absent.pt cannot be read as gradients"),
    ],
)
def test_what_cannot_be_measured_is_said(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fanin_lab.bench.main(["compression", *arguments]) == 1
    assert said in capfd.readouterr().err


def test_the_table_of_documents_has_intervals_and_says_who_never_came_there() -> None:
    rows = [
        Row("float32", 6000, None, {"1gbit": 0.001}),
        Row("onebit", 200, 0.001, {"1gbit": 0.002}, measured_s={}),
    ]
    good = [program.Curve([2.0, 1.0, 0.8], [0.1, 0.5, 0.6 + 0.1 * seed]) for seed in range(3)]
    bad = [good[0], *[program.Curve([2.0, 2.0, math.nan], [0.1] * 3)] * 2]
    text = program._section("gpt", 4, 0.009, rows, {"float32": good, "onebit": bad}, [10**9])
    assert "3 seeds" in text
    assert "4 kB of gradients as float32; the loss that times are given for is 1.000" in text
    assert "| float32 | 6 kB | 0.800 ± 0.000 | 70.0 ± 24.8 % | 20 | 0.20 s |" in text
    assert "| onebit | 200 B | not finite |" in text
    assert "| never, 2 of 3 never | - |" in text
    of_float32, of_onebit = (line.split() for line in table(rows).splitlines()[1:])
    assert of_float32[-3:] == ["-", "1.00", "ms"]
    assert of_onebit[-4:] == ["1.00", "ms", "2.00", "ms"]
