// Charts of the last hour that zoom together.
import { html, type TemplateResult } from "lit-html";
import uPlot from "uplot";
import { Chart, type Line } from "./chart";
import { clock } from "./format";
import type { Values } from "./store";

export interface Plotted {
  title: string;
  show: (value: number | null) => string;
  lines: Line[];
}

const SPANS: [string, number][] = [
  ["5 min", 300],
  ["15 min", 900],
  ["1 h", 3600],
];
let groups = 0;

export class Charts {
  private readonly charts: Chart[];
  private span = 900;
  private zoom: [number, number] | null = null;

  constructor(
    what: Plotted[],
    private readonly changed: () => void,
  ) {
    const sync = uPlot.sync(`charts${groups++}`);
    this.charts = what.map(
      ({ title, show, lines }) =>
        new Chart(title, show, lines, sync, (from, to) => {
          this.zoom = [from, to];
          this.changed();
        }),
    );
  }

  /** `data` has the lines of each chart. */
  set(times: number[], data: Values[][], now: number): void {
    // A young history fills the charts, from two minutes on.
    const first = Math.min(times.length ? times[0] : now, now - 120);
    const [from, to] = this.zoom ?? [Math.max(now - this.span, first), now];
    this.charts.forEach((chart, i) => chart.set(times, data[i], from, to));
  }

  template(): TemplateResult {
    const { zoom } = this;
    return html`<div class="tools" role="group" aria-label="Time that the charts show">
        ${SPANS.map(
          ([label, seconds]) =>
            html`<button
              type="button"
              aria-pressed=${!zoom && this.span === seconds}
              @click=${() => {
                this.zoom = null;
                this.span = seconds;
                this.changed();
              }}
            >
              ${label}
            </button>`,
        )}
        <span class="hint"
          >${zoom ? `${clock(zoom[0])} to ${clock(zoom[1])}` : "Drag in a chart to zoom."}</span
        >
      </div>
      <div class="charts">${this.charts.map((chart) => chart.element)}</div>`;
  }

  close(): void {
    for (const chart of this.charts) chart.close();
  }
}
