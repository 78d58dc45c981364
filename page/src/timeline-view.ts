// Draws the timeline: a row a rank, on a canvas that zooms and pans.
import { html, nothing, type TemplateResult } from "lit-html";
import type { Job, Sum } from "./contract";
import { bytes, clock, ms, several } from "./format";
import { colour, onScheme } from "./palette";
import { lastSteps, panned, type Picture, picture, type Span, spanAt, tick, type View, zoomed } from "./timeline";
import { download } from "./trace";

const AXIS = 20;
const LANE = 14;
const ROW_GAP = 6;
const MOST_ROWS = 40;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export class Timeline {
  private readonly canvas = document.createElement("canvas");
  private readonly tip = document.createElement("div");
  private readonly box = document.createElement("div");
  private job: Job | null = null;
  private sums: readonly Sum[] = [];
  private drawn: Picture = picture([]);
  private rows: number[] = [];
  private left = 0;
  private pointer: { x: number; y: number } | null = null;
  /** Null while it follows the last steps. */
  private held: View | null = null;
  private readonly observer: ResizeObserver;
  private readonly unwatch: () => void;

  constructor(private readonly changed: () => void) {
    this.box.className = "timeline";
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.box.append(this.canvas, this.tip);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.box);
    this.unwatch = onScheme(() => this.draw());
    this.listen();
  }

  close(): void {
    this.observer.disconnect();
    this.unwatch();
  }

  /** `ranks`: those that may be shown, the most important first. */
  template(job: Job, ranks: readonly number[]): TemplateResult {
    this.job = job;
    if (!this.held) this.sums = job.sums;
    const there = new Set(this.sums.flatMap((sum) => sum.ranks.map((r) => r[0])));
    const shown = ranks.filter((r) => there.has(r));
    this.rows = shown.slice(0, MOST_ROWS).sort((a, b) => a - b);
    this.drawn = picture(this.sums, new Set(this.rows));
    queueMicrotask(() => this.draw());
    if (!there.size) return html`<p class="empty">No collective has ended yet.</p>`;
    const button = (label: string, text: string, act: () => void): TemplateResult =>
      html`<button type="button" aria-label=${label} title=${label} @click=${act}>${text}</button>`;
    return html`<div class="tools" role="group" aria-label="Timeline">
        ${button("Zoom in", "+", () => this.zoom(0.5, 0.5))} ${button("Zoom out", "−", () => this.zoom(2, 0.5))}
        ${button("Earlier", "←", () => this.pan(-0.25))} ${button("Later", "→", () => this.pan(0.25))}
        <button type="button" @click=${() => this.hold(this.bounds())}>All</button>
        <button type="button" aria-pressed=${!this.held} @click=${() => this.follow()}>Follow</button>
        <button type="button" @click=${() => download(this.shownJob(job))} title="Opens in Perfetto and chrome://tracing">
          Download trace
        </button>
        <span class="legend">
          <span><i class="swatch computing"></i>computing</span>
          <span><i class="swatch waiting"></i>waiting for the last rank</span>
          <span><i class="swatch summing"></i>summing</span>
        </span>
      </div>
      ${this.box}
      <p class="hint">
        ${this.held ? "The picture stands still. Follow shows the last steps again." : "The picture follows the last steps."}
        After a click the wheel zooms, and so do + and −. Arrows pan.
        ${shown.length > this.rows.length
          ? html`The ${this.rows.length} latest of ${several(shown.length, "row")} are drawn.`
          : nothing}
      </p>`;
  }

  private shownJob(job: Job): Job {
    return { ...job, sums: [...this.sums] };
  }

  private bounds(): View {
    return { from: this.drawn.from, to: this.drawn.to };
  }

  private view(): View {
    if (this.held) return this.held;
    const from = Math.max(this.drawn.from, lastSteps(this.sums, this.job?.sums_per_step ?? null));
    return { from, to: this.drawn.to };
  }

  private hold(view: View): void {
    this.held = view;
    this.changed();
  }

  private follow(): void {
    this.held = null;
    this.changed();
  }

  private zoom(factor: number, at: number): void {
    this.hold(zoomed(this.view(), factor, at, this.bounds()));
  }

  private pan(part: number): void {
    const view = this.view();
    this.hold(panned(view, (view.to - view.from) * part, this.bounds()));
  }

  private listen(): void {
    const { canvas } = this;
    const part = (e: MouseEvent): number =>
      Math.min(1, Math.max(0, (e.offsetX - this.left) / Math.max(1, canvas.clientWidth - this.left)));
    canvas.addEventListener(
      "wheel",
      (e) => {
        if (document.activeElement !== canvas && !e.ctrlKey) return;
        e.preventDefault();
        if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) this.pan(e.deltaX / 800);
        else this.zoom(Math.exp(Math.max(-1, Math.min(1, e.deltaY / 400))), part(e));
      },
      { passive: false },
    );
    let dragged: { x: number; view: View } | null = null;
    canvas.addEventListener("pointerdown", (e) => {
      if (e.button !== 0) return;
      dragged = { x: e.offsetX, view: this.view() };
      canvas.setPointerCapture(e.pointerId);
    });
    const end = (): void => void (dragged = null);
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("pointermove", (e) => {
      if (dragged && Math.abs(e.offsetX - dragged.x) > 2) {
        const { view } = dragged;
        const seconds = ((dragged.x - e.offsetX) / Math.max(1, canvas.clientWidth - this.left)) * (view.to - view.from);
        this.hold(panned(view, seconds, this.bounds()));
        this.pointer = null;
      } else if (!dragged) this.pointer = { x: e.offsetX, y: e.offsetY };
      this.point();
    });
    canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.point();
    });
    canvas.addEventListener("keydown", (e) => {
      const acts: { [key: string]: () => void } = {
        "+": () => this.zoom(0.5, 0.5),
        "=": () => this.zoom(0.5, 0.5),
        "-": () => this.zoom(2, 0.5),
        ArrowLeft: () => this.pan(-0.2),
        ArrowRight: () => this.pan(0.2),
        "0": () => this.hold(this.bounds()),
        Escape: () => this.follow(),
      };
      if (!acts[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      acts[e.key]();
    });
  }

  private get rowHeight(): number {
    return this.drawn.lanes * LANE + ROW_GAP;
  }

  /** Tells what is under the pointer, also when the picture moves below it. */
  private point(): void {
    this.tip.hidden = !this.pointer;
    if (!this.pointer) return;
    const { x, y } = this.pointer;
    const view = this.view();
    const row = Math.floor((y - AXIS) / this.rowHeight);
    const rank = this.rows[row];
    const time = view.from + ((x - this.left) / (this.canvas.clientWidth - this.left)) * (view.to - view.from);
    const lane = Math.floor((y - AXIS - row * this.rowHeight - ROW_GAP / 2) / LANE);
    const span = rank === undefined || x < this.left ? null : spanAt(this.drawn.rows.get(rank)!, time, lane);
    this.tip.hidden = !span;
    if (!span) return;
    this.tip.replaceChildren(
      ...tipLines(span, this.job).map((text) => {
        const line = document.createElement("div");
        line.textContent = text;
        return line;
      }),
    );
    const room = this.box.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.transform = `translate(${Math.max(0, Math.min(x + 12, room))}px, ${AXIS + (row + 1) * this.rowHeight}px)`;
  }

  private draw(): void {
    const width = this.box.clientWidth;
    if (!width) return;
    const height = AXIS + this.rows.length * this.rowHeight + 2;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    if (!pen) return;
    pen.scale(scale, scale);
    pen.font = FONT;
    pen.textBaseline = "middle";
    const names = this.rows.map((r) => this.label(r));
    this.left = Math.min(width * 0.28, 12 + Math.max(40, ...names.map((n) => pen.measureText(n).width)));
    const view = this.view();
    const toX = (time: number): number => this.left + ((time - view.from) / (view.to - view.from)) * (width - this.left);
    this.drawAxis(pen, view, toX, width, height);
    this.rows.forEach((rank, i) => {
      const y = AXIS + i * this.rowHeight;
      pen.fillStyle = colour("text");
      pen.save();
      pen.beginPath();
      pen.rect(0, y, this.left - 6, this.rowHeight);
      pen.clip();
      pen.fillText(names[i], 4, y + this.rowHeight / 2);
      pen.restore();
      pen.save();
      pen.beginPath();
      pen.rect(this.left, y, width - this.left, this.rowHeight);
      pen.clip();
      for (const span of this.drawn.rows.get(rank)!) {
        if (span.ended >= view.from && span.from <= view.to) drawSpan(pen, span, y + ROW_GAP / 2, toX);
      }
      pen.restore();
    });
    this.point();
    this.canvas.setAttribute(
      "aria-label",
      `${several(this.rows.length, "rank")} over ${ms(view.to - view.from)}, ${several(this.sums.length, "collective")}. ` +
        "The table of lateness has the same in figures.",
    );
  }

  private label(rank: number): string {
    const name = this.job?.ranks.find((r) => r.rank === rank)?.name ?? "";
    return `${rank}  ${name}`.trim();
  }

  private drawAxis(pen: CanvasRenderingContext2D, view: View, toX: (t: number) => number, width: number, height: number): void {
    const span = view.to - view.from;
    const step = tick(span, (width - this.left) / 90);
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    // Milliseconds count from the beginning of the view, which the first tick tells as a time.
    for (let k = 0; k * step <= span; k++) {
      const x = Math.round(toX(view.from + k * step)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillStyle = colour("quiet");
      const text = k === 0 ? clock(view.from, 3) : `+${ms(k * step)}`;
      if (x + pen.measureText(text).width + 4 < width) pen.fillText(text, x + 3, AXIS / 2);
    }
  }
}

/** Heights differ, so that the three are told apart without colour. */
function drawSpan(pen: CanvasRenderingContext2D, span: Span, top: number, toX: (t: number) => number): void {
  const y = top + span.lane * LANE;
  const bar = (from: number, to: number, height: number, name: string): void => {
    const x = toX(from);
    const width = toX(to) - x;
    if (width <= 0) return;
    pen.fillStyle = colour(name);
    pen.fillRect(x, y + (LANE - height) / 2, Math.max(width - 0.5, 0.5), height);
  };
  bar(span.from, span.began, 3, "computing");
  bar(span.began, span.last, 7, "waiting");
  bar(Math.max(span.began, span.last), span.ended, 12, "summing");
}

function tipLines(span: Span, job: Job | null): string[] {
  const { sum } = span;
  const name = job?.ranks.find((r) => r.rank === span.rank)?.name;
  return [
    `Rank ${span.rank}${name ? `, ${name}` : ""}`,
    `${sum.collective} ${sum.number}, ${bytes(sum.bytes)} of ${sum.dtype}`,
    `computing ${ms(span.began - span.from)}`,
    `waiting ${ms(Math.max(0, span.last - span.began))}`,
    `summing ${ms(span.ended - Math.max(span.last, span.began))}`,
  ];
}
