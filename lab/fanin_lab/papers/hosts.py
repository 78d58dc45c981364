"""What the hosts of BytePS's paper move over RDMA, for papers that do not say it of their own."""

from __future__ import annotations

RDMA_BYTE_COST = {"90Gbit": "0.0889ns", "41Gbit": "0.195ns"}
"""By what a host moves in each direction through a link of 100 Gbit/s, a byte's cost: 90 Gbit/s
(BytePS §7.1), and 41 without what BytePS mends (its Table 2)."""
