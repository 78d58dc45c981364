// @vitest-environment jsdom
import { expect, test } from "vitest";
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

test("the whole page is drawn, markup stays text, and only pictures of the file are shown", async () => {
  document.body.innerHTML = '<div id="top"></div><main id="page"></main><p id="old"></p>';
  const data = document.createElement("script");
  data.id = "data";
  data.type = "application/json";
  data.textContent = JSON.stringify(spoil(report()));
  document.body.append(data);
  await import("../src/report/main");
  await new Promise((done) => setTimeout(done, 50));
  expect(document.getElementById("old")).toBeNull();
  const sections = [...document.querySelectorAll("main > section")].map((s) => s.id);
  expect(sections.slice(0, 6)).toEqual(["reproduction", "sweep", "run", "words", "network", "jobs"]);
  const images = [...document.querySelectorAll("img")].map((i) => i.getAttribute("src"));
  expect(images).toEqual(["data:image/png;base64,AA"]);
  expect(document.querySelectorAll("main script, [onerror]").length).toBe(0);
  expect(document.getElementById("page")!.textContent).toContain("<script>alert(2)</script>");
});
