"""`make bench-switchml`: tiny experiments that run, and the document. Nothing is about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import switchml_sockets
from laboratory import needs_lab
from ranks import DEADLINE

PROGRAM = Path(__file__).parents[2] / "benches" / "switchml_sockets.py"


@needs_lab
def test_the_experiments_run_and_what_is_hand_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "reproduction-sockets.md"
    begin, end = switchml_sockets.BEGIN, switchml_sockets.END
    path.write_text(f"# Mine\n\n{begin}\nold\n{end}\n\n## Also mine\n")
    command = [sys.executable, str(PROGRAM), "--quick", "--into", str(tmp_path)]
    done = subprocess.run(
        command, timeout=4 * DEADLINE, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert text.startswith(f"# Mine\n\n{begin}\n")
    assert text.endswith(f"{end}\n\n## Also mine\n")
    assert "\nold\n" not in text
    runs = json.loads((tmp_path / "switchml-sockets.json").read_text())["runs"]
    assert runs.keys() == switchml_sockets.EXPERIMENTS.keys()
    # By one switch, whatever the planner would choose.
    for of_experiment in runs.values():
        assert {run["plan"]["asked"] for of_row in of_experiment.values() for run in of_row} == {
            "switch"
        }
    assert [of_row[0]["links"]["loss"] for of_row in runs["loss"].values()] == [None, 1e-4]
    assert [of_row[0]["wire_dtype"] for of_row in runs["types"].values()] == [
        "shared_exponent",
        "native",
    ]


def test_a_figure_is_compared_with_the_same_rounds() -> None:
    def run(seconds: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"backends": {"fanin": {"median_s": seconds}}}

    shown = switchml_sockets._by(
        [run(1.0), run(2.0), run(4.0)], [run(2.0), run(2.0), run(8.0)], "fanin"
    )
    assert shown == "2.00 (1.00 to 2.00); 2000.0 ms"
