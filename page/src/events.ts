// What happened, newest first.
import { html, nothing, type TemplateResult } from "lit-html";
import { guard } from "lit-html/directives/guard.js";
import type { Event, State } from "./contract";
import { moment } from "./format";

export class Events {
  private job = "";

  constructor(private readonly changed: () => void) {}

  template(state: State): TemplateResult {
    const jobs = [...new Set(state.events.flatMap((e) => (e.job === null ? [] : [e.job])))].sort();
    if (this.job && !jobs.includes(this.job)) this.job = "";
    const events = this.job ? state.events.filter((e) => e.job === this.job) : state.events;
    const last = events[events.length - 1];
    return html`<div class="tools">
        <label
          >Job
          <select
            @change=${(e: { target: EventTarget | null }) => {
              this.job = (e.target as HTMLSelectElement).value;
              this.changed();
            }}
          >
            <option value="" .selected=${this.job === ""}>all</option>
            ${jobs.map((job) => html`<option value=${job} .selected=${this.job === job}>${job}</option>`)}
          </select></label
        >
        <span class="hint">${events.length >= 500 ? "The last 500 are kept." : nothing}</span>
      </div>
      ${events.length
        ? guard([events.length, last.at, last.text, this.job, new Date(state.now * 1e3).toDateString()], () =>
            table(events, state.now),
          )
        : html`<p class="empty">Nothing has happened yet.</p>`}`;
  }
}

function table(events: Event[], now: number): TemplateResult {
  return html`<div class="scroll events" tabindex="0" role="region" aria-label="Events">
    <table>
      <caption class="sr">
        Events, newest first
      </caption>
      <thead>
        <tr>
          <th scope="col">Time</th>
          <th scope="col">Severity</th>
          <th scope="col" class="wide">Job</th>
          <th scope="col">Event</th>
        </tr>
      </thead>
      <tbody>
        ${[...events].reverse().map(
          (event) =>
            html`<tr class=${event.severity === "warning" ? "warning" : ""}>
              <td class="time">${moment(event.at, now)}</td>
              <td><span class="badge">${event.severity === "warning" ? "Warning" : "Note"}</span></td>
              <td class="name wide" title=${event.job ?? ""}>${event.job ?? "–"}</td>
              <td class="text">${event.text}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
