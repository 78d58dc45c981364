// @vitest-environment jsdom
import { expect, test } from "vitest";
import type { Rank, State } from "../src/contract";
import { level } from "../src/map";
import { graph, type Graph, linkText, MOST_MACHINES } from "../src/map-model";
import { Store } from "../src/store";
import { recorded } from "./answers";

const drawn = (state: State): Graph => {
  const store = new Store();
  store.apply(state);
  return graph(state, store);
};
const ends = (g: Graph): string[] => g.links.map((l) => `${l.from.title} > ${l.to.title}`).sort();

test("machines send to relays, relays to their upstream, and a rank's own service is at home", () => {
  const g = drawn(recorded());
  expect(g.counts).toEqual({ machine: 4, relay: 1, service: 2 });
  expect(ends(g)).toEqual([
    "10.0.1.9:4800 > 10.0.0.9:4800",
    "node1 > 10.0.0.1:39787",
    "node1 > 10.0.1.9:4800",
    "node2 > 10.0.0.1:39787",
    "node2 > 10.0.1.9:4800",
    "node3 > 10.0.0.1:39787",
    "node3 > 10.0.1.9:4800",
  ]);
  const link = (text: string) => g.links.find((l) => `${l.from.title} > ${l.to.title}` === text)!;
  expect(link("node1 > 10.0.0.1:39787").local).toBe(true);
  expect(link("node2 > 10.0.0.1:39787")).toMatchObject({ local: false, certain: true });
  expect(link("node2 > 10.0.1.9:4800").certain).toBe(false);
  expect(link("10.0.1.9:4800 > 10.0.0.9:4800").carried.map((c) => [c.job, c.share])).toEqual([["gpt#5f0c9a3e", 0.75]]);
});

test("a machine sends to the relay that tells of it, and no other one", () => {
  const state = recorded();
  const relay = state.services.find((s) => s.upstream !== null)!;
  state.services.push({ ...relay, address: "10.0.2.9:4800" });
  const job = state.jobs.find((j) => j.name === "gpt#5f0c9a3e")!;
  expect(ends(drawn(state)).filter((l) => l.startsWith("node1 > 10.0.2.9"))).toHaveLength(1);
  for (const rank of job.ranks) rank.via = rank.name === "node1" ? "10.0.2.9:4800" : relay.address;
  const g = drawn(state);
  const toRelays = ends(g).filter((l) => / > 10\.0\.[12]\.9/.test(l));
  expect(toRelays).toEqual(["node1 > 10.0.2.9:4800", "node2 > 10.0.1.9:4800", "node3 > 10.0.1.9:4800"]);
  expect(g.links.every((l) => l.certain)).toBe(true);
});

test("a link has an equal part of what its service measures", () => {
  const state = recorded();
  const own = state.services[1];
  const link = drawn(state).links.find((l) => l.from.title === "node2" && l.to.title === own.address)!;
  expect(link.up).toBe(own.received! / 2);
  expect(link.down).toBe(own.sent! / 2);
  expect(link.load).toBe(Math.max(own.received!, own.sent!) / own.rate!);
  expect(linkText(link)).toMatch(/^node2 to 10\.0\.0\.1:39787: about 8\d\d Mbit\/s there/);
});

test("loads have names", () => {
  expect([null, 0.2, 0.6, 0.9].map(level)).toEqual(["unknown", "light", "busy", "full"]);
});

test("aborted jobs and ranks that left are not on the map", () => {
  const state = recorded();
  state.jobs = [state.jobs[2]];
  expect(drawn(state).counts.machine).toBe(0);
});

test("many machines become groups, none of them lost", () => {
  const state = recorded();
  const [rank] = state.jobs[0].ranks;
  state.jobs[0].ranks = Array.from({ length: 4096 }, (_, i): Rank => {
    const machine = `node${i >> 3}`;
    return { ...rank, rank: i, ranks: [i], machine, name: machine };
  });
  state.jobs = [state.jobs[0]];
  const g = drawn(state);
  expect(g.counts.machine).toBe(512);
  expect(g.columns.machine.length).toBeLessThanOrEqual(MOST_MACHINES);
  expect(g.columns.machine.flatMap((n) => n.machines)).toHaveLength(512);
  expect(g.columns.machine[0].title).toBe("node0 … node31");
});

test("relays that name each other are drawn without end", () => {
  const state = recorded();
  state.services[0].upstream = state.services[2].address;
  expect(drawn(state).links.length).toBeGreaterThan(0);
});
