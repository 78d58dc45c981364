"""§4.1's equations, for n machines that train and k more, 1 <= k <= n or k = 0, on equal links."""

from __future__ import annotations


def divisor(n: int, k: int) -> int:
    """Return what Eqs. 1, 2 and 6 divide by."""
    return n * n + k * n - 2 * k


def cpu_share(n: int, k: int) -> float:
    """Return what a machine that only sums is given of a tensor (Eq. 1)."""
    return 2 * (n - 1) / divisor(n, k)


def gpu_share(n: int, k: int) -> float:
    """Return what a machine that trains is given (Eq. 2)."""
    return (n - k) / divisor(n, k)


def optimal(n: int, k: int) -> float:
    """Return the time in units of M / B (Eq. 6)."""
    return 2 * n * (n - 1) / divisor(n, k)


def ring(n: int) -> float:
    """Return a ring's time in units of M / B (§2.2)."""
    return 2 * (n - 1) / n


def parameter_server(n: int, k: int) -> float:
    """Return the time of k servers on machines of their own, in units of M / B (Table 1)."""
    return max(1.0, n / k)


def by_ring(n: int, k: int) -> float:
    """Return gamma_a (Eq. 7): how many times faster than a ring."""
    return divisor(n, k) / n**2


def by_parameter_server(n: int, k: int) -> float:
    """Return gamma_p (Eq. 7): how many times faster than servers on machines of their own."""
    return divisor(n, k) / (2 * k * (n - 1))
