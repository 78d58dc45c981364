// Draws the timeline: a row a rank, on a canvas that zooms and pans.
import { html, nothing, type TemplateResult } from "lit-html";
import { AXIS, TimeCanvas } from "./canvas";
import type { Job, Sum } from "./contract";
import { bytes, capital, clock, ms, ranges, rankList, several } from "./format";
import { colour } from "./palette";
import { lastSteps, type Picture, picture, type Span, spanAt } from "./timeline";
import { download } from "./trace";
import type { View } from "./view";

const LANE = 14;
const ROW_GAP = 6;
const MOST_ROWS = 40;

export class Timeline extends TimeCanvas {
  private job: Job | null = null;
  private sums: readonly Sum[] = [];
  private drawn: Picture = picture([]);
  private rows: number[] = [];
  /** Null while it follows the last steps. */
  private held: View | null = null;

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
    return html`<div class="tools" role="group" aria-label="Timeline">
        ${this.buttons()}
        <button type="button" aria-pressed=${!this.held} @click=${() => this.release()}>Follow</button>
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

  protected bounds(): View {
    return { from: this.drawn.from, to: this.drawn.to };
  }

  protected view(): View {
    if (this.held) return this.held;
    const from = Math.max(this.drawn.from, lastSteps(this.sums, this.job?.sums_per_step ?? null));
    return { from, to: this.drawn.to };
  }

  protected hold(view: View): void {
    this.held = view;
    this.changed();
  }

  protected release(): void {
    this.held = null;
    this.changed();
  }

  protected height(): number {
    return AXIS + this.rows.length * this.rowHeight() + 2;
  }

  protected names(): string[] {
    return this.rows.map((r) => this.label(r));
  }

  protected rowHeight(): number {
    return this.drawn.lanes * LANE + ROW_GAP;
  }

  protected drawRow(pen: CanvasRenderingContext2D, row: number, top: number, view: View, toX: (time: number) => number): void {
    for (const span of this.drawn.rows.get(this.rows[row])!) {
      if (span.ended >= view.from && span.from <= view.to) drawSpan(pen, span, top + ROW_GAP / 2, toX);
    }
  }

  protected tipAt(row: number, time: number, y: number): string[] | null {
    const lane = Math.floor((y - ROW_GAP / 2) / LANE);
    const span = spanAt(this.drawn.rows.get(this.rows[row])!, time, lane);
    return span ? tipLines(span, this.job) : null;
  }

  protected summary(): string {
    const view = this.view();
    return (
      `${several(this.rows.length, "row")} over ${ms(view.to - view.from)}, ${several(this.sums.length, "collective")}. ` +
      "The table of lateness has the same in figures."
    );
  }

  /** Milliseconds count from the beginning of the view, which the first tick tells as a time. */
  protected tickText(from: number, after: number): string {
    return after === 0 ? clock(from, 3) : `+${ms(after)}`;
  }

  private label(rank: number): string {
    // A row is a machine where its ranks sum first.
    const row = this.job?.ranks.find((r) => r.rank === rank);
    return `${ranges(row?.ranks.length ? row.ranks : [rank])}  ${row?.name ?? ""}`.trim();
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
  const row = job?.ranks.find((r) => r.rank === span.rank);
  return [
    `${capital(rankList(row?.ranks.length ? row.ranks : [span.rank]))}${row?.name ? `, ${row.name}` : ""}`,
    `${sum.collective} ${sum.number}, ${bytes(sum.bytes)} of ${sum.dtype}`,
    `computing ${ms(span.began - span.from)}`,
    `waiting ${ms(Math.max(0, span.last - span.began))}`,
    `summing ${ms(span.ended - Math.max(span.last, span.began))}`,
  ];
}
