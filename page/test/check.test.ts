import { expect, test } from "vitest";
import { misses, versionOf } from "../src/check";
import { recorded } from "./answers";

test("the recorded answer is understood, with fields that are new too", () => {
  expect(misses(recorded())).toBeNull();
  expect(misses({ ...recorded(), novelty: 1 })).toBeNull();
});

test("the first field that is missing is named", () => {
  const state = recorded() as unknown as { [name: string]: unknown };
  delete state.events;
  expect(misses(state)).toBe("events");
  const told = recorded();
  (told.jobs[1].ranks[0] as { name?: string }).name = undefined;
  expect(misses(told)).toBe("jobs[1].ranks[0].name");
  const sums = recorded();
  sums.jobs[0].sums[3].ranks[1] = [1, 2] as unknown as [number, number, number];
  expect(misses(sums)).toBe("jobs[0].sums[3].ranks[1]");
});

test("no answer at all is not understood", () => {
  for (const answer of [null, 7, "x", [], {}]) expect(misses(answer)).not.toBeNull();
  expect(versionOf({ version: "9.1" })).toBe("9.1");
  expect(versionOf(null)).toBe("unknown");
});
