"""The package of that name is in the standard library now."""

from unittest.mock import *  # noqa: F403

version_info = (4, 0, 0)  # the package parameterized asks for it
