// @vitest-environment jsdom
import { expect, test } from "vitest";
import { extent, lastUntil } from "../src/chart";

test("the cursor of a stepped chart reads the interval that it is in", () => {
  const ends = [0, 2, 4];
  expect([-1, 0, 0.5, 1.9, 2, 3.9, 9].map((x) => lastUntil(ends, x))).toEqual([0, 0, 0, 0, 1, 1, 2]);
});

test("a zoom inside one interval knows its value", () => {
  const [xs, values] = [[0, 2, 4], [5, 7, 7]];
  expect(extent(xs, values, 0.5, 1.5, true)).toEqual([5, 5]);
  expect(extent(xs, values, 0.5, 1.5, false)).toBeNull();
  expect(extent(xs, values, 1, 3, true)).toEqual([5, 7]);
  expect(extent(xs, [null, null, null], 0, 4, true)).toBeNull();
  expect(extent([], [], 0, 1, true)).toBeNull();
});
