// Draws a job's tensors: a row for all ranks, and a row for each rank.
import { html, nothing, type TemplateResult } from "lit-html";
import { AXIS, TimeCanvas } from "../canvas";
import type { Node, RecordedJob } from "./contract";
import { duration, several } from "../format";
import { colour } from "../palette";
import type { View } from "../view";
import { type Bar, barAt, firstAt, Gantt, ranksIn, type Row, told } from "./gantt";

const LANE = 11;
const COMPUTING = 5;
const GAP = 7;
const MOST_ROWS = 40;
/** No zoom is closer than a nanosecond. */
const LEAST = 1e-9;

export class GanttView extends TimeCanvas {
  private readonly gantt: Gantt;
  private readonly allRanks: number;
  private ranks: number[];
  private wrong = false;
  private held: View | null = null;
  /** Whether the picture changed: the page draws for many other reasons, and each step of the slider is one. */
  private stale = true;

  constructor(
    job: RecordedJob,
    private readonly nodes: Node[],
    changed: () => void,
  ) {
    super(changed, LEAST);
    this.gantt = new Gantt(job);
    this.allRanks = job.workers.length;
    this.ranks = this.firstRanks();
  }

  template(): TemplateResult {
    if (this.stale) queueMicrotask(() => this.draw());
    this.stale = false;
    const { left_out, computing, asynchronous } = this.gantt.job;
    const left = [
      left_out.tensors ? several(left_out.tensors, "tensor") : "",
      left_out.spans ? `${several(left_out.spans, "tensor")} of ranks` : "",
      left_out.computing ? `${several(left_out.computing, "stretch", "stretches")} of computing` : "",
    ].filter(Boolean);
    return html`<div class="tools" role="group" aria-label="Tensors over time">
        ${this.buttons()}
        ${this.allRanks > MOST_ROWS
          ? html`<label
              >Ranks
              <input
                type="text"
                class="ranks"
                placeholder="0-39"
                aria-invalid=${this.wrong}
                aria-label="Ranks to draw, such as 0-7, 12"
                @change=${(e: Event) => this.choose((e.target as HTMLInputElement).value)}
              />
            </label>`
          : nothing}
        <span class="legend">
          ${computing.length ? html`<span><i class="swatch computing"></i>computing</span>` : nothing}
          ${asynchronous ? nothing : html`<span><i class="swatch waiting"></i>all ranks wait for the last one</span>`}
          <span><i class="swatch summing"></i>tensor, until its sum is there</span>
        </span>
      </div>
      ${this.box}
      <p class="hint">
        After a click the wheel zooms, and so do + and −. Arrows pan.
        ${this.wrong ? html`<b>Ranks are numbers below ${this.allRanks}, such as 0-7, 12.</b>` : nothing}
        ${this.allRanks > this.ranks.length ? `${this.ranks.length} of ${several(this.allRanks, "rank")} are drawn.` : nothing}
        ${left.length ? html`The recording left out ${left.join(", ")}, the last ones in time.` : nothing}
      </p>`;
  }

  /** The first ones of which anything is recorded. */
  private firstRanks(): number[] {
    const all = Array.from({ length: this.allRanks }, (_, i) => i);
    const there = all.filter((r) => this.gantt.has(r));
    return (there.length ? there : all).slice(0, MOST_ROWS);
  }

  private choose(text: string): void {
    const ranks = text.trim() ? ranksIn(text, this.allRanks, MOST_ROWS) : this.firstRanks();
    this.wrong = ranks === null;
    if (ranks) this.ranks = ranks;
    this.redraw();
  }

  protected bounds(): View {
    return { from: this.gantt.from, to: this.gantt.to };
  }

  protected view(): View {
    return this.held ?? this.bounds();
  }

  protected hold(view: View): void {
    this.held = view;
    this.redraw();
  }

  protected release(): void {
    this.held = null;
    this.redraw();
  }

  private redraw(): void {
    this.stale = true;
    this.changed();
  }

  private row(index: number): Row {
    return index ? this.gantt.row(this.ranks[index - 1]) : this.gantt.all;
  }

  protected names(): string[] {
    const { workers } = this.gantt.job;
    return ["all ranks", ...this.ranks.map((r) => `${r}  ${this.nodes[workers[r]].name}`)];
  }

  protected rowHeight(index: number): number {
    const { lanes, computing } = this.row(index);
    return lanes * LANE + (computing.length ? COMPUTING : 0) + GAP;
  }

  protected height(): number {
    let height = AXIS + 2;
    for (let i = 0; i <= this.ranks.length; i++) height += this.rowHeight(i);
    return height;
  }

  protected drawRow(pen: CanvasRenderingContext2D, index: number, top: number, view: View, toX: (time: number) => number): void {
    const row = this.row(index);
    let y = top + GAP / 2;
    if (index === 0) {
      pen.fillStyle = colour("line");
      pen.fillRect(0, top + this.rowHeight(0) - 1, pen.canvas.width, 1);
    }
    if (row.computing.length) {
      pen.fillStyle = colour("computing");
      for (const [from, to] of row.computing) {
        if (to < view.from || from > view.to) continue;
        pen.fillRect(toX(from), y, Math.max(0.5, toX(to) - toX(from)), 3);
      }
      y += COMPUTING;
    }
    // Bars that fall into a pixel that is drawn already are passed over.
    const drawn: number[] = [];
    for (let i = firstAt(row, view.from); i < row.bars.length && row.bars[i].from <= view.to; i++) {
      const bar = row.bars[i];
      const end = toX(bar.to);
      if (bar.to < view.from || end - (drawn[bar.lane] ?? -1) < 0.5) continue;
      drawn[bar.lane] = end;
      drawBar(pen, bar, y + bar.lane * LANE, toX, view);
    }
  }

  protected tipAt(index: number, time: number, y: number): string[] | null {
    const row = this.row(index);
    const above = GAP / 2 + (row.computing.length ? COMPUTING : 0);
    const bar = y < above ? null : barAt(row, time, Math.floor((y - above) / LANE));
    if (!bar) {
      const stretch = row.computing.find(([from, to]) => time >= from && time <= to);
      return stretch ? [`computing ${duration(stretch[1] - stretch[0])}`, from(stretch[0], stretch[1])] : null;
    }
    const perStep = this.gantt.job.tensors_per_step;
    const name = `tensor ${bar.number}${perStep > 1 ? `, step ${this.gantt.step(bar.number)}` : ""}`;
    if (index) return [`rank ${this.ranks[index - 1]}, ${name}`, `took ${duration(bar.to - bar.from)}`, from(bar.from, bar.to)];
    const parts = this.gantt.job.asynchronous
      ? [`took ${duration(bar.to - bar.from)}`]
      : [`waiting for the last rank ${duration(bar.waited - bar.from)}`, `summing ${duration(Math.max(0, bar.to - bar.waited))}`];
    return [
      `${name}, all ranks`,
      ...parts,
      `the first rank had its sum at ${duration(bar.first)}`,
      from(bar.from, bar.to),
    ];
  }

  protected summary(): string {
    const { from, to } = this.view();
    return told(this.gantt, this.ranks, from, to);
  }

  protected tickText(from: number, after: number): string {
    return after === 0 ? duration(from) : `+${duration(after)}`;
  }
}

const from = (a: number, b: number): string => `${duration(a)} to ${duration(b)}`;

/** Heights differ, so that the parts are told apart without colour. */
function drawBar(pen: CanvasRenderingContext2D, bar: Bar, y: number, toX: (t: number) => number, view: View): void {
  const part = (from: number, to: number, height: number, name: string): void => {
    const x = toX(Math.max(from, view.from));
    const width = toX(Math.min(to, view.to)) - x;
    if (width < 0) return;
    pen.fillStyle = colour(name);
    pen.fillRect(x, y + (LANE - 1 - height) / 2, Math.max(width - 0.5, 0.5), height);
  };
  const waited = Math.min(bar.waited, bar.to);
  if (waited > bar.from) part(bar.from, waited, 5, "waiting");
  if (bar.to > waited) part(waited, bar.to, LANE - 1, "summing");
}
