// @vitest-environment jsdom
import { describe, expect, test } from "vitest";
import { endsOf, joined, steps } from "../src/report/axes";
import { figures, paired as pairs, ratio } from "../src/report/compare";
import type { Point, Run, Sweep } from "../src/report/contract";
import { render } from "lit-html";
import { againCommand, chooser, origin, scenarioFile, settled, writtenBy } from "../src/report/header";
import { letter, places } from "../src/report/places";
import { tone } from "../src/report/reproduction";
import { linesOf, named, numeric, scaleOf, shortNames } from "../src/report/sweep";
import { spread, SweepView } from "../src/report/sweep-view";
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
    const many = { quantiles: [1, 2, 4], count: 500 };
    expect([0.5, 1, 1.5, 2, 3, 4, 9].map((t) => reached(many, t))).toEqual([0, 0, 0.25, 0.5, 0.75, 1, 1]);
    expect(reached({ quantiles: [], count: 0 }, 1)).toBe(0);
  });
  test("quantiles that are all the times are counted", () => {
    const all = { quantiles: [1, 2, 2, 4], count: 4 };
    expect([0.5, 1, 1.5, 2, 3, 4, 9].map((t) => reached(all, t))).toEqual([0, 0.25, 0.25, 0.75, 0.75, 1, 1]);
  });
  test("times that are all equal are a step", () => {
    for (const count of [3, 1000]) {
      const { at, lines } = curves([{ of: "tensors of a", count, unfinished: 0, quantiles: [3, 3, 3] }]);
      expect(at).toEqual([1.5, 3, 4.5]);
      expect(lines).toEqual([[0, 1, 1]]);
    }
    expect(curves([{ of: "tensors of a", count: 2, unfinished: 0, quantiles: [0, 0] }])).toMatchObject({ at: [0, 1e-9], lines: [[1, 1]] });
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
  test("figures of links that were left out are unknown", () => {
    const [ours, other] = [run().result, run().result];
    other.links = [];
    const list = figures(ours, other).filter((f) => ["longest queue", "load of the busiest link", "packets marked"].includes(f.name));
    expect(list.map((f) => [f.ours !== null, f.show(f.other), ratio(f)])).toEqual(Array(3).fill([true, "–", "–"]));
  });
  test("jobs are paired by name, wherever they are", () => {
    const [ours, other] = [run().result, run().result];
    other.jobs.reverse();
    expect(figures(ours, other).filter((f) => f.name.includes("finished")).every((f) => f.ours === f.other)).toBe(true);
  });
  test("jobs without a namesake are paired in their order, and the last ones are alone", () => {
    const of = (names: string): { name: string }[] => [...names].map((name) => ({ name }));
    const both = (a: string, b: string) => pairs(of(a), of(b)).map(([x, y]) => `${x?.name ?? "–"}${y?.name ?? "–"}`);
    expect(both("ab", "ca")).toEqual(["aa", "bc"]);
    expect(both("aa", "aa")).toEqual(["aa", "aa"]);
    expect(both("abc", "b")).toEqual(["a–", "bb", "c–"]);
    expect(both("b", "abc")).toEqual(["bb", "–a", "–c"]);
  });
  test("figures have both names of a pair, and a dash for a job of one run", () => {
    const [ours, other] = [run().result, run().result];
    other.jobs = [{ ...other.jobs[1], name: "renamed", finished_s: 2 }];
    ours.jobs[1].finished_s = null;
    const list = figures(ours, other).filter((f) => f.name.endsWith(": finished"));
    expect(list.map((f) => [f.name, f.show(f.other)])).toEqual([
      [`${ours.jobs[0].name} / renamed: finished`, "2.00 s"],
      [`${ours.jobs[1].name}: finished`, "–"],
    ]);
  });
});

describe("sweeps", () => {
  test("values with units are numbers", () => {
    expect(["64", "100kB", "1MB", "1ms", "5%", "0.5", "1_000"].map(numeric)).toEqual([64, 1e5, 1e6, 1e-3, 0.05, 0.5, 1000]);
    expect(["10us", "2ps"].map((t) => numeric(t)! * 1e12)).toEqual([expect.closeTo(1e7), expect.closeTo(2)]);
    expect(["-2", "+1e3", '"1kB"', "1_000.2_5kbit"].map(numeric)).toEqual([-2, 1000, 1000, 1_000_250]);
    for (const text of ["atp", "", "10 apples", "true"]) expect(numeric(text)).toBeNull();
  });
  test("units are those that fanin takes, in any case", () => {
    expect(["10Gbit", "10gbit", "1TBIT", "500mbit", "9bit"].map(numeric)).toEqual([1e10, 1e10, 1e12, 5e8, 9]);
    expect(["2kibit", "1Gibit"].map(numeric)).toEqual([2048, 2 ** 30]);
    expect(["4KB", "4kb", "3B", "1TB", "64KiB", "1mib", "1TiB"].map(numeric)).toEqual([4000, 4000, 3, 1e12, 65536, 2 ** 20, 2 ** 40]);
    for (const text of ["10Gbit/s", "10Gbps", "3min", "4k", "10 Gbit", "1e3kB", "-1ms", "1.kB", ".5s", "1.2.3s", "1__0B"]) {
      expect(numeric(text), text).toBeNull();
    }
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

describe("runs that differ by their seeds alone", () => {
  const runs = ["9007199254740993", "2", "3"].map((seed): Run => ({ ...run(), seed }));
  const rows = ["job", "job"].map((name) => ({ name, enough: true, figures: { gbps: { median: 2, interval: [1, 3] as [number, number] } } }));
  const point: Point = {
    values: {},
    rows,
    runs: [0, 1, null].map((at, i) => ({ seed: [9007199254740993, 2, 3][i], wrong: at === null ? "lost" : null, run: at })),
  };
  const sweep: Sweep = { seeds: [1, 2, 3], sweep: {}, figures: [{ name: "gbps", label: "Gbit/s" }], points: [point] };

  test("are one point without a parameter", () => {
    const scale = scaleOf([""]);
    expect(scale).toMatchObject({ values: [""], numeric: false });
    expect(linesOf(sweep, "gbps", "", scale).map((l) => [l.label, l.marks.map((m) => m.value)])).toEqual([
      ["job", [""]],
      ["job (2)", [""]],
    ]);
  });
  test("can be picked by the row or by the seed", () => {
    const box = document.createElement("div");
    const picked: number[] = [];
    render(new SweepView(sweep, runs, (r) => picked.push(r), () => {}).template(1), box);
    expect(box.textContent).not.toContain("undefined");
    expect([...box.querySelectorAll("label")].map((l) => l.textContent!.trim().split(/\s/)[0])).toEqual(["Figure"]);
    expect([...box.querySelectorAll("thead th")].map((th) => th.textContent)).toEqual(["Row", "Seed shown", "Gbit/s", "Note"]);
    const button = box.querySelector<HTMLButtonElement>("tbody .pick")!;
    button.click();
    const seeds = box.querySelector<HTMLSelectElement>("tbody select")!;
    expect([...seeds.options].map((o) => o.textContent)).toEqual(["none", "9007199254740993", "2"]);
    expect(seeds.value).toBe("1");
    seeds.value = "0";
    seeds.dispatchEvent(new Event("change"));
    expect(picked).toEqual([0, 0]);
    expect(box.querySelector("tbody td.n")!.textContent).toBe("2.00 (1.00 to 3.00)");
    expect(box.querySelector("tbody td:last-child")!.textContent).toBe("1 of 3 runs did not end: seed 3, lost");
  });
  test("one seed has no interval", () => {
    expect([spread({ median: 2, interval: [2, 2] }), spread(undefined)]).toEqual(["2.00", "–"]);
  });
});

test("parameters have the shortest names that tell them apart", () => {
  const of = (parameters: string[]) => parameters.map(shortNames(parameters));
  expect(of(["job.0.tensors", "job.1.tensors", "network.rate"])).toEqual(["0.tensors", "1.tensors", "rate"]);
  expect(of(["rate", "network.rate"])).toEqual(["rate", "network.rate"]);
  expect(of(["network.rate"])).toEqual(["rate"]);
});

test("rows with one name get a number", () => {
  const row = (name: string) => ({ name, enough: true, figures: {} });
  const point = { values: {}, rows: [row("a"), row("b"), row("a"), row("a")], runs: [] };
  expect(named(point).map((r) => r.name)).toEqual(["a", "b", "a (2)", "a (3)"]);
});

describe("the choice of runs", () => {
  const told = { ...report(), runs: ["x", "y", "z"].map((name) => ({ ...run(), name })) };
  test("has no run beside itself", () => {
    expect(settled({ shown: 1, beside: 1 })).toEqual({ shown: 1, beside: null });
    expect(settled({ shown: 1, beside: 0 })).toEqual({ shown: 1, beside: 0 });
    const box = document.createElement("div");
    render(chooser(told, { shown: 1, beside: 2 }, () => {}), box);
    const [shown, beside] = [...box.querySelectorAll("select")];
    expect([...shown.options].map((o) => o.textContent)).toEqual(["x", "y", "z"]);
    expect([...beside.options].map((o) => o.textContent)).toEqual(["none", "x", "z"]);
    expect([shown.value, beside.value]).toEqual(["1", "2"]);
  });
  test("the command that wrote the file is told once, and not for a run", () => {
    const box = document.createElement("div");
    render(origin(told.runs[0]), box);
    expect(box.textContent).not.toContain(told.command);
    render(writtenBy(told), document.body);
    expect(document.body.textContent).toContain(told.command);
  });
});

test("the links with the most losses and marks are named", () => {
  const told = run();
  told.result.drops = [{ name: "loss", count: 4 }];
  told.result.links = [{ ...told.result.links[0], from: "A", to: "B", dropped: 3, marked: 5 }];
  expect(said(told).join(" ")).toContain("The link with the most losses was A to B, with 3.");
  expect(said(told).join(" ")).toContain("The link with the most marks was A to B, with 5.");
});

test("the command plays the run again under a name that any shell takes", () => {
  const told = { ...run(), name: "/tmp/$(x) my net.toml, seed 7", seed: "18446744073709551615" };
  expect(scenarioFile(told)).toBe("x-my-net.toml");
  expect(againCommand(told)).toBe("fanin sim x-my-net.toml --seed 18446744073709551615");
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
