"""torchft's own tests of process groups on the CPU: torchft_suite.py gloo | fanin.

They are in its package. With "fanin" the class of Gloo's groups is `ProcessGroupFanin` there, and
where a test says how Gloo tells that a rank is gone or late, fanin's words will do.
"""

from __future__ import annotations

import sys
import unittest
from typing import Any

import torchft.process_group_test as suite
from fanin.torch import ProcessGroupFanin

TESTS = (
    "NormalGlooMultiPgTest",
    "ProcessGroupTest.test_gloo_apis_0_cpu",
    "ProcessGroupTest.test_gloo_timeout",
    "ProcessGroupTest.test_functional_collectives",
    "ProcessGroupTest.test_process_group_wrapper",
    "ProcessGroupTest.test_error_swallowing_process_group_wrapper",
    "ProcessGroupTest.test_managed_process_group",
)
GONE = "left the job|is lost|did not join|was destroyed|is closed"


def widened(original: Any) -> Any:
    def assert_raises(self: Any, kind: type[Exception], pattern: str, *args: Any) -> Any:
        return original(self, kind, f"{pattern}|{GONE}", *args)

    return assert_raises


def main() -> None:
    if sys.argv[1] == "fanin":
        suite.ProcessGroupGloo = ProcessGroupFanin
        for case in (suite.MultiPgBaseTest, suite.ProcessGroupTest):
            case.assertRaisesRegex = widened(case.assertRaisesRegex)
    tests = unittest.defaultTestLoader.loadTestsFromNames(TESTS, suite)
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    assert result.testsRun >= 20, "torchft has them under other names"
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
