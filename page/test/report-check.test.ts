import { expect, test } from "vitest";
import { misses } from "../src/report/check";
import { report } from "./report";

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
