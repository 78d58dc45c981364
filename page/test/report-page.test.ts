// @vitest-environment jsdom
import { expect, test, vi } from "vitest";
import type { Report, Sweep } from "../src/report/contract";
import { report } from "./report";

const EVIL = '"><img src=x onerror=alert(1)><script>alert(2)</script>${x}';

/** Renames everything that has a name. */
function spoil(told: Report): Report {
  told.command = EVIL;
  for (const run of told.runs) {
    run.name = run.toml = run.result.title = run.fanin.commit = EVIL;
    for (const n of run.recording!.nodes) n.name = EVIL;
    for (const t of run.recording!.times) t.of = EVIL;
    for (const j of run.result.jobs) Object.assign(j, { name: EVIL, system: EVIL, unfinished: EVIL, finished_s: null });
    for (const s of run.result.switches) s.name = EVIL;
    for (const l of run.result.links) l.from = l.to = EVIL;
  }
  const sweep: Sweep = {
    seeds: [1],
    sweep: { [EVIL]: [EVIL] },
    figures: [{ name: "gbps", label: EVIL }],
    points: [
      {
        values: { [EVIL]: EVIL },
        rows: [{ name: EVIL, enough: false, figures: { gbps: { median: 1, interval: [1, 1] } } }],
        runs: [{ seed: 1, wrong: EVIL, run: 0 }],
      },
    ],
  };
  const finding = { figure: EVIL, what: EVIL, paper: EVIL, agrees_from: EVIL, ours: EVIL, verdict: EVIL };
  const experiments = ["data:text/html,x", "https://example.com/x.png", "data:image/png;base64,AA"].map((picture) => ({
    name: EVIL,
    title: EVIL,
    picture,
    findings: [finding],
  }));
  return { ...told, sweep, reproduction: { paper: EVIL, summary: EVIL, experiments } };
}

/** Loads the page with a file in it, as a browser does. */
async function open(file: unknown): Promise<void> {
  document.body.innerHTML = '<div id="top"></div><main id="page"></main><p id="old"></p>';
  const data = document.createElement("script");
  data.id = "data";
  data.type = "application/json";
  data.textContent = JSON.stringify(file);
  document.body.append(data);
  vi.resetModules();
  await import("../src/report/main");
  await drawn();
}

const drawn = (): Promise<void> => new Promise((done) => setTimeout(done, 50));
const text = (): string => document.getElementById("page")!.textContent!;

test("the whole page is drawn, markup stays text, and only pictures of the file are shown", async () => {
  await open(spoil(report()));
  expect(document.getElementById("old")).toBeNull();
  const sections = [...document.querySelectorAll("main > section")].map((s) => s.id);
  expect(sections.slice(0, 6)).toEqual(["reproduction", "sweep", "run", "words", "network", "jobs"]);
  const images = [...document.querySelectorAll("img")].map((i) => i.getAttribute("src"));
  expect(images).toEqual(["data:image/png;base64,AA"]);
  expect(document.querySelectorAll("main script, [onerror]").length).toBe(0);
  expect(document.getElementById("page")!.textContent).toContain("<script>alert(2)</script>");
});

/** Runs of one report by different seeds. */
const seeded = (seeds: string[]): Report => ({
  ...report(),
  runs: seeds.map((seed) => ({ ...report().runs[0], name: `a.toml, seed ${seed}`, seed })),
});

test("a damaged second run is named, and the first one is shown", async () => {
  const told = seeded(["1", "2"]);
  (told.runs[1].result as { jobs: unknown }).jobs = 3;
  await open(told);
  expect(text()).toContain("Run a.toml, seed 2 is left out: this page does not understand runs[1].result.jobs.");
  expect(text()).not.toContain("This page cannot read its report");
  expect(document.querySelectorAll("#network canvas").length).toBe(1);
});

test("a page with no run that fits says so", async () => {
  await open({ ...report(), runs: [{}] });
  expect(text()).toContain("This page cannot read its report: runs[0].name is missing or of another kind.");
});

test("a run that is chosen on both sides has one map, and the command of the file is told once", async () => {
  await open(seeded(["1", "2", "3"]));
  const pick = async (list: number, value: string): Promise<void> => {
    const select = document.querySelectorAll<HTMLSelectElement>("#run .tools select")[list];
    select.value = value;
    select.dispatchEvent(new Event("change"));
    await drawn();
  };
  const maps = (): number => document.querySelectorAll("#network canvas").length;
  await pick(1, "2");
  expect(maps()).toBe(2);
  expect(text().split("written by").length).toBe(2);
  await pick(0, "2");
  expect(maps()).toBe(1);
  const [shown, beside] = [...document.querySelectorAll<HTMLSelectElement>("#run .tools select")];
  expect([shown.value, beside.value]).toEqual(["2", ""]);
});

test("runs that differ by their seeds alone can be picked", async () => {
  const told = seeded(["1", "2"]);
  const rows = [{ name: "training", enough: true, figures: { gbps: { median: 1, interval: [1, 2] as [number, number] } } }];
  const runs = [0, 1].map((run) => ({ seed: run + 1, wrong: null, run }));
  told.sweep = { seeds: [1, 2], sweep: {}, figures: [{ name: "gbps", label: "Gbit/s" }], points: [{ values: {}, rows, runs }] };
  await open(told);
  expect(document.getElementById("sweep-title")!.textContent).toBe("Seeds");
  const seeds = document.querySelector<HTMLSelectElement>("#sweep tbody select")!;
  seeds.value = "1";
  seeds.dispatchEvent(new Event("change"));
  await drawn();
  expect(document.querySelector("#run dl.facts")!.textContent).toContain("a.toml, seed 2");
  expect(text()).not.toContain("undefined");
});

test("the parts of a wait are in the legend only where ranks wait for each other", async () => {
  const told = report();
  told.runs[0].recording!.jobs[1].asynchronous = true;
  await open(told);
  const legends = [...document.querySelectorAll("#jobs article .legend")].map((l) => l.textContent!.includes("wait for the last one"));
  expect(legends).toEqual([true, false]);
});
