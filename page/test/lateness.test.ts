import { expect, test } from "vitest";
import { lateness } from "../src/lateness";
import { faster, split } from "../src/time";
import { job, sum } from "./answers";

test("lateness counts from the earliest begin", () => {
  const sums = [
    sum(10, [[0, 3, 1], [1, 1, 3], [2, 2.5, 1]]),
    sum(20, [[0, 3, 1], [1, 2, 3], [2, 2.5, 1]]),
  ];
  const [latest, middle, first] = lateness(sums);
  expect(latest).toMatchObject({ rank: 1, least: 1, low: 1.25, median: 1.5, high: 1.75, most: 2, last: 1, of: 2 });
  expect(latest.cost).toBeCloseTo(1.5 + 0.5);
  expect(middle).toMatchObject({ rank: 2, median: 0.5, last: 0, cost: 0 });
  expect(first).toMatchObject({ rank: 0, median: 0, last: 0 });
});

test("a rank alone is not late, and of ranks that begin together none is last", () => {
  expect(lateness([sum(10, [[0, 3, 1]])])).toEqual([]);
  expect(lateness([sum(10, [[0, 1, 1], [1, 1, 1]])]).map((l) => l.last)).toEqual([0, 0]);
});

test("the recorded job has a rank that is late by 40 ms", () => {
  const [latest] = lateness(job().sums);
  expect(latest.rank).toBe(3);
  expect(latest.median).toBeGreaterThan(0.035);
  expect(latest.median).toBeLessThan(0.045);
});

test("the time is split into computing, waiting and summing", () => {
  const told = { ...job(), in_sums: null, sums: [sum(10, [[0, 3, 1], [1, 1, 3]])] };
  expect(split(told)).toEqual({ computing: 4 / 8, waiting: 2 / 8, summing: 2 / 8 });
  const told2 = { ...told, in_sums: 0.8 };
  const parts = split(told2)!;
  expect(parts.computing).toBeCloseTo(0.2);
  expect(parts.waiting).toBeCloseTo(0.4);
  expect(split({ ...told, sums: [] })).toBeNull();
  expect(split({ ...told, sums: [], in_sums: 0.25 })).toEqual({ computing: 0.75, waiting: 0, summing: 0.25 });
});

test("hints name the late rank and the link", () => {
  const hints = faster(job());
  expect(hints).toHaveLength(2);
  expect(hints[0]).toMatch(/the link into 10\.0\.1\.9:4800 bounds them/);
  expect(hints[1]).toMatch(/^Rank 3 on node3 is the last in 100 % of the sums\./);
  expect(faster({ ...job(), state: "aborted" })).toEqual([]);
});
