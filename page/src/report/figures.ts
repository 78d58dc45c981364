// The panel beside the map: what is chosen, in figures and over time.
import { html, nothing, type TemplateResult } from "lit-html";
import uPlot from "uplot";
import { Chart } from "../chart";
import { bits, count, duration, several } from "../format";
import { facts } from "../panel";
import { ofAll, steps, VIRTUAL_TIME } from "./axes";
import type { Run } from "./contract";
import type { Fabric } from "./fabric";
import type { Places } from "./places";
import { KINDS, type Measure, MEASURES, type Readings, type When } from "./readings";
import { table } from "./table";
import { DASHES, key } from "./times";

/** A link, a node or a group, as the panel shows it. */
export interface Subject {
  id: string;
  title: string;
  /** Its directions, by the way they go, with a name for each way. */
  ways: { name: string; directions: number[] }[];
  /** Empty for links. */
  nodes: number[];
}

const MOST_MEMBERS = 12;
let panels = 0;

export class Figures {
  private charts: { measure: Measure; chart: Chart }[] = [];
  private charted = "";
  private zoom: [number, number] | null = null;

  constructor(
    private readonly run: Run,
    private readonly fabric: Fabric,
    private readonly readings: Readings,
    private readonly places: Places,
    private readonly changed: () => void,
    private readonly close: () => void,
  ) {}

  template(subject: Subject | null, when: When): TemplateResult {
    this.chart(subject, when);
    return html`<aside class="panel" aria-label="Figures of what is chosen on the map">
      <p class="sr" aria-live="polite">${subject ? subject.title : "Nothing is chosen."}</p>
      ${subject
        ? html`<h3 title=${subject.title}>${subject.title}</h3>
            <button type="button" class="close" @click=${this.close} aria-label="Close the figures">×</button>
            ${this.about(subject)} ${this.values(subject, when)}
            <p class="legend">${subject.ways.filter((w) => w.directions.length).map((w, i) => html`<span>${key(i)}${w.name}</span>`)}</p>
            <div class="charts">${this.charts.map(({ chart }) => chart.element)}</div>
            ${this.zoom
              ? html`<p class="hint"><button type="button" @click=${() => this.zoomTo(null)}>Whole run</button></p>`
              : nothing}`
        : html`<h3>Nothing is chosen</h3>
            <p class="hint">Choose a box or a link on the map, or a row of the table, for its figures. A box of many opens.</p>`}
    </aside>`;
  }

  private zoomTo(zoom: [number, number] | null): void {
    this.zoom = zoom;
    this.changed();
  }

  private about({ ways, nodes }: Subject): TemplateResult {
    const { directions } = this.run.recording!;
    const all = ways.flatMap((w) => w.directions);
    const rates = [...new Set(all.map((d) => directions[d].rate))];
    const delays = [...new Set(all.map((d) => directions[d].delay))];
    const range = (list: number[], show: (x: number) => string): string =>
      list.length > 1 ? `${show(Math.min(...list))} to ${show(Math.max(...list))}` : list.length ? show(list[0]) : "–";
    return html`${facts([
      nodes.length > 1 ? ["Nodes", count(nodes.length)] : null,
      ["Links", count(new Set(all.map((d) => d >> 1)).size)],
      ["Rate", range(rates, bits)],
      ["Delay", range(delays, duration)],
      nodes.length === 1 && this.run.recording!.nodes[nodes[0]].layer !== null ? ["Aggregators", this.sums(nodes[0])] : null,
    ])}${this.tenants(nodes)}`;
  }

  private sums(node: number): string {
    const { name, programmable, sums } = this.run.recording!.nodes[node];
    const told = this.run.result.switches.find((s) => s.name === name);
    if (told) return `at most ${count(told.in_use_max)} of ${count(told.aggregators)} in use`;
    return sums ? "it sums" : programmable ? "none, though it is programmable" : "none";
  }

  private tenants(nodes: number[]): TemplateResult | typeof nothing {
    const { tenants, at } = this.places;
    const found = new Map<number, { workers: number; servers: number }>();
    for (const n of nodes) {
      for (const [tenant, { worker, server }] of at.get(n) ?? []) {
        const sum = found.get(tenant) ?? { workers: 0, servers: 0 };
        sum.workers += Number(worker);
        sum.servers += Number(server);
        found.set(tenant, sum);
      }
    }
    if (!found.size) return nothing;
    const list = [...found].sort((a, b) => a[0] - b[0]);
    return html`<ul class="hints">
      ${list.slice(0, MOST_MEMBERS).map(([tenant, { workers, servers }]) => {
        const parts = [
          ...(workers ? [nodes.length > 1 ? `workers on ${several(workers, "host")}` : "workers"] : []),
          ...(servers ? [nodes.length > 1 ? `servers on ${several(servers, "host")}` : "a server"] : []),
        ];
        return html`<li><b>${tenants[tenant].letter}</b> ${tenants[tenant].name}: ${parts.join(", ")}</li>`;
      })}
      ${list.length > MOST_MEMBERS ? html`<li>${several(list.length - MOST_MEMBERS, "more job")}</li>` : nothing}
    </ul>`;
  }

  private values({ ways }: Subject, when: When): TemplateResult {
    const there = ways.filter((w) => w.directions.length);
    return table(
      when === null ? "Over the whole run" : "In the chosen interval",
      [
        { head: "", cell: (m: Measure) => html`<span title=${KINDS[m].text}>${KINDS[m].title}</span>` },
        ...there.map(({ name, directions }) => ({
          head: directions.length > 1 ? html`${name}<br />most (mean)` : name,
          number: true,
          cell: (m: Measure) => {
            const { most, mean } = summary(this.readings, m, directions, when);
            return directions.length > 1 ? `${KINDS[m].show(most)} (${KINDS[m].show(mean)})` : KINDS[m].show(most);
          },
        })),
      ],
      MEASURES,
    );
  }

  private chart(subject: Subject | null, when: When): void {
    const { ends } = this.run.recording!;
    if (this.charted !== (subject?.id ?? "")) {
      for (const { chart } of this.charts) chart.close();
      this.charts = [];
      this.charted = subject?.id ?? "";
      if (subject) this.charts = this.make(subject);
    }
    const zoom = this.zoom ?? [0, ends[ends.length - 1] ?? 1];
    for (const { measure, chart } of this.charts) {
      const lines = subject!.ways.filter((w) => w.directions.length).map((w) => steps(ends, this.over(measure, w.directions)));
      chart.set(lines[0]?.at ?? [], lines.map((l) => l.values), zoom[0], zoom[1]);
      chart.mark(when === null ? null : [when ? ends[when - 1] : 0, ends[when]]);
    }
  }

  private make({ ways }: Subject): { measure: Measure; chart: Chart }[] {
    const sync = uPlot.sync(`figures${panels++}`);
    const there = ways.filter((w) => w.directions.length);
    const carried = MEASURES.filter((m) => m === "busy" || there.some((w) => w.directions.some((d) => this.run.recording!.directions[d][m])));
    return carried.map((measure) => {
      const { title } = KINDS[measure];
      const show = measure === "busy" ? ofAll : KINDS[measure].show;
      const lines = there.map(({ name }, i) => ({
        label: name,
        colour: `series${i}`,
        dash: DASHES[i],
      }));
      const many = there.some((w) => w.directions.length > 1);
      const chart = new Chart(many ? `${title}, the most` : title, show, lines, sync, (from, to) => this.zoomTo([from, to]), {
        across: VIRTUAL_TIME,
        height: 104,
        stepped: true,
      });
      return { measure, chart };
    });
  }

  /** The most of the directions, in each interval. */
  private over(measure: Measure, directions: number[]): number[] {
    const all = this.run.recording!.ends.map(() => 0);
    for (const d of directions) this.readings.series(measure, d).forEach((v, i) => (all[i] = Math.max(all[i], v)));
    return all;
  }

  /** The directions between these nodes and all others. */
  waysOf(nodes: number[]): Subject["ways"] {
    const inside = new Set(nodes);
    const { directions } = this.run.recording!;
    const out: number[] = [];
    const into: number[] = [];
    for (const n of nodes) {
      for (const d of this.fabric.touching[n]) {
        const { from, to } = directions[d];
        if (from === n && !inside.has(to)) out.push(d);
        if (to === n && !inside.has(from)) into.push(d);
      }
    }
    return [
      { name: "sent", directions: out },
      { name: "received", directions: into },
    ];
  }
}

/** The most and the mean of some directions. */
export function summary(readings: Readings, measure: Measure, directions: readonly number[], when: When): { most: number; mean: number } {
  let most = 0;
  let sum = 0;
  for (const d of directions) {
    const value = readings.value(measure, d, when);
    most = Math.max(most, value);
    sum += value;
  }
  return { most, mean: directions.length ? sum / directions.length : 0 };
}
