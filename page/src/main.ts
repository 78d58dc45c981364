// Draws the page after each answer, and after what people do on it.
import { html, nothing, render, type TemplateResult } from "lit-html";
import "./page.css";
import { Events } from "./events";
import { header, notice } from "./header";
import { Jobs } from "./jobs";
import { FanMap } from "./map";
import { type Connection, Poller } from "./poll";
import { Store } from "./store";
import { verdict, words } from "./words";

const store = new Store();
let connection: Connection = { kind: "waiting" };
let asked = false;

/** Draws once before the next frame, however often it is called. */
function changed(): void {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    draw();
  });
}

const map = new FanMap(changed);
const jobs = new Jobs(changed);
const events = new Events(changed);
const top = document.getElementById("top")!;
const page = document.getElementById("page")!;

function body(): TemplateResult | typeof nothing {
  const { state } = store;
  if (!state) return nothing;
  return html`<section id="words" aria-label="What to know">${words(state)}</section>
    <section id="map" aria-labelledby="map-title">
      <h2 id="map-title">Map</h2>
      ${map.template(state, store)}
    </section>
    <section id="jobs" aria-labelledby="jobs-title">
      <h2 id="jobs-title">Jobs</h2>
      ${jobs.template(state, store)}
    </section>
    <section id="events" aria-labelledby="events-title">
      <h2 id="events-title">Events</h2>
      ${events.template(state)}
    </section>`;
}

function draw(): void {
  const { state } = store;
  render(html`${header(state, connection)}${notice(connection, state, Date.now() / 1e3)}`, top);
  render(body(), page);
  page.classList.toggle("stale", connection.kind !== "live" && connection.kind !== "waiting");
  const { tone, text } = state ? verdict(state) : { tone: "idle", text: "" };
  const word = connection.kind === "silent" ? "No answer" : tone === "warning" ? text : "";
  document.title = ["fanin", word, state?.server].filter(Boolean).join(" · ");
}

document.getElementById("old")?.remove();
draw();
new Poller(
  () => store.last,
  (state) => store.apply(state),
  (now) => {
    connection = now;
    changed();
  },
).start();
// While the service is silent, the page counts for how long.
setInterval(() => {
  if (connection.kind === "silent") changed();
}, 1000);
