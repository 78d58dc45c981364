"""GOAT's ways by what sums: they count as the planner does, and come to switches soonest."""

from __future__ import annotations

from fanin_lab.papers.goat import drawn, ways


def test_ways_by_what_sums_are_counted_as_the_planner_counts() -> None:
    # Equally short ways are alike if only switches next to hosts sum.
    for topology, workers in (("leaf-spine", 35), ("fat-tree", 40)):
        setting = drawn.Setting(topology, workers, around=0.5, ways="tree", sums="near")
        job = drawn.drawn(setting, 1)
        order = drawn.arrivals(job.rates_bps, [0.0] * workers, 221, 1_000_000)
        units = dict.fromkeys(job.switches, 64)
        for priorities in (None, list(range(221)), list(range(221))[::-1]):
            counted = job.workload.shared_memory(order, 1_000_000, priorities, "tree", 1)
            found = ways.shared_memory(
                ways.links(topology), job.server, job.workers, units, order, priorities
            )
            assert found.server * 1_000_000 == counted["server_bytes"]
            assert found.hops * 1_000_000 == counted["hop_bytes"]


def test_ways_come_to_what_sums_soonest() -> None:
    joined = ways.links("leaf-spine")
    found = ways.onward(joined, "h0", ["h49"], ["spine7", "leaf0"])
    assert found["h49"] == ways.Onward("spine7", 2)
    assert found["spine7"] == ways.Onward("leaf0", 1)
    assert found["leaf0"] == ways.Onward("h0", 1)


def test_sums_on_such_ways_are_those_counted_by_hand() -> None:
    joined = ways.links("leaf-spine")
    workers = ["h0", "h1", "h5"]

    def counted(order: list[tuple[int, int]], units: int, important: list[int] | None) -> list[int]:
        found = ways.shared_memory(joined, "h49", workers, {"spine3": units}, order, important)
        return [found.server, found.hops]

    # Two links to spine3 for each of three gradients, and two from there for their sum.
    one = [(0, 0), (1, 0), (2, 0)]
    assert counted(one, 1, None) == [1, 8]
    # The second fragment finds the unit taken: its three gradients pass, two links each.
    both = [(0, 0), (0, 1), (1, 1), (2, 1), (1, 0), (2, 0)]
    assert counted(both, 1, None) == [4, 20]
    # For ESA the second one is more important, and the first one's gradients pass.
    assert counted(both, 1, [0, 1]) == [4, 20]
    assert counted(both, 2, None) == [2, 16]
