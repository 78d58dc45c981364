import { describe, expect, test } from "vitest";
import type { RecordedJob } from "../src/report/contract";
import { barAt, firstAt, Gantt, ranksIn, told } from "../src/report/gantt";

const job = (over: Partial<RecordedJob>): RecordedJob => ({
  workers: [0, 1],
  servers: [],
  tensors_per_step: 2,
  asynchronous: false,
  tensors: [[0, 1, 2, 4, 5], [1, 3, 3, 6, 6]],
  spans: [[0, 0, 1, 4], [1, 0, 2, 5], [0, 1, 3, 6]],
  computing: [[0, 0.5, 1]],
  left_out: { tensors: 0, spans: 0, computing: 0 },
  ...over,
});

describe("rows", () => {
  const gantt = new Gantt(job({}));
  test("the row of all ranks waits for the last rank", () => {
    expect(gantt.all.bars[0]).toMatchObject({ number: 0, from: 1, waited: 2, first: 4, to: 5 });
    expect([gantt.from, gantt.to]).toEqual([0.5, 6]);
  });
  test("nobody waits for the last rank of an asynchronous job", () => {
    const bar = new Gantt(job({ asynchronous: true })).all.bars[0];
    expect(bar).toMatchObject({ from: 1, waited: 1, first: 4, to: 5 });
  });
  test("numbers of a stretch are told, with the ranks that are drawn", () => {
    expect(told(gantt, [0, 1], 0.5, 6)).toBe(
      "Tensors over time, 500 ms to 6.00 s: 2 tensors of 2 ranks. " +
        "From the first rank's submission to the last rank's sum, a tensor took 3.50 s in the mean, 4.00 s at most.",
    );
    expect(told(gantt, [1], 0, 0.2)).toBe("Tensors over time, 0 s to 200 ms: 0 tensors of 2 ranks, of which rank 1 is drawn.");
  });
  test("tensors that overlap take lanes", () => {
    const { bars, lanes, computing } = gantt.row(0);
    expect(bars.map((b) => [b.number, b.lane])).toEqual([[0, 0], [1, 1]]);
    expect(lanes).toBe(2);
    expect(computing).toEqual([[0.5, 1]]);
    expect(gantt.row(1).lanes).toBe(1);
  });
  test("a step has tensors_per_step tensors", () => {
    expect([0, 1, 2, 5].map((n) => gantt.step(n))).toEqual([0, 0, 1, 2]);
  });
  test("the bar at a time is the one in the lane that is pointed at", () => {
    expect(barAt(gantt.row(0), 3.5, 1)!.number).toBe(1);
    expect(barAt(gantt.row(0), 3.5, 0)!.number).toBe(0);
    expect(barAt(gantt.row(0), 9, 0)).toBeNull();
  });
  test("a job without anything has a row all the same", () => {
    const empty = new Gantt(job({ tensors: [], spans: [], computing: [] }));
    expect(empty.row(0).bars).toEqual([]);
    expect(empty.to).toBeGreaterThan(empty.from);
  });
});

test("the search for a stretch of time passes over what ended before", () => {
  const spans = Array.from({ length: 1000 }, (_, i): [number, number, number, number] => [0, i, i, i + 1.5]);
  const row = new Gantt(job({ spans, tensors: [], computing: [] })).row(0);
  const first = firstAt(row, 500);
  expect(first).toBeGreaterThan(490);
  expect(row.bars.slice(0, first).every((b) => b.to < 500)).toBe(true);
});

test("ranks are typed as numbers and ranges", () => {
  expect(ranksIn("0-3, 7", 10, 40)).toEqual([0, 1, 2, 3, 7]);
  expect(ranksIn("9–9", 10, 40)).toEqual([9]);
  expect(ranksIn("0-9", 10, 4)).toEqual([0, 1, 2, 3]);
  for (const wrong of ["10", "3-1", "x", "-1", ""]) expect(ranksIn(wrong, 10, 40)).toBeNull();
});
