// The section of a sweep: a figure over a parameter, and the points as a table.
import { html, nothing, svg, type SVGTemplateResult, type TemplateResult } from "lit-html";
import { count, digits, several } from "../format";
import { tick } from "../view";
import type { Point, Run, Sweep, SweptRow } from "./contract";
import { COLOURS } from "./places";
import { linesOf, type Mark, named, scaleOf, shortNames, type SweptLine, valueOf } from "./sweep";
import { table } from "./table";
import { DASHES, key } from "./times";

const HEIGHT = 260;
const LEFT = 58;
const BOTTOM = 40;
const TOP = 10;
const RIGHT = 20;
const MOST_LINES = 12;

export class SweepView {
  private figure: string;
  private parameter: string;
  private readonly box = document.createElement("div");
  private width = 0;
  private readonly short: (parameter: string) => string;

  constructor(
    private readonly sweep: Sweep,
    private readonly runs: readonly Run[],
    private readonly pick: (run: number) => void,
    private readonly changed: () => void,
  ) {
    const has = (f: string): boolean => sweep.points.some((p) => p.rows.some((r) => r.figures[f]));
    this.figure = (sweep.figures.find((f) => has(f.name)) ?? sweep.figures[0])?.name ?? "";
    const parameters = Object.keys(sweep.sweep);
    this.short = shortNames(parameters);
    // The parameter with the most values gives the longest lines.
    this.parameter = [...parameters].sort((a, b) => sweep.sweep[b].length - sweep.sweep[a].length)[0] ?? "";
    this.box.className = "measure";
    new ResizeObserver(() => {
      if (this.box.clientWidth === this.width) return;
      this.width = this.box.clientWidth;
      changed();
    }).observe(this.box);
  }

  /** What stands above the chosen figure's column. */
  private label(): string {
    return this.sweep.figures.find((f) => f.name === this.figure)?.label ?? "";
  }

  template(shown: number): TemplateResult {
    const { sweep, points, figures } = this.sweep;
    const scale = scaleOf(points.map((p) => valueOf(p, this.parameter)));
    const lines = linesOf(this.sweep, this.figure, this.parameter, scale);
    const select = (label: string, options: [string, string][], chosen: string, choose: (value: string) => void): TemplateResult =>
      html`<label>${label}
        <select @change=${(e: Event) => {
          choose((e.target as HTMLSelectElement).value);
          this.changed();
        }}>${options.map(([value, text]) => html`<option value=${value} .selected=${value === chosen}>${text}</option>`)}</select>
      </label>`;
    const drawn = lines.slice(0, MOST_LINES);
    return html`<div class="tools">
        ${select("Figure", figures.filter((f) => points.some((p) => p.rows.some((r) => r.figures[f.name]))).map((f): [string, string] => [f.name, f.label]), this.figure, (f) => (this.figure = f))}
        ${this.parameter ? select("over", Object.keys(sweep).map((p) => [p, p]), this.parameter, (p) => (this.parameter = p)) : nothing}
        <span class="hint">
          ${this.parameter ? `${several(points.length, "point")}, ${several(this.sweep.seeds.length, "seed")} each` : several(this.sweep.seeds.length, "seed")}
        </span>
      </div>
      <div class="sweep">${this.box}${this.width ? this.chart(drawn, scale, shown) : nothing}</div>
      <p class="legend">
        ${drawn.map((l, i) => html`<span>${key(i)}${l.label}</span>`)}
        ${lines.length > drawn.length ? html`<span>The first ${drawn.length} of ${lines.length} lines are drawn.</span>` : nothing}
        ${this.sweep.seeds.length > 1 ? html`<span>Marks are medians over seeds; whiskers are their intervals.</span>` : nothing}
        ${scale.log ? html`<span>The axis is logarithmic.</span>` : nothing}
      </p>
      ${this.points(shown)}`;
  }

  private chart(lines: SweptLine[], scale: ReturnType<typeof scaleOf>, shown: number): TemplateResult {
    const marks = lines.flatMap((l) => l.marks);
    if (!marks.length) return html`<p class="empty">No point has this figure.</p>`;
    const top = Math.max(...marks.map((m) => Math.max(m.median, m.high))) * 1.06 || 1;
    const wide = Math.max(60, this.width - LEFT - RIGHT);
    const tall = HEIGHT - TOP - BOTTOM;
    const inset = scale.numeric ? 12 : 0;
    const x = (value: string): number => LEFT + inset + (scale.at.get(value) ?? 0) * (wide - 2 * inset);
    const y = (value: number): number => TOP + tall * (1 - Math.max(0, value) / top);
    const step = tick(top, 5);
    const ticks = Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
    // Texts that would touch the last one are left out.
    let free = -Infinity;
    const labels = scale.values.filter((v) => {
      if (x(v) - v.length * 3.2 < free) return false;
      free = x(v) + v.length * 3.2 + 8;
      return true;
    });
    return html`<svg width=${this.width} height=${HEIGHT} role="group" aria-label=${this.parameter ? `${this.label()} over ${this.parameter}` : this.label()}>
      ${ticks.map(
        (t) => svg`<line class="grid" x1=${LEFT} x2=${LEFT + wide} y1=${y(t)} y2=${y(t)}></line>
          <text x=${LEFT - 8} y=${y(t) + 4} text-anchor="end">${digits(t)}</text>`,
      )}
      ${labels.map((v) => svg`<text x=${x(v)} y=${HEIGHT - BOTTOM + 18} text-anchor="middle">${v}</text>`)}
      <text x=${LEFT + wide / 2} y=${HEIGHT - 6} text-anchor="middle">${this.parameter && this.short(this.parameter)}</text>
      ${lines.map((l, i) => this.line(l, i, x, y, shown))}
    </svg>`;
  }

  private line(line: SweptLine, i: number, x: (v: string) => number, y: (v: number) => number, shown: number): SVGTemplateResult {
    const path = line.marks.map((m, k) => `${k ? "L" : "M"}${x(m.value)} ${y(m.median)}`).join("");
    return svg`<g class=${`series${i % COLOURS}`}>
      <path class="line" d=${path} stroke-dasharray=${DASHES[i % DASHES.length]?.join(" ") ?? "none"}></path>
      ${line.marks.map((m) => this.mark(m, line.label, x, y, shown))}
    </g>`;
  }

  private mark(m: Mark, label: string, x: (v: string) => number, y: (v: number) => number, shown: number): SVGTemplateResult {
    const run = runOf(m.point);
    const unit = this.label();
    const at = this.parameter ? `, ${this.short(this.parameter)} ${m.value}` : "";
    const text = `${label}${at}: ${spread({ median: m.median, interval: [m.low, m.high] })}, ${unit}${m.row.enough ? "" : "; not measured"}`;
    const choose = (): void => {
      if (run !== null) this.pick(run);
    };
    return svg`<g class="mark" role=${run === null ? "img" : "button"} tabindex=${run === null ? -1 : 0}
      aria-label=${text} aria-pressed=${run === null ? nothing : holds(m.point, shown)}
      @click=${choose}
      @keydown=${(e: KeyboardEvent) => {
        if (e.key !== "Enter" && e.key !== " ") return;
        e.preventDefault();
        choose();
      }}>
      <title>${text}</title>
      ${m.high > m.low ? svg`<path class="whisker" d=${`M${x(m.value)} ${y(m.low)}V${y(m.high)}M${x(m.value) - 4} ${y(m.low)}h8M${x(m.value) - 4} ${y(m.high)}h8`}></path>` : nothing}
      <circle class="point" cx=${x(m.value)} cy=${y(m.median)} r=${m.row.enough ? 4 : 2.5}></circle>
    </g>`;
  }

  private points(shown: number): TemplateResult {
    const { sweep, points, figures } = this.sweep;
    const there = figures.filter((f) => points.some((p) => p.rows.some((r) => r.figures[f.name])));
    const rows = points.flatMap((point): Entry[] => (point.rows.length ? named(point).map((r) => ({ point, ...r })) : [{ point, name: "–", row: null }]));
    const parameters = Object.keys(sweep);
    const seeded = this.sweep.seeds.length > 1;
    /** The first column of a row shows the run of its point. */
    const picks = ({ point }: Entry, text: string, label: string): unknown => {
      const run = runOf(point);
      if (run === null) return text;
      return html`<button type="button" class="pick" title="Show its run" aria-label=${label} aria-pressed=${holds(point, shown)} @click=${() => this.pick(run)}>${text}</button>`;
    };
    return table<Entry>(
      `${parameters.length ? "Points of the sweep" : "Runs with several seeds"}${seeded ? ": medians over seeds, and their intervals" : ""}`,
      [
        ...parameters.map((p, i) => ({
          head: html`<span title=${p}>${this.short(p)}</span>`,
          cell: (entry: Entry) => (i ? valueOf(entry.point, p) : picks(entry, valueOf(entry.point, p), this.placeOf(entry.point))),
        })),
        { head: "Row", cell: (entry) => (parameters.length ? entry.name : picks(entry, entry.row ? entry.name : "run", `Run of ${entry.name}`)) },
        seeded ? { head: "Seed shown", cell: ({ point }) => this.seeds(point, shown) } : null,
        ...there.map((f) => ({
          head: f.label,
          number: true,
          cell: ({ row }: Entry) => spread(row?.figures[f.name]),
        })),
        { head: "Note", cell: ({ point, row }) => this.note(point, row?.enough ?? true) },
      ],
      rows,
      { tall: rows.length > 12 },
    );
  }

  /** "tensors 3, rate 10Gbit". */
  private placeOf(point: Point): string {
    return Object.keys(this.sweep.sweep).map((p) => `${this.short(p)} ${valueOf(point, p)}`).join(", ");
  }

  /** Seeds of runs in this file are exact; numbers above 2^53 are rounded when the sweep is read. */
  private seedOf({ seed, run }: Point["runs"][number]): string {
    return run === null ? String(seed) : this.runs[run].seed;
  }

  /** The runs of a point to choose from, by their seeds. */
  private seeds(point: Point, shown: number): TemplateResult | string {
    const there = point.runs.filter((r) => r.run !== null);
    if (!there.length) return "–";
    const label = ["Seed of the run to show", this.placeOf(point)].filter(Boolean).join(", ");
    return html`<select aria-label=${label} @change=${(e: Event) => {
      const value = (e.target as HTMLSelectElement).value;
      if (value !== "") this.pick(Number(value));
    }}>
      <option value="" .selected=${!holds(point, shown)}>none</option>
      ${there.map((r) => html`<option value=${r.run} .selected=${r.run === shown}>${this.seedOf(r)}</option>`)}
    </select>`;
  }

  private note(point: Point, enough: boolean): string {
    const wrong = point.runs.filter((r) => r.wrong !== null);
    const parts = [
      ...(enough ? [] : ["not measured"]),
      ...(wrong.length ? [`${count(wrong.length)} of ${several(point.runs.length, "run")} did not end: seed ${this.seedOf(wrong[0])}, ${wrong[0].wrong}`] : []),
    ];
    return parts.join("; ");
  }
}

interface Entry {
  point: Point;
  name: string;
  row: SweptRow | null;
}

/** "12.3 (11.9 to 12.8)"; one seed has no interval. */
export function spread(figure: SweptRow["figures"][string] | undefined): string {
  if (!figure) return "–";
  const { median, interval: [low, high] } = figure;
  return digits(median) + (high > low ? ` (${digits(low)} to ${digits(high)})` : "");
}

/** The first run of a point that is in the file. */
const runOf = (point: Point): number | null => point.runs.find((r) => r.run !== null)?.run ?? null;
const holds = (point: Point, shown: number): boolean => point.runs.some((r) => r.run === shown);
