import { expect, test } from "vitest";
import type { State } from "../src/contract";
import { Store } from "../src/store";
import { recorded } from "./answers";

/** An answer whose history has these times; job "a" sums as many bytes as the time says. */
function answer(times: number[], changes: Partial<State> = {}, jobs = ["a"]): State {
  const told = { ...recorded(), now: times[times.length - 1] ?? 0, kept: 3600, every: 1, ...changes };
  told.history = { times, services: {}, jobs: {} };
  told.jobs = jobs.map((name) => ({ ...recorded().jobs[0], name }));
  for (const name of jobs) {
    const none = times.map(() => null);
    told.history.jobs[name] = { summed: [...times], resent: none, lost: [...none], steps: [...none], in_sums: [...none] };
  }
  return told;
}

const count = (n: number, from = 1): number[] => Array.from({ length: n }, (_, i) => from + i);

test("the recorded answer fills every series", () => {
  const store = new Store();
  store.apply(recorded());
  expect(store.times).toHaveLength(120);
  expect(store.last).toBe(recorded().history.times[119]);
  for (const series of [...store.services.values(), ...store.jobs.values()]) {
    for (const values of Object.values(series)) expect(values).toHaveLength(120);
  }
});

test("samples that came before are not taken twice", () => {
  const store = new Store();
  store.apply(answer([1, 2, 3]));
  store.apply(answer([2, 3, 4, 5]));
  expect(store.times).toEqual([1, 2, 3, 4, 5]);
  expect(store.jobs.get("a")!.summed).toEqual([1, 2, 3, 4, 5]);
});

test("a job that comes later, and one that is gone, have nulls", () => {
  const store = new Store();
  store.apply(answer([1, 2], {}, ["a"]));
  store.apply(answer([3], {}, ["b"]));
  expect(store.jobs.get("a")!.summed).toEqual([1, 2, null]);
  expect(store.jobs.get("b")!.summed).toEqual([null, null, 3]);
});

test("a pause becomes a gap", () => {
  const store = new Store();
  store.apply(answer([1, 2]));
  store.apply(answer([60, 61]));
  expect(store.times).toEqual([1, 2, 3, 60, 61]);
  expect(store.jobs.get("a")!.summed).toEqual([1, 2, null, 60, 61]);
});

test("an hour is kept at most", () => {
  const store = new Store();
  store.apply(answer(count(3000), { kept: 1e9 }));
  store.apply(answer(count(3000, 3001), { kept: 1e9 }));
  expect(store.times).toHaveLength(3601);
  expect(store.times[0]).toBe(2400);
  expect(store.jobs.get("a")!.summed).toHaveLength(3601);
  expect(store.jobs.get("a")!.summed[0]).toBe(2400);
});

test("the service may keep less", () => {
  const store = new Store();
  store.apply(answer(count(200), { kept: 60 }));
  expect(store.times[0]).toBe(140);
});

test("a job that is gone is forgotten with its last sample", () => {
  const store = new Store();
  store.apply(answer(count(30), {}, ["a", "b"]));
  store.apply(answer(count(100, 31), { kept: 50 }, ["a"]));
  expect([...store.jobs.keys()]).toEqual(["a"]);
});

test("another server, or a clock that is set back, begins anew", () => {
  const store = new Store();
  store.apply(answer([100, 101]));
  store.apply(answer([5, 6]));
  expect(store.times).toEqual([5, 6]);
  store.apply(answer([7], { server: "rank 0 of x" }));
  expect(store.times).toEqual([7]);
});

test("names like those of objects' own fields are names", () => {
  const store = new Store();
  store.apply(answer([1], {}, ["constructor"]));
  store.apply(answer([2], {}, ["a"]));
  expect(store.jobs.get("constructor")!.summed).toEqual([1, null]);
});
