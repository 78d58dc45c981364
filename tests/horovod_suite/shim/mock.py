"""The package of that name is in the standard library now."""

from unittest.mock import *  # noqa: F403
