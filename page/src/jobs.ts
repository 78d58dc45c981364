// The table of jobs, and the sections that are open.
import { html, nothing, type TemplateResult } from "lit-html";
import { repeat } from "lit-html/directives/repeat.js";
import type { Job, State } from "./contract";
import { bytesPerSecond, count, digits, percent, several } from "./format";
import { JobSection, packets } from "./job";
import { latest } from "./map-model";
import type { Store } from "./store";

const FILTER_FROM = 8;
const ORDER = { running: 0, gathering: 1, aborted: 2 };
const byName = new Intl.Collator("en", { numeric: true }).compare;

export function ordered(jobs: readonly Job[]): Job[] {
  const warned = (j: Job): number => (j.words.some((w) => w.severity === "warning") ? 0 : 1);
  return [...jobs].sort(
    (a, b) => (ORDER[a.state] ?? 3) - (ORDER[b.state] ?? 3) || warned(a) - warned(b) || byName(a.name, b.name),
  );
}

export class Jobs {
  private readonly open = new Map<string, JobSection>();
  private started = false;
  private filter = "";

  constructor(private readonly changed: () => void) {}

  template(state: State, store: Store): TemplateResult {
    const jobs = ordered(state.jobs);
    if (!this.started && jobs.length) {
      this.started = true;
      if (jobs.length <= FILTER_FROM || jobs[0].state === "running") this.toggle(jobs[0].name);
    }
    for (const [name, section] of this.open) {
      if (jobs.some((j) => j.name === name)) continue;
      section.close();
      this.open.delete(name);
    }
    if (!jobs.length) return html`<p class="empty">No job is here.</p>`;
    const wanted = this.filter.trim().toLowerCase();
    const shown = wanted ? jobs.filter((j) => `${j.name} ${j.state}`.toLowerCase().includes(wanted)) : jobs;
    return html`${jobs.length > FILTER_FROM ? this.filterBox(shown.length, jobs.length) : nothing}
      <div class=${jobs.length > FILTER_FROM ? "scroll tall" : "scroll"} tabindex=${jobs.length > FILTER_FROM ? 0 : nothing}>
        <table class="jobs">
          <caption class="sr">Jobs; a name opens the section of its job</caption>
          <thead>
            <tr>
              <th scope="col">Job</th>
              <th scope="col">State</th>
              <th scope="col" class="n">Ranks</th>
              <th scope="col" class="n">Steps</th>
              <th scope="col" class="n wide">Summed</th>
              <th scope="col" class="n wide">In sums</th>
              <th scope="col" class="n wide">Sent again</th>
              <th scope="col" class="n wide">Lost</th>
              <th scope="col" class="n wide">Warnings</th>
            </tr>
          </thead>
          <tbody>
            ${repeat(
              shown,
              (j) => j.name,
              (j) => this.row(j, store),
            )}
          </tbody>
        </table>
      </div>
      ${state.hidden_jobs ? html`<p class="hint">${several(state.hidden_jobs, "more job")} ${state.hidden_jobs === 1 ? "is" : "are"} not told.</p>` : nothing}
      ${repeat(
        jobs.filter((j) => this.open.has(j.name)),
        (j) => j.name,
        (j) => this.open.get(j.name)!.template(j, state, store, () => this.flip(j.name)),
      )}`;
  }

  private filterBox(shown: number, all: number): TemplateResult {
    return html`<div class="tools">
      <input
        type="search"
        placeholder="Name or state"
        aria-label="Filter the jobs"
        .value=${this.filter}
        @input=${(e: { target: EventTarget | null }) => {
          this.filter = (e.target as HTMLInputElement).value;
          this.changed();
        }}
      />
      <span class="hint">${count(shown)} of ${count(all)} jobs</span>
    </div>`;
  }

  private row(job: Job, store: Store): TemplateResult {
    const series = store.jobs.get(job.name);
    const warnings = job.words.filter((w) => w.severity === "warning").length;
    const there = job.world_size - job.missing.length - job.left.length;
    return html`<tr>
      <th scope="row" class="name">
        <button
          type="button"
          class="open"
          aria-expanded=${this.open.has(job.name)}
          title=${job.name}
          @click=${() => this.flip(job.name)}
        >
          ${job.name}
        </button>
      </th>
      <td><span class="state ${job.state}">${job.state}</span></td>
      <td class="n">${there === job.world_size ? count(there) : `${count(there)} of ${count(job.world_size)}`}</td>
      <td class="n">${job.steps === null ? "–" : `${digits(job.steps)} /s`}</td>
      <td class="n wide">${bytesPerSecond(latest(series?.summed))}</td>
      <td class="n wide">${percent(job.in_sums)}</td>
      <td class="n wide">${packets(latest(series?.resent))}</td>
      <td class="n wide">${packets(latest(series?.lost))}</td>
      <td class="n wide">${warnings || "–"}</td>
    </tr>`;
  }

  private flip(name: string): void {
    this.toggle(name);
    this.changed();
  }

  private toggle(name: string): void {
    const section = this.open.get(name);
    if (section) {
      section.close();
      this.open.delete(name);
    } else this.open.set(name, new JobSection(name, this.changed));
  }
}
