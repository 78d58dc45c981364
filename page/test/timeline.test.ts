import { describe, expect, test } from "vitest";
import { firstBegin, lanesOf, lastBegin, lastSteps, picture, spanAt } from "../src/timeline";
import { fileName, trace } from "../src/trace";
import { panned, tick, zoomed } from "../src/view";
import { job, sum } from "./answers";

// Rank 0 computes from 6.0 and begins at 7.0; rank 1 computes from 6.0 and begins at 9.0.
const one = sum(10, [[0, 3, 1], [1, 1, 3]]);

test("begins are ends less what it took", () => {
  expect(firstBegin(one)).toBe(7);
  expect(lastBegin(one)).toBe(9);
  expect(lastBegin(sum(10, []))).toBe(10);
});

test("each rank computes, waits for the last and sums", () => {
  const { rows, from, to, lanes } = picture([one]);
  expect([from, to, lanes]).toEqual([6, 10, 1]);
  expect(rows.get(0)![0]).toMatchObject({ from: 6, began: 7, last: 9, ended: 10 });
  expect(rows.get(1)![0]).toMatchObject({ from: 6, began: 9, last: 9, ended: 10 });
});

test("collectives that overlap take lanes, and ones in a row do not", () => {
  expect(lanesOf([sum(10, [[0, 3, 1]]), sum(11, [[0, 3, 0]]), sum(13, [[0, 3, 0]])])).toEqual([0, 1, 0]);
  const many = Array.from({ length: 9 }, (_, i) => sum(10 + i / 10, [[0, 5, 0]]));
  expect(Math.max(...lanesOf(many))).toBe(3);
});

test("the last three steps are followed", () => {
  const sums = Array.from({ length: 20 }, (_, i) => sum(i + 1, [[0, 0.25, 0.75]], i));
  expect(lastSteps(sums, 2)).toBe(14);
  expect(lastSteps(sums, null)).toBe(8);
  expect(lastSteps([], 2)).toBe(0);
});

describe("views", () => {
  const bounds = { from: 0, to: 100 };
  test("zoom keeps the time under the pointer", () => {
    expect(zoomed({ from: 0, to: 100 }, 0.5, 0.2, bounds)).toEqual({ from: 10, to: 60 });
  });
  test("zoom and pan stay within the bounds", () => {
    expect(zoomed({ from: 90, to: 100 }, 4, 0.5, bounds)).toEqual({ from: 60, to: 100 });
    expect(zoomed({ from: 40, to: 60 }, 100, 0.5, bounds)).toEqual(bounds);
    expect(panned({ from: 80, to: 90 }, 50, bounds)).toEqual({ from: 90, to: 100 });
    expect(panned({ from: 80, to: 90 }, -500, bounds)).toEqual({ from: 0, to: 10 });
  });
  test("ticks are round", () => {
    expect(tick(2.7, 9)).toBeCloseTo(0.5);
    expect(tick(0.013, 5)).toBeCloseTo(0.005);
  });
  test("the span at a time is the one in the lane that is pointed at", () => {
    const row = picture([sum(10, [[0, 3, 1]]), sum(11, [[0, 3, 0]], 2)]).rows.get(0)!;
    expect(spanAt(row, 9, 1)!.sum.number).toBe(2);
    expect(spanAt(row, 9, 0)!.sum.number).toBe(1);
    expect(spanAt(row, 20, 0)).toBeNull();
  });
});

describe("the trace", () => {
  test("has the same parts in microseconds", () => {
    const told = { ...job(), sums: [one] };
    const events = trace(told).traceEvents.filter((e) => e.ph === "X");
    expect(events.map(({ name, tid, ts, dur }) => [name, tid, ts, dur])).toEqual([
      ["computing", 0, 6e6, 1e6],
      ["all_reduce: waiting", 0, 7e6, 2e6],
      ["all_reduce", 0, 9e6, 1e6],
      ["computing", 8, 6e6, 3e6],
      ["all_reduce", 8, 9e6, 1e6],
    ]);
  });

  test("names machines and ranks, and no thread's events overlap", () => {
    const { traceEvents } = trace(job());
    expect(traceEvents.filter((e) => e.name === "process_name").map((e) => e.args.name)).toEqual(["node1", "node2", "node3"]);
    expect(traceEvents.filter((e) => e.name === "thread_name")).toHaveLength(4);
    const ends = new Map<number, number>();
    for (const event of traceEvents.filter((e) => e.ph === "X").sort((a, b) => a.ts! - b.ts!)) {
      expect(event.ts).toBeGreaterThanOrEqual(ends.get(event.tid) ?? 0);
      ends.set(event.tid, event.ts! + event.dur!);
    }
    expect(JSON.parse(JSON.stringify(trace(job())))).toEqual(trace(job()));
  });

  test("goes into a file that any system takes", () => {
    expect(fileName('../<b>"gpt"#1')).toBe("fanin-..-b-gpt-1.trace.json");
  });
});
