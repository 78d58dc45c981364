// @vitest-environment jsdom
import { render } from "lit-html";
import { expect, test } from "vitest";
import type { Rank } from "../src/contract";
import { byMachine, latestFirst, matching, ranksView } from "../src/ranks";
import { job } from "./answers";

const { ranks } = job();
const numbers = (list: Rank[]): number[] => list.map((r) => r.rank);

test("a filter is a rank, or a part of a name or an address", () => {
  expect(numbers(matching(ranks, ""))).toEqual([0, 1, 2, 3]);
  expect(numbers(matching(ranks, " 3 "))).toContain(3);
  expect(numbers(matching(ranks, "NODE1"))).toEqual([0, 1]);
  expect(numbers(matching(ranks, "10.0.1."))).toEqual([2, 3]);
  expect(numbers(matching(ranks, "nothing"))).toEqual([]);
});

test("machines are in the order of their numbers", () => {
  const named = (name: string): Rank => ({ ...ranks[0], machine: name, name });
  expect(byMachine([named("n10"), named("n9"), named("n10")]).map((m) => [m.name, m.ranks.length])).toEqual([
    ["n9", 1],
    ["n10", 2],
  ]);
});

test("of thousands of ranks the machines and the 20 latest are shown", () => {
  const many = Array.from({ length: 4096 }, (_, i): Rank => {
    const late = { ...ranks[0].late!, median: i === 4000 ? 0.1 : 0 };
    return { ...ranks[0], rank: i, ranks: [i], machine: `m${i >> 3}`, name: `m${i >> 3}`, late };
  });
  expect(latestFirst(many)[0].rank).toBe(4000);
  const into = document.createElement("div");
  render(ranksView({ ...job(), ranks: many }, many), into);
  const [machines, latest] = into.querySelectorAll("table");
  expect(machines.caption!.textContent).toMatch(/512 machines, the 50 latest/);
  expect(latest.tBodies[0].rows).toHaveLength(20);
  expect(latest.tBodies[0].rows[0].cells[0].textContent).toBe("m500");
});
