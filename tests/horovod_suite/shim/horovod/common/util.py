from packaging import version


def is_version_greater_equal_than(ours: str, other: str) -> bool:
    return version.parse(ours) >= version.parse(other)
