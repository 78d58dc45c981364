// The section of a job.
import { html, nothing, svg, type TemplateResult } from "lit-html";
import { Charts } from "./charts";
import type { Job, State } from "./contract";
import { bytesPerSecond, capital, count, digits, percent, ranges, rankList, si } from "./format";
import { lateness } from "./lateness";
import { latenessView } from "./lateness-view";
import { latest } from "./map-model";
import { facts } from "./panel";
import { latestFirst, matching, ranksView } from "./ranks";
import { sharesView, totalsView } from "./shares";
import type { Store, Values } from "./store";
import { faster, split } from "./time";
import { Timeline } from "./timeline-view";

const FILTER_FROM = 8;
export const packets = (x: number | null): string => si(x, "/s", true);

export class JobSection {
  private readonly charts: Charts;
  private readonly timeline: Timeline;
  private filter = "";

  constructor(
    readonly name: string,
    private readonly changed: () => void,
  ) {
    this.charts = new Charts(
      [
        { title: "Gradients summed", show: bytesPerSecond, lines: [{ label: "", colour: "summing" }] },
        { title: "Packets sent again", show: packets, lines: [{ label: "", colour: "waiting" }] },
        { title: "Steps a second", show: digits, lines: [{ label: "", colour: "good" }] },
      ],
      changed,
    );
    this.timeline = new Timeline(changed);
  }

  close(): void {
    this.charts.close();
    this.timeline.close();
  }

  template(job: Job, state: State, store: Store, onClose: () => void): TemplateResult {
    const series = store.jobs.get(job.name);
    if (series) {
      const data = [series.summed, series.resent, series.steps].map((s): Values[] => [s]);
      this.charts.set(store.times, data, state.now);
    }
    const ranks = matching(job.ranks, this.filter);
    const late = lateness(job.sums);
    const order = [...late.map((l) => l.rank), ...latestFirst(ranks).map((r) => r.rank)];
    const wanted = new Set(ranks.map((r) => r.rank));
    // A rank of the sums that tells nothing of itself is shown unless a filter asks for others.
    if (!this.filter.trim()) for (const l of late) wanted.add(l.rank);
    const drawn = [...new Set(order)].filter((r) => wanted.has(r));
    return html`<section class="job" aria-label=${`Job ${job.name}`}>
      <header>
        <h3 class="name" title=${job.name}>${job.name}</h3>
        <span class="state ${job.state}">${job.state}</span>
        <span class="spring"></span>
        <button type="button" class="close" @click=${onClose} aria-label=${`Close ${job.name}`}>×</button>
      </header>
      ${trouble(job)} ${this.figures(job, store)}
      <div class="columns">
        <div>
          <h4>Time</h4>
          ${timeBar(job)}
        </div>
        <div>
          <h4>What would make it faster</h4>
          ${hints(job)}
        </div>
      </div>
      ${series ? html`<h4>Over time</h4>${this.charts.template()}` : nothing}
      <div class="columns">
        <div><h4>Shares</h4>${sharesView(job)}</div>
        <div><h4>Bytes by collective</h4>${totalsView(job.totals)}</div>
      </div>
      <div class="filtered">
        <h4>Ranks</h4>
        ${job.ranks.length > FILTER_FROM ? this.filterBox(job) : nothing}
      </div>
      ${ranksView(job, ranks)}
      <h4>Timeline of the last steps</h4>
      ${this.timeline.template(job, drawn)}
      <h4>Lateness</h4>
      ${latenessView(job, late, wanted)}
    </section>`;
  }

  private filterBox(job: Job): TemplateResult {
    return html`<input
      type="search"
      placeholder="Rank, machine or address"
      aria-label=${`Filter the ranks of ${job.name}`}
      .value=${this.filter}
      @input=${(e: { target: EventTarget | null }) => {
        this.filter = (e.target as HTMLInputElement).value;
        this.changed();
      }}
    />`;
  }

  private figures(job: Job, store: Store): TemplateResult {
    const series = store.jobs.get(job.name);
    const machines = new Set(job.ranks.map((r) => r.machine)).size;
    // Ranks of one machine sum in its memory, and send nothing.
    const sends = job.window > 0;
    return facts([
      ["Ranks", `${count(job.world_size)} on ${count(machines)}`],
      ["Steps", job.steps === null ? "–" : `${digits(job.steps)} /s`],
      ["Summed", bytesPerSecond(latest(series?.summed))],
      ["In sums", percent(job.in_sums)],
      ["Sums a step", job.sums_per_step === null ? "–" : digits(job.sums_per_step)],
      sends ? ["Sent again", packets(latest(series?.resent))] : null,
      sends ? ["Lost", packets(latest(series?.lost))] : null,
      sends ? ["Window", `${count(job.window)} packets`] : null,
      ["Protocol", job.protocol],
      sends ? ["On the wire", job.wire_dtype] : null,
      sends ? ["Security", job.security] : null,
      ["Generation", count(job.generation)],
    ]);
  }
}

function trouble(job: Job): TemplateResult {
  return html`${job.reason ? html`<p class="trouble">Aborted: ${job.reason}</p>` : nothing}
  ${job.missing.length
    ? html`<p class="aside clip" title=${ranges(job.missing)}>
        ${capital(rankList(job.missing))} ${job.missing.length === 1 ? "is" : "are"} not there yet.
      </p>`
    : nothing}
  ${job.left.length
    ? html`<p class="aside clip" title=${ranges(job.left)}>
        ${capital(rankList(job.left))} ${job.left.length === 1 ? "has" : "have"} left.
      </p>`
    : nothing}`;
}

function timeBar(job: Job): TemplateResult {
  const times = split(job);
  if (!times) return html`<p class="empty">Nothing is known of its time yet.</p>`;
  const parts: [keyof typeof times, string][] = [
    ["computing", "computing"],
    ["waiting", "waiting for the last rank"],
    ["summing", "summing"],
  ];
  let x = 0;
  const label = parts.map(([key, text]) => `${percent(times[key])} ${text}`).join(", ");
  return html`<svg class="stack" width="100%" height="18" role="img" aria-label=${label}>
      ${parts.map(([key]) => {
        const from = x;
        x += times[key];
        return svg`<rect class=${key} x=${`${from * 100}%`} width=${`${times[key] * 100}%`} height="18"></rect>`;
      })}
    </svg>
    <p class="legend">
      ${parts.map(
        ([key, text]) => html`<span><i class="swatch ${key}"></i>${text} <b>${percent(times[key])}</b></span>`,
      )}
    </p>`;
}

function hints(job: Job): TemplateResult {
  const all = faster(job);
  if (!all.length) return html`<p class="empty">Nothing is known that would.</p>`;
  return html`<ul class="hints">${all.map((text) => html`<li>${text}</li>`)}</ul>`;
}
