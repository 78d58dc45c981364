// A chart over time: uPlot, with a heading, a reading at the cursor and a summary for screen readers.
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { age, clock } from "./format";
import { colour, onScheme } from "./palette";
import type { Values } from "./store";

export interface Line {
  /** Empty where the chart has one line. */
  label: string;
  colour: string;
  dash?: number[];
}

/** The axis that a chart's lines are drawn over. */
export interface Across {
  /** Whether uPlot takes its numbers for times of day, and rounds ticks to minutes. */
  day: boolean;
  /** The cursor's place. */
  tell: (x: number) => string;
  ticks: (marks: (number | null)[], step: number) => (string | null)[];
  /** The stretch that is drawn, for the summary. */
  stretch: (from: number, to: number) => string;
  /** The summary ends with the last value. */
  ends: boolean;
}

const TIME_OF_DAY: Across = {
  day: true,
  tell: (t) => clock(t),
  ticks: (marks, step) => marks.map((t) => (t === null ? null : step < 60 ? clock(t) : clock(t).slice(0, 5))),
  stretch: (from, to) => age(to - from),
  ends: true,
};

/** Choices that reports make; the live page has the defaults. */
export interface Extras {
  across?: Across;
  height?: number;
  /** Values are of stretches from their x to the next. */
  stepped?: boolean;
  /** A logarithmic axis across. */
  log?: boolean;
  /** The end of the axis upwards. */
  top?: number;
}

/** The last of ascending `xs` that is not after `x`; the first one where all are. */
export function lastUntil(xs: ArrayLike<number>, x: number): number {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

/** The least and the most value between two x; null where none is known. A stepped line has one that began before, too. */
export function extent(xs: readonly number[], values: Values, from: number, to: number, stepped: boolean): [number, number] | null {
  let least = Infinity;
  let most = -Infinity;
  const first = stepped ? lastUntil(xs, from) : 0;
  for (let i = first; i < xs.length; i++) {
    const v = values[i];
    if (v === null || v === undefined || xs[i] > to || (xs[i] < from && !(stepped && i === first))) continue;
    least = Math.min(least, v);
    most = Math.max(most, v);
  }
  return least > most ? null : [least, most];
}

const HEIGHT = 132;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export class Chart {
  readonly element = document.createElement("figure");
  private readonly reading = document.createElement("span");
  private readonly canvas = document.createElement("div");
  private plot: uPlot | null = null;
  private times: number[] = [];
  private data: Values[] = [];
  private view: [number, number] | null = null;
  private marked: [number, number] | null = null;
  private readonly across: Across;
  private readonly height: number;
  private readonly observer: ResizeObserver;
  private readonly unwatch: () => void;

  constructor(
    private readonly title: string,
    private readonly show: (value: number | null) => string,
    private readonly lines: Line[],
    private readonly sync: uPlot.SyncPubSub,
    private readonly onZoom: (from: number, to: number) => void,
    private readonly extras: Extras = {},
  ) {
    this.across = extras.across ?? TIME_OF_DAY;
    this.height = extras.height ?? HEIGHT;
    this.element.className = "chart";
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.textContent = title;
    this.reading.className = "reading";
    caption.append(name, this.reading);
    this.canvas.className = "plot";
    this.canvas.setAttribute("role", "img");
    this.element.append(caption, this.canvas);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
    this.unwatch = onScheme(() => this.plot?.redraw(false, true));
  }

  /** Draws samples between two times; reads the arrays again at each call. */
  set(times: number[], data: Values[], from: number, to: number): void {
    this.times = times;
    this.data = data;
    this.view = [from, to];
    this.draw();
  }

  /** Shades a stretch, or nothing. */
  mark(stretch: [number, number] | null): void {
    if (stretch?.[0] === this.marked?.[0] && stretch?.[1] === this.marked?.[1]) return;
    this.marked = stretch;
    this.plot?.redraw(false);
  }

  close(): void {
    this.observer.disconnect();
    this.unwatch();
    this.plot?.destroy();
  }

  private resize(): void {
    const width = this.canvas.clientWidth;
    if (!width) return;
    if (!this.plot) this.draw();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this.height });
  }

  private draw(): void {
    const width = this.canvas.clientWidth;
    if (!width || !this.view) return;
    // uPlot keeps the arrays that it is given, and these grow.
    const data = [this.times.slice(), ...this.data.map((d) => d.slice())] as uPlot.AlignedData;
    const [min, max] = this.view;
    if (!this.plot) this.plot = new uPlot(this.options(width), data, this.canvas);
    else this.plot.setData(data, false);
    this.plot.setScale("x", { min, max });
    this.read(this.under(this.plot));
    this.summarise();
  }

  /** The sample at the cursor: the nearest one, or the one whose step the cursor is in. */
  private under(u: uPlot): number | null {
    const { idx, left } = u.cursor;
    if (idx === null || idx === undefined) return null;
    return this.extras.stepped && left !== undefined && left >= 0 ? lastUntil(this.times, u.posToVal(left, "x")) : idx;
  }

  private read(at: number | null): void {
    if (at === null && !this.across.ends) return void (this.reading.textContent = "");
    const i = at ?? this.times.length - 1;
    const values = this.lines.map(({ label }, k) => `${label} ${this.show(this.data[k]?.[i] ?? null)}`.trim());
    const time = at === null || this.times[at] === undefined ? "" : `${this.across.tell(this.times[at])}   `;
    this.reading.textContent = time + values.join("   ");
  }

  private summarise(): void {
    const [from, to] = this.view ?? [0, 0];
    const parts = this.lines.map(({ label }, k) => {
      const extremes = extent(this.times, this.data[k] ?? [], from, to, this.extras.stepped ?? false);
      if (!extremes) return `${label} nothing is known yet`.trim();
      const reach = `${label} from ${this.show(extremes[0])} to ${this.show(extremes[1])}`.trim();
      return this.across.ends ? `${reach}, now ${this.show(this.data[k][this.data[k].length - 1] ?? null)}` : reach;
    });
    const text = `${this.title}, ${this.across.stretch(from, to)}: ${parts.join("; ")}.`;
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
  }

  private shade(u: uPlot): void {
    if (!this.marked) return;
    const [from, to] = this.marked.map((x) => u.valToPos(x, "x", true));
    u.ctx.save();
    u.ctx.fillStyle = colour("accent");
    u.ctx.globalAlpha = 0.2;
    u.ctx.fillRect(from, u.bbox.top, Math.max(2, to - from), u.bbox.height);
    u.ctx.restore();
  }

  private options(width: number): uPlot.Options {
    const axis = {
      stroke: () => colour("quiet"),
      grid: { stroke: () => colour("line"), width: 1 },
      ticks: { show: false },
      font: FONT,
    };
    return {
      width,
      height: this.height,
      // The last tick of a report is at the end, with its text around it.
      padding: [6, this.across.day ? 8 : 26, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: this.sync.key },
        drag: { x: true, y: false, setScale: false },
        points: { size: 5 },
        ...(this.extras.stepped ? { dataIdx: (_u: uPlot, _series: number, _nearest: number, x: number) => lastUntil(this.times, x) } : {}),
      },
      scales: {
        // uPlot would go to the next powers of 10 on a logarithmic axis.
        x: this.extras.log ? { time: false, distr: 3, range: (_u, least, most) => [least, most] } : { time: this.across.day },
        y: { range: (_u, _least, most) => [0, this.extras.top ?? (most > 0 ? most * 1.1 : 1)] },
      },
      axes: [
        {
          ...axis,
          size: 22,
          gap: 4,
          space: 70,
          values: (_u, marks, _i, _s, step) => this.across.ticks(marks, step),
        },
        { ...axis, size: 74, gap: 6, space: 34, values: (_u, marks) => marks.map((v) => this.show(v)) },
      ],
      series: [
        {},
        ...this.lines.map((line) => ({
          stroke: () => colour(line.colour),
          width: 1.5,
          dash: line.dash,
          points: { show: false },
          paths: this.extras.stepped ? uPlot.paths.stepped!({ align: 1 }) : undefined,
        })),
      ],
      hooks: {
        drawAxes: [(u) => this.shade(u)],
        setCursor: [(u) => this.read(this.under(u))],
        setSelect: [
          (u) => {
            if (u.select.width < 4) return;
            this.onZoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
      },
    };
  }
}
