// How long things took: cumulative distributions and a table.
import { html, nothing, type TemplateResult } from "lit-html";
import uPlot from "uplot";
import { Chart, lastUntil } from "../chart";
import { count, duration, quantile } from "../format";
import { HOW_LONG, ofAll } from "./axes";
import type { Distribution, Durations, Run } from "./contract";
import { COLOURS } from "./places";
import { table } from "./table";

export const DASHES: (number[] | undefined)[] = [undefined, [7, 3], [2, 3], [9, 3, 2, 3], [12, 4]];
const MOST_LINES = 8;
/** Times that spread wider are drawn over a logarithmic axis. */
const WIDE = 20;
/** The part of the axis before the first time, and after the last one. */
const MARGIN = 0.02;

export interface Entry {
  label: string;
  times: Distribution;
  /** The figures of the run, where it has those of the same things. */
  told: Durations | null;
}

/** A drawn set: the values of each line at all points, which hold up to the next one. */
export interface Curves {
  at: number[];
  lines: number[][];
  log: boolean;
}

/** The part that took no longer than `time`. Quantiles that are all the times are counted; between fewer ones the part is estimated. */
export function reached({ quantiles, count }: Pick<Distribution, "quantiles" | "count">, time: number): number {
  const n = quantiles.length;
  if (!n || time < quantiles[0]) return 0;
  if (time >= quantiles[n - 1]) return 1;
  const at = lastUntil(quantiles, time);
  if (n === count) return (at + 1) / n;
  const [a, b] = [quantiles[at], quantiles[at + 1]];
  return (at + (b > a ? (time - a) / (b - a) : 0)) / (n - 1);
}

/** Points lie a little before the first time and after the last one, so that the first and the last step are seen. */
export function curves(distributions: readonly Distribution[]): Curves {
  const times = [...new Set(distributions.flatMap((d) => d.quantiles))].sort((a, b) => a - b);
  if (!times.length) return { at: [], lines: distributions.map(() => []), log: false };
  const [least, most] = [times[0], times[times.length - 1]];
  const log = least > 0 && most / least > WIDE;
  const margin = most > least ? (most - least) * MARGIN : most / 2 || 1e-9;
  const ratio = (most / least) ** MARGIN;
  const [before, after] = log ? [least / ratio, most * ratio] : [Math.max(0, least - margin), most + margin];
  const at = [...(before < least ? [before] : []), ...times, after];
  return { at, lines: distributions.map((d) => at.map((t) => reached(d, t))), log };
}

/** The entries of a run; figures of the result are by name, as the recording names its distributions. */
export function entriesOf(run: Run, prefix: string): Entry[] {
  return (run.recording?.times ?? []).map((times) => ({
    label: prefix ? `${prefix}: ${times.of}` : times.of,
    times,
    told: toldOf(run, times),
  }));
}

/** Things of both runs stand beside each other. */
export function paired(ours: Entry[], others: Entry[]): Entry[] {
  const left = [...others];
  const both = ours.flatMap((entry) => {
    const at = left.findIndex((o) => o.times.of === entry.times.of);
    return at < 0 ? [entry] : [entry, ...left.splice(at, 1)];
  });
  return [...both, ...left];
}

function toldOf({ result }: Run, { of, count }: Distribution): Durations | null {
  const all = [
    ...result.jobs.map((j): [string, Durations] => [j.name, j.tensor_times]),
    ...result.parameter_servers.map((p): [string, Durations] => [p.name, p.flow_times]),
    ...result.background.flatMap((f): [string, Durations][] => (f.times ? [[`${f.from} to ${f.to}`, f.times]] : [])),
  ];
  const found = all.filter(([name, told]) => of.endsWith(` ${name}`) && told.count === count);
  return found.length === 1 ? found[0][1] : null;
}

/** "tensors of a" and "tensors of b" are of one kind. */
export const kindOf = (times: Distribution): string => times.of.split(" ")[0];

let charts = 0;

export class Times {
  private readonly entries: Entry[];
  /** Two runs have a colour for each kind of thing, and a dash for each run. */
  private readonly two: boolean;
  private readonly kinds: { name: string; chart: Chart; drawn: Entry[]; curves: Curves; all: number }[];
  /** Whether the charts have to be drawn anew. */
  private stale = true;
  private readonly zooms = new Map<string, [number, number]>();

  constructor(
    runs: readonly Run[],
    private readonly changed: () => void,
  ) {
    this.two = runs.length > 1;
    this.entries = this.two ? paired(entriesOf(runs[0], "this"), entriesOf(runs[1], "other")) : entriesOf(runs[0], "");
    const kinds = [...new Set(this.entries.map((e) => kindOf(e.times)))];
    this.kinds = kinds.map((name) => {
      const all = this.entries.filter((e) => kindOf(e.times) === name);
      const drawn = all.filter((e) => e.times.quantiles.length > 1).slice(0, MOST_LINES);
      const drawing = curves(drawn.map((e) => e.times));
      const lines = drawn.map((_, i) => ({ label: drawn.length > 1 ? String(i + 1) : "", ...this.style(drawn, i) }));
      const chart = new Chart(
        `${name}: part that took no longer`,
        ofAll,
        lines,
        uPlot.sync(`times${charts++}`),
        (from, to) => {
          this.zooms.set(name, [from, to]);
          this.stale = true;
          this.changed();
        },
        { across: HOW_LONG, height: 190, log: drawing.log, top: 1.02, stepped: true },
      );
      return { name, chart, drawn, curves: drawing, all: all.length };
    });
  }

  get empty(): boolean {
    return !this.entries.length;
  }

  private place(drawn: Entry[], i: number): [number, number] {
    if (!this.two) return [i, i];
    const names = [...new Set(drawn.map((e) => e.times.of))];
    return [names.indexOf(drawn[i].times.of), drawn[i].label.startsWith("this") ? 0 : 1];
  }

  private style(drawn: Entry[], i: number): { colour: string; dash: number[] | undefined } {
    const [colour, dash] = this.place(drawn, i);
    return { colour: `series${colour % COLOURS}`, dash: DASHES[dash % DASHES.length] };
  }

  private keyOf(drawn: Entry[], i: number): TemplateResult {
    return key(...this.place(drawn, i));
  }

  close(): void {
    for (const { chart } of this.kinds) chart.close();
  }

  template(): TemplateResult {
    if (this.stale) for (const { name, chart, curves } of this.kinds) {
      const { at, lines } = curves;
      if (!at.length) continue;
      const [from, to] = this.zooms.get(name) ?? [at[0], at[at.length - 1]];
      queueMicrotask(() => chart.set(at, lines, from, to));
    }
    this.stale = false;
    const figure = (head: string, value: (e: Entry) => number | null) => ({
      head,
      number: true,
      cell: (e: Entry) => (e.times.count ? duration(value(e)) : "–"),
    });
    const at = (e: Entry, q: number): number | null => {
      const { quantiles, count } = e.times;
      // Quantiles that lie further apart than the wanted one is from the end know nothing of it.
      if (quantiles.length < count && (1 - q) * quantiles.length < 1 && q < 1) return null;
      return quantile(quantiles, q);
    };
    return html`<div class="charts times">
        ${this.kinds
          .filter((k) => k.drawn.length)
          .map(
            ({ name, chart, drawn, all, curves }) =>
              html`<div>
                ${chart.element}
                <p class="legend">
                  ${drawn.map((e, i) => html`<span>${this.keyOf(drawn, i)}${drawn.length > 1 ? html`<b>${i + 1}</b> ` : nothing}${e.label}</span>`)}
                  ${all > drawn.length ? html`<span>The first ${drawn.length} of ${all} are drawn.</span>` : nothing}
                  ${curves.log ? html`<span>The axis is logarithmic.</span>` : nothing}
                  ${this.zooms.has(name)
                    ? html`<button type="button" @click=${() => {
                        this.zooms.delete(name);
                        this.stale = true;
                        this.changed();
                      }}>All times</button>`
                    : nothing}
                </p>
              </div>`,
          )}
      </div>
      ${table(
        "How long things took",
        [
          { head: "", cell: (e: Entry) => e.label },
          { head: "Ended", number: true, cell: (e: Entry) => count(e.times.count) },
          { head: "Unfinished", number: true, cell: (e: Entry) => count(e.times.unfinished) },
          figure("Mean", (e) => e.told?.mean_s ?? null),
          figure("50 %", (e) => at(e, 0.5)),
          figure("95 %", (e) => e.told?.p95_s ?? at(e, 0.95)),
          figure("99 %", (e) => e.told?.p99_s ?? at(e, 0.99)),
          figure("99.9 %", (e) => e.told?.p999_s ?? at(e, 0.999)),
          figure("Longest", (e) => e.told?.max_s ?? at(e, 1)),
        ],
        this.entries,
        { tall: this.entries.length > 12, hidden: true },
      )}
      <p class="hint">Each column names the part that took no longer. Unfinished ones are in no figure: the longest may be among them.</p>`;
  }
}

/** The line of a legend. */
export function key(colour: number, dash = colour): TemplateResult {
  return html`<svg class="key line series${colour % COLOURS}" aria-hidden="true">
    <path d="M0 6H20" stroke-dasharray=${DASHES[dash % DASHES.length]?.map((d) => d * 0.7).join(" ") ?? "none"}></path>
  </svg>`;
}
