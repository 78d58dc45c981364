"""Writes a scenario: 16 ATP jobs in a fat tree with 10,240 hosts, 20 under each edge switch.

python experiments/scale/fat_tree.py > /tmp/fat_tree.toml && fanin sim /tmp/fat_tree.toml
"""

JOBS, RACKS, HOSTS = 16, 32, 20

print(f"""\
title = "10,240 hosts in a fat tree, 16 jobs of {(RACKS - 1) * HOSTS} workers"
interval = "100us"
payload = "sample"

[network]
topology = "fat-tree"
k = {JOBS * 2}
hosts = {HOSTS}
rate = "100Gbit"
core_rate = "400Gbit"
queue = "16MB"
ecn = "100kB"

[switch]
programmable = [0]
""")
for job in range(JOBS):
    first = job * RACKS * HOSTS
    # The server has the first host of the last rack, whose switch adds the sums of the other racks.
    server = first + (RACKS - 1) * HOSTS
    workers = ", ".join(f'"h{host}"' for host in range(first, server))
    print(f"""\
[[job]]
system = "atp"
workers = [{workers}]
tensor = "1MB"
in_flight = 1
tensors = 1
[job.atp]
server = "h{server}"
window = 256
""")
