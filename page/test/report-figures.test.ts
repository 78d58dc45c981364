// @vitest-environment jsdom
import { describe, expect, test } from "vitest";
import { endsOf, joined, steps } from "../src/report/axes";
import { figures, ratio } from "../src/report/compare";
import type { Sweep } from "../src/report/contract";
import { againCommand, scenarioFile } from "../src/report/header";
import { letter, places } from "../src/report/places";
import { tone } from "../src/report/reproduction";
import { linesOf, numeric, scaleOf } from "../src/report/sweep";
import { curves, entriesOf, paired, reached } from "../src/report/times";
import { sentences } from "../src/report/words";
import { report, run } from "./report";

const said = (r = run()): string[] => sentences(r).map((s) => s.text);

describe("sentences", () => {
  test("tell what finished, and the busiest link", () => {
    const told = run();
    told.result.jobs[0].finished_s = 0.0123;
    told.result.jobs[0].unfinished = told.result.jobs[0].died_s = null;
    expect(said(told).some((t) => t.includes(`Job ${told.result.jobs[0].name}`) && t.includes("12.3 ms"))).toBe(true);
    expect(said(told).some((t) => t.startsWith("The busiest link was "))).toBe(true);
  });

  test("warn of what is not finished and not measured", () => {
    const told = run();
    told.result.jobs[0].unfinished = "worker 1 waits for tensor 7";
    told.result.jobs[0].finished_s = told.result.jobs[0].died_s = null;
    told.result.jobs[0].measurement = { window_s: 1, completed: 2, needed: 3, enough: false };
    const warnings = sentences(told).filter((s) => s.warning).map((s) => s.text).join(" ");
    expect(warnings).toContain("worker 1 waits for tensor 7");
    expect(warnings).toContain("is not measured");
  });

  test("say so when a file has figures alone", () => {
    expect(said({ ...run(), recording: null }).some((t) => t.startsWith("This file has figures alone."))).toBe(true);
    expect(said().some((t) => t.startsWith("This file has figures alone."))).toBe(false);
  });
});

describe("times", () => {
  test("a distribution reaches from 0 to all", () => {
    const quantiles = [1, 2, 4];
    expect([0.5, 1, 1.5, 2, 3, 4, 9].map((t) => reached(quantiles, t))).toEqual([null, 0, 0.25, 0.5, 0.75, 1, 1]);
    expect(reached([], 1)).toBeNull();
    expect(reached([3, 3, 3], 3)).toBe(1);
  });
  test("things of two runs stand beside each other", () => {
    const [a, b] = [entriesOf(run(), "this"), entriesOf(run(), "other")];
    const both = paired(a, b.slice(1));
    expect(both.map((e) => e.label).slice(0, 3)).toEqual([a[0].label, a[1].label, b[1].label]);
    expect(both).toHaveLength(a.length + b.length - 1);
  });
  test("a wide spread is drawn over a logarithmic axis", () => {
    const of = (quantiles: number[]) => curves([{ of: "tensors of a", count: quantiles.length, unfinished: 0, quantiles }]);
    expect(of([1, 2, 30]).log).toBe(true);
    expect(of([1, 2, 3]).log).toBe(false);
    expect(of([0, 2, 30]).log).toBe(false);
  });
});

describe("two runs", () => {
  test("figures stand beside each other, with the ratio", () => {
    const [ours, other] = [run().result, run().result];
    other.packet_hops = ours.packet_hops / 2;
    const hops = figures(ours, other).find((f) => f.name === "packet hops")!;
    expect(ratio(hops)).toBe("2.00 ×");
    expect(ratio({ ...hops, other: 0 })).toBe("–");
  });
  test("a throughput that is not measured is not compared", () => {
    const [ours, other] = [run().result, run().result];
    for (const r of [ours, other]) for (const j of r.jobs) j.measurement.enough = false;
    expect(figures(ours, other).some((f) => f.name.endsWith(": throughput"))).toBe(false);
  });
  test("jobs are paired by name, wherever they are", () => {
    const [ours, other] = [run().result, run().result];
    other.jobs.reverse();
    expect(figures(ours, other).filter((f) => f.name.includes("finished")).every((f) => f.ours === f.other)).toBe(true);
  });
});

describe("sweeps", () => {
  test("values with units are numbers", () => {
    expect(["64", "100kB", "1MB", "1ms", "5%", "0.5", "1_000"].map(numeric)).toEqual([64, 1e5, 1e6, 1e-3, 0.05, 0.5, 1000]);
    expect(numeric("10us")).toBeCloseTo(1e-5, 12);
    for (const text of ["atp", "", "10 apples", "true"]) expect(numeric(text)).toBeNull();
  });
  test("an axis is of numbers only where all values are", () => {
    expect(scaleOf(["1ms", "10us"]).values).toEqual(["10us", "1ms"]);
    expect(scaleOf(["64", "atp"])).toMatchObject({ numeric: false, values: ["64", "atp"] });
    expect(scaleOf(["1", "10", "100"])).toMatchObject({ log: true });
    expect(scaleOf(["1", "10", "100"]).at.get("10")).toBeCloseTo(0.5);
  });
  test("each combination of the other parameters has a line", () => {
    const sweep: Sweep = {
      seeds: [1],
      sweep: { "a.size": ["1", "2"], "jobs.0.system": ["atp", "switchml"] },
      figures: [{ name: "gbps", label: "Gbit/s" }],
      points: ["2", "1"].flatMap((size) =>
        ["atp", "switchml"].map((system) => ({
          values: { "a.size": size, "jobs.0.system": system },
          rows: [{ name: "job", enough: true, figures: { gbps: { median: Number(size), interval: [1, 2] as [number, number] } } }],
          runs: [{ seed: 1, wrong: null, run: null }],
        })),
      ),
    };
    const lines = linesOf(sweep, "gbps", "a.size", scaleOf(["1", "2"]));
    expect(lines.map((l) => [l.label, l.marks.map((m) => m.median)])).toEqual([
      ["system atp", [1, 2]],
      ["system switchml", [1, 2]],
    ]);
  });
});

test("the command plays the run again under a name that any shell takes", () => {
  const told = { ...run(), name: "/tmp/$(x) my net.toml, seed 7", seed: 7 };
  expect(scenarioFile(told)).toBe("x-my-net.toml");
  expect(againCommand(told)).toBe("fanin sim x-my-net.toml --seed 7");
});

test("jobs have letters, and hosts the jobs that are on them", () => {
  expect([0, 25, 26, 53].map(letter)).toEqual(["A", "Z", "A2", "B3"]);
  const told = report().runs[0];
  const { at, tenants } = places(told);
  expect(tenants.length).toBe(told.result.jobs.length + told.result.parameter_servers.length);
  told.recording!.jobs.forEach((job, i) => {
    for (const n of job.workers) expect(at.get(n)!.get(i)!.worker).toBe(true);
  });
});

test("an interval that the end cut short is joined to the one before", () => {
  expect(joined([2, 4, 4.5], [10, 20, 60])).toEqual({ ends: [2, 4.5], values: [10, 28] });
  expect(joined([2, 4, 5], [10, 20, 60])).toEqual({ ends: [2, 4, 5], values: [10, 20, 60] });
  expect(joined([0.1], [7])).toEqual({ ends: [0.1], values: [7] });
});

test("a series of intervals is drawn to the end of the last one", () => {
  expect(steps([1, 3], [5, 6])).toEqual({ at: [0, 1, 3], values: [5, 6, 6] });
  expect(endsOf(1, 3, 2.5)).toEqual([1, 2, 2.5]);
});

test("verdicts have a colour beside their word", () => {
  expect(["agrees", "differs", "not measured"].map(tone)).toEqual(["agrees", "differs", "open"]);
});
