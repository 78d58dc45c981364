// The section of the jobs: their figures, throughput over time, and tensors over time.
import { html, nothing, type TemplateResult } from "lit-html";
import uPlot from "uplot";
import { Chart } from "../chart";
import { count, digits, duration, gbps } from "../format";
import { endsOf, joined, steps, VIRTUAL_TIME } from "./axes";
import type { Job, Run } from "./contract";
import { GanttView } from "./gantt-view";
import { COLOURS, letter } from "./places";
import { DASHES, key } from "./times";
import { table } from "./table";

/** More jobs than this start closed. */
const MOST_OPEN = 3;
const MOST_LINES = 8;
let sections = 0;

export class Jobs {
  private readonly opened: Set<number>;
  private readonly gantts = new Map<number, GanttView>();
  private readonly chart: Chart | null;
  private zoom: [number, number] | null = null;
  /** Whether the chart has to be drawn anew. */
  private stale = true;

  constructor(
    private readonly run: Run,
    private readonly changed: () => void,
  ) {
    const { jobs } = run.result;
    this.opened = new Set(jobs.length <= MOST_OPEN ? jobs.keys() : [0]);
    const lines = jobs.slice(0, MOST_LINES).map((_, i) => ({
      label: jobs.length > 1 ? letter(i) : "",
      colour: `series${i % COLOURS}`,
      dash: DASHES[i % DASHES.length],
    }));
    const there = jobs.some((job) => job.series.aggregation_gbps.length > 1);
    this.chart = there
      ? new Chart("Received by a worker, in the mean", gbps, lines, uPlot.sync(`jobs${sections++}`), (from, to) => this.zoomTo([from, to]), {
          across: VIRTUAL_TIME,
          stepped: true,
        })
      : null;
  }

  private zoomTo(zoom: [number, number] | null): void {
    this.zoom = zoom;
    this.stale = true;
    this.changed();
  }

  template(): TemplateResult {
    const { result } = this.run;
    const { jobs } = result;
    return html`${this.figures(jobs)}
    ${this.chart ? this.throughput(this.chart, jobs, result.ended_s, result.interval_s) : nothing}
    ${jobs.map((job, i) => this.job(job, i))}`;
  }

  private figures(jobs: Job[]): TemplateResult {
    const any = (has: (job: Job) => unknown): boolean => jobs.some((j) => has(j) !== null);
    const column = (head: string, cell: (job: Job) => unknown) => ({ head, number: true, cell });
    return table(
      "Figures of the jobs",
      [
        { head: "Job", cell: (j, i) => html`<b class="tenant series${i % COLOURS}">${letter(i)}</b> ${j.name}` },
        { head: "System", cell: (j) => j.system },
        column("Workers", (j) => count(j.workers)),
        { head: "Ended", number: true, cell: (j) => ended(j) },
        column("Throughput", (j) => (j.measurement.enough ? gbps(j.aggregation_gbps) : html`<span title=${tooFew(j)}>${gbps(j.aggregation_gbps)} (not measured)</span>`)),
        column("Tensors", (j) => digits(j.tensors)),
        column("Tensor time", (j) => (j.tensor_times.count ? duration(j.tensor_times.mean_s) : "–")),
        column("99 %", (j) => (j.tensor_times.count ? duration(j.tensor_times.p99_s) : "–")),
        any((j) => j.training) ? column("Model", (j) => j.training?.model ?? "–") : null,
        any((j) => j.training) ? column("Iterations", (j) => count(j.training?.iterations)) : null,
        any((j) => j.training)
          ? column("A second and worker", (j) => (j.training ? `${digits(j.training.samples_per_s)} ${j.training.sample}` : "–"))
          : null,
        any((j) => j.switch_aggregations) ? column("Added by switches", (j) => count(j.switch_aggregations)) : null,
        any((j) => j.server_aggregations) ? column("Added by servers", (j) => count(j.server_aggregations)) : null,
        any((j) => j.retransmissions) ? column("Sent again", (j) => count(j.retransmissions)) : null,
      ],
      jobs,
      { hidden: true },
    );
  }

  private throughput(chart: Chart, jobs: Job[], ended: number, interval: number): TemplateResult {
    const shown = jobs.slice(0, MOST_LINES);
    if (this.stale) this.plot(chart, shown, ended, interval);
    this.stale = false;
    return html`<div class="charts wide-chart">${chart.element}</div>
      ${jobs.length > 1
        ? html`<p class="legend">${shown.map((j, i) => html`<span>${key(i)}<b>${letter(i)}</b> ${j.name}</span>`)}</p>`
        : nothing}
      <p class="hint">
        ${this.zoom
          ? html`<button type="button" @click=${() => this.zoomTo(null)}>Whole run</button>`
          : "Drag in the chart to zoom."}
        ${jobs.length > shown.length ? `The first ${shown.length} of ${jobs.length} jobs are drawn.` : nothing}
      </p>`;
  }

  private plot(chart: Chart, shown: Job[], ended: number, interval: number): void {
    const longest = Math.max(...shown.map((j) => j.series.aggregation_gbps.length));
    const ends = endsOf(interval, longest, ended);
    const padded = (values: number[]): number[] => [...values, ...new Array<number>(longest - values.length).fill(0)];
    const lines = shown.map((j) => {
      const rates = joined(ends, padded(j.series.aggregation_gbps));
      return steps(rates.ends, rates.values);
    });
    const [from, to] = this.zoom ?? [0, ended];
    queueMicrotask(() => chart.set(lines[0].at, lines.map((l) => l.values), from, to));
  }

  private job(job: Job, i: number): TemplateResult {
    const recorded = this.run.recording?.jobs[i];
    const open = this.opened.has(i);
    const several = this.run.result.jobs.length > 1;
    return html`<article class="job" aria-label=${job.name}>
      <header>
        ${recorded
          ? html`<h3 class="name">
              <button type="button" class="open" aria-expanded=${open} @click=${() => {
                if (open) this.opened.delete(i);
                else this.opened.add(i);
                this.changed();
              }}>${several ? html`<b class="tenant series${i % COLOURS}">${letter(i)}</b> ` : nothing}${job.name}: tensors over time</button>
            </h3>`
          : html`<h3 class="name">${job.name}</h3>`}
        <span class="state">${ended(job)}</span>
      </header>
      ${job.unfinished ? html`<p class="trouble">${job.unfinished}</p>` : nothing}
      ${recorded && open ? this.gantt(i).template() : nothing}
    </article>`;
  }

  private gantt(i: number): GanttView {
    let view = this.gantts.get(i);
    if (!view) {
      view = new GanttView(this.run.recording!.jobs[i], this.run.recording!.nodes, this.changed);
      this.gantts.set(i, view);
    }
    return view;
  }
}

export function ended(job: Job): string {
  if (job.died_s !== null) return `died at ${duration(job.died_s)}`;
  if (job.finished_s !== null) return duration(job.finished_s);
  return job.unfinished === null && !job.finished ? "ran to the end" : "not finished";
}

/** Why a throughput is not measured. */
export function tooFew({ measurement: { completed, needed, window_s }, training }: Job): string {
  const what = training ? "iterations" : "tensors";
  return `${count(completed)} ${what} were completed in ${duration(window_s)}; a measurement needs ${count(needed)}.`;
}
