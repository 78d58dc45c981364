import { expect, test } from "vitest";
import { understood } from "../src/report/check";
import type { Report, Sweep } from "../src/report/contract";
import { report } from "./report";

/** The first place that does not fit; null where all of it does. */
const misses = (file: unknown): string | null => understood(file).left[0]?.place ?? null;

test("the recorded report is understood, with fields that are new too", () => {
  expect(misses(report())).toBeNull();
  expect(misses({ ...report(), novelty: 1 })).toBeNull();
});

test("the first place that does not fit is named", () => {
  const unnamed = report();
  (unnamed.runs[0].recording!.nodes[1] as { name?: string }).name = undefined;
  expect(misses(unnamed)).toBe("runs[0].recording.nodes[1].name");
  const short = report();
  short.runs[0].recording!.jobs[0].spans[0] = [1, 2] as unknown as [number, number, number, number];
  expect(misses(short)).toBe("runs[0].recording.jobs[0].spans[0]");
});

test("numbers of nodes exist, and series have all intervals", () => {
  const nowhere = report();
  nowhere.runs[0].recording!.directions[3].to = 1e6;
  expect(misses(nowhere)).toBe("runs[0].recording.directions[3]");
  const cut = report();
  cut.runs[0].recording!.directions[2].busy = [1];
  expect(misses(cut)).toBe("runs[0].recording.directions[2]");
  const job = report();
  job.runs[0].recording!.jobs[0].workers[0] = -1;
  expect(misses(job)).toBe("runs[0].recording.jobs[0]");
});

test("figures alone are understood, and no report at all is not", () => {
  const alone = report();
  alone.runs[0].recording = null;
  expect(misses(alone)).toBeNull();
  for (const file of [null, 7, "x", [], {}]) expect(misses(file)).not.toBeNull();
});

test("series that the page never draws may be missing, a new field of jobs may not", () => {
  const told = report();
  expect(told.runs[0].result.servers[0]).not.toHaveProperty("received_gbps");
  expect(told.runs[0].result.background[0]).not.toHaveProperty("delivered_gbps");
  (told.runs[0].recording!.jobs[1] as { asynchronous?: boolean }).asynchronous = undefined;
  expect(misses(told)).toBe("runs[0].recording.jobs[1].asynchronous");
});

/** Three runs, the second one of another version. */
function damaged(): Report {
  const runs = [1, 2, 3].map((seed) => ({ ...report().runs[0], name: `a.toml, seed ${seed}`, seed: String(seed) }));
  (runs[1] as { seed: unknown }).seed = 2;
  return { ...report(), runs };
}

test("a run that does not fit is left out with its name, and the others stay", () => {
  const { report: rest, left } = understood(damaged());
  expect(rest!.runs.map((r) => r.seed)).toEqual(["1", "3"]);
  expect(left).toEqual([{ name: "Run a.toml, seed 2", place: "runs[1].seed" }]);
  const odd = damaged();
  odd.runs[1] = null as never;
  expect(understood(odd).left).toEqual([{ name: "Run number 2", place: "runs[1]" }]);
});

test("points of a sweep keep their runs where others are left out", () => {
  const sweep: Sweep = {
    seeds: [1, 2, 3],
    sweep: {},
    figures: [],
    points: [{ values: {}, rows: [], runs: [0, 1, 2, 9, null].map((run) => ({ seed: 1, wrong: null, run })) }],
  };
  const told = understood({ ...damaged(), sweep });
  expect(told.report!.sweep!.points[0].runs.map((r) => r.run)).toEqual([0, null, 1, null, null]);
  const broken = understood({ ...damaged(), sweep: { ...sweep, figures: 1 } });
  expect(broken.report!.runs).toHaveLength(2);
  expect(broken.left.map((l) => l.place)).toEqual(["runs[1].seed", "sweep.figures"]);
});

test("no report is left where no part of it fits", () => {
  const all = damaged();
  for (const r of all.runs) (r as { name: unknown }).name = 7;
  expect(understood(all)).toMatchObject({ report: null, left: [{ name: "Run number 1", place: "runs[0].name" }, {}, {}] });
  expect(understood({ ...all, runs: [] }).report).toBeNull();
});
