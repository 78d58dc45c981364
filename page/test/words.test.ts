// @vitest-environment jsdom
import { render } from "lit-html";
import { expect, test } from "vitest";
import { gain } from "../src/time";
import { said, startCommand, verdict, words } from "../src/words";
import { recorded } from "./answers";

const shown = (state = recorded()): HTMLElement => {
  const into = document.createElement("div");
  render(words(state), into);
  return into;
};

test("warnings of all jobs come first", () => {
  const state = recorded();
  state.jobs[1].words = [
    { name: "pool", severity: "note", text: "a note", cure: null },
    { name: "version", severity: "warning", text: "a warning", cure: "a cure" },
  ];
  expect(said(state).map((s) => s.word.severity)).toEqual(["warning", "warning", "note", "note"]);
  expect(verdict(state)).toEqual({ tone: "warning", text: "2 things need attention." });
  const texts = [...shown(state).querySelectorAll(".word")].map((w) => w.textContent!.replace(/\s+/g, " "));
  expect(texts[1]).toMatch(/Warning resnet50 a warning a cure/);
});

test("all is well when a job runs and nobody says a word", () => {
  const state = recorded();
  for (const job of state.jobs) job.words = [];
  expect(verdict(state)).toEqual({ tone: "good", text: "All is well. 1 job runs." });
  expect(shown(state).querySelector(".words")).toBeNull();
});

test("notes alone are nothing wrong", () => {
  const state = recorded();
  state.jobs[0].words = state.jobs[0].words.filter((w) => w.severity === "note");
  expect(verdict(state).text).toBe("Nothing is wrong. 1 job runs.");
});

test("a service that is silent needs attention", () => {
  const state = recorded();
  for (const job of state.jobs) job.words = [];
  state.services[2].silent = "no answer for 3 s";
  expect(verdict(state)).toEqual({ tone: "warning", text: "1 service does not answer." });
});

test("without jobs the page says how to start one", () => {
  const state = recorded();
  state.jobs = [];
  expect(verdict(state).tone).toBe("idle");
  expect(startCommand(state)).toMatch(/^FANIN_SWITCH=10\.0\.0\.9:4800 torchrun/);
  expect(shown(state).textContent).toContain('init_process_group("fanin")');
});

test("jobs that gather wait for ranks", () => {
  const state = recorded();
  state.jobs = [state.jobs[1]];
  expect(verdict(state).text).toBe("No job runs yet. 1 job waits for ranks.");
  expect(shown(state).textContent!.replace(/\s+/g, " ")).toContain("resnet50 waits for 4 ranks: 4–7.");
});

test("what is gained beside a ring is said where the links' rates are known", () => {
  const plan = { ...recorded().jobs[0].plan!, predicted: 1e-9, ring: 1.5e-9, measured: 1.2e-9 };
  expect(gain(plan)).toBe(
    "By the plan, sums are 1.50 times as fast as a ring (Gloo) on these links. " +
      "As measured, they are 1.25 times as fast as a ring is predicted to be.",
  );
  expect(gain({ ...plan, measured: null })).toBe("By the plan, sums are 1.50 times as fast as a ring (Gloo) on these links.");
  expect(gain({ ...plan, ring: null })).toBeNull();
});
