// @vitest-environment jsdom
// Names come from whoever joins: none becomes markup.
import { render } from "lit-html";
import { expect, test } from "vitest";
import type { State } from "../src/contract";
import { Events } from "../src/events";
import { header, notice } from "../src/header";
import { Jobs } from "../src/jobs";
import { FanMap } from "../src/map";
import { Store } from "../src/store";
import { words } from "../src/words";
import { recorded } from "./answers";

const EVIL = `<img src=x onerror="alert(1)">"'><script>alert(2)</script>`;

/** The recorded answer, with markup in every text that is no enumeration. */
function poisoned(): State {
  const keep = new Set(["state", "severity", "version", "protocol"]);
  const walk = (value: unknown, key: string, inHistory = false): unknown => {
    if (typeof value === "string") return keep.has(key) ? value : `${value}${EVIL}`;
    if (Array.isArray(value)) return value.map((v) => walk(v, key));
    if (typeof value !== "object" || value === null) return value;
    const named = inHistory && (key === "services" || key === "jobs");
    const inner = key === "history";
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [named ? `${k}${EVIL}` : k, walk(v, k, inner)]));
  };
  return walk(recorded(), "") as State;
}

test("markup in names stays text, everywhere", () => {
  const state = poisoned();
  const store = new Store();
  store.apply(state);
  const nothing = (): void => {};
  const into = document.createElement("div");
  document.body.append(into);
  const map = new FanMap(nothing);
  const jobs = new Jobs(nothing);
  const events = new Events(nothing);
  const parts = (): unknown[] => [
    header(state, { kind: "live" }),
    notice({ kind: "foreign", version: EVIL, field: EVIL }, state, 0),
    notice({ kind: "silent", since: 0, why: EVIL }, state, 0),
    words(state),
    map.template(state, store),
    jobs.template(state, store),
    events.template(state),
  ];
  render(parts(), into);
  for (const button of into.querySelectorAll<HTMLElement>("button.open")) {
    if (button.getAttribute("aria-expanded") === "false") button.click();
  }
  for (const id of into.querySelectorAll<HTMLElement>(".map .node, .map .link")) {
    id.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    render(parts(), into);
  }
  expect(into.querySelectorAll("section.job")).toHaveLength(3);
  expect(into.querySelector("img, script, [onerror]")).toBeNull();
  expect(into.textContent).toContain(EVIL);
  expect(into.querySelectorAll("[style]:not(.node, .column, .height, canvas)")).toHaveLength(0);
});
