// The section of the network: its map, the time, the busiest links, and the figures of what is chosen.
import { html, nothing, type TemplateResult } from "lit-html";
import { capital, count, percent, several } from "../format";
import type { Clock } from "./clock";
import { timeText } from "./clock";
import type { Run } from "./contract";
import { type Drawing, Fabric } from "./fabric";
import { Figures, type Subject, summary } from "./figures";
import { type Hit, type Letter, NetworkCanvas } from "./network-canvas";
import type { Places } from "./places";
import { KINDS, type Level, levelAt, type Measure, MEASURES, Readings, stepsOf, type When } from "./readings";
import { table } from "./table";

const BUSIEST = 20;
/** Marks switches that sum. */
const SUMS = "Σ";
const HOST_SLOT = 18;
const SWITCH_SLOT = 38;

/** Choices that hold for both runs side by side. */
export interface Shown {
  measure: Measure;
}

interface Opened {
  title: string;
  members: number[];
}

export class Network {
  private readonly fabric: Fabric;
  private readonly readings: Readings;
  private readonly canvas: NetworkCanvas;
  private readonly figures: Figures;
  private path: Opened[] = [];
  private chosen: Subject | null = null;
  private drawing: Drawing | null = null;
  private letters: Letter[][] = [];
  private drawn = "";
  private sort: Measure | null = null;

  constructor(
    private readonly run: Run,
    private readonly places: Places,
    private readonly clock: Clock,
    private readonly shown: Shown,
    private readonly changed: () => void,
  ) {
    const recording = run.recording!;
    this.fabric = new Fabric(recording);
    this.readings = new Readings(recording);
    this.canvas = new NetworkCanvas({
      resized: changed,
      choose: (hit) => this.click(hit),
      back: () => this.back(),
      tip: (hit) => this.tip(hit),
    });
    this.figures = new Figures(run, this.fabric, this.readings, places, changed, () => this.choose(null));
  }

  private get when(): When {
    return this.clock.when(this.run.recording!.ends);
  }

  private choose(subject: Subject | null): void {
    this.chosen = subject?.id === this.chosen?.id ? null : subject;
    this.changed();
  }

  private back(): void {
    if (this.path.length) this.path.pop();
    this.chosen = null;
    this.changed();
  }

  private click(hit: Hit): void {
    const drawing = this.drawing!;
    if (hit.kind === "bundle") return this.choose(this.bundle(hit.index));
    const group = drawing.groups[hit.index];
    const subject = { id: group.id, title: group.title, ways: this.figures.waysOf(group.members), nodes: group.members };
    if (group.members.length === 1) return this.choose(subject);
    this.path.push({ title: group.title, members: group.members });
    this.chosen = subject;
    this.changed();
  }

  private bundle(index: number): Subject {
    const { groups, bundles } = this.drawing!;
    const { id, a, b, there, back } = bundles[index];
    const [low, high] = [groups[a], groups[b]];
    const up = low.level === high.level ? "there" : "up";
    return {
      id,
      title: `${low.title} – ${high.title}`,
      ways: [
        { name: up, directions: there },
        { name: up === "up" ? "down" : "back", directions: back },
      ],
      nodes: [],
    };
  }

  /** The link of a direction, which may not be on the map now. */
  private link(direction: number): Subject {
    const { nodes, directions } = this.run.recording!;
    const { from, to } = directions[direction];
    return {
      id: `link ${direction >> 1}`,
      title: `${nodes[from].name} – ${nodes[to].name}`,
      ways: [
        { name: `to ${nodes[to].name}`, directions: [direction] },
        { name: `to ${nodes[from].name}`, directions: [direction ^ 1] },
      ],
      nodes: [],
    };
  }

  private tip(hit: Hit): string[] {
    const { measure } = this.shown;
    const { show, title } = KINDS[measure];
    const told = (name: string, directions: number[]): string => {
      const { most, mean } = summary(this.readings, measure, directions, this.when);
      return directions.length > 1 ? `${name}: at most ${show(most)}, ${show(mean)} in the mean of ${count(directions.length)}` : `${name}: ${show(most)}`;
    };
    const subject =
      hit.kind === "bundle"
        ? this.bundle(hit.index)
        : { ...this.drawing!.groups[hit.index], ways: this.figures.waysOf(this.drawing!.groups[hit.index].members) };
    const letters = hit.kind === "group" ? this.lettersOf(this.drawing!.groups[hit.index].members) : [];
    const jobs = letters.filter((l) => l.text !== SUMS);
    return [
      subject.title,
      ...subject.ways.filter((w) => w.directions.length).map((w) => told(`${title} ${w.name}`, w.directions)),
      ...(jobs.length < letters.length ? ["It sums."] : []),
      ...(jobs.length ? [`Jobs ${jobs.map((l) => l.text).join(", ")}`] : []),
    ];
  }

  private lettersOf(members: readonly number[]): Letter[] {
    const found = new Map<number, boolean>();
    for (const n of members) {
      for (const [tenant, { server }] of this.places.at.get(n) ?? []) found.set(tenant, server || (found.get(tenant) ?? false));
    }
    const sums = members.some((n) => this.run.recording!.nodes[n].sums);
    return [
      ...(sums ? [{ text: SUMS, colour: "quiet", server: true }] : []),
      ...[...found]
        .sort((a, b) => a[0] - b[0])
        .map(([tenant, server]) => ({ text: this.places.tenants[tenant].letter, colour: this.places.tenants[tenant].colour, server })),
    ];
  }

  /** Computes the boxes anew only where another group was opened, or another number of them fits. */
  private draw(): void {
    const width = this.canvas.width;
    if (!width) return;
    const room = { hosts: Math.max(8, Math.floor(width / HOST_SLOT)), switches: Math.max(6, Math.floor(width / SWITCH_SLOT)) };
    const opened = this.path[this.path.length - 1] ?? null;
    const key = `${room.hosts} ${room.switches} ${this.path.map((p) => p.title).join("/")}`;
    if (key !== this.drawn || !this.drawing) {
      this.drawn = key;
      this.drawing = this.fabric.drawing(opened?.members ?? null, room);
      this.letters = this.drawing.groups.map((g) => this.lettersOf(g.members));
    }
    const { drawing, readings, when } = this;
    const { measure } = this.shown;
    const largest = readings.largest(measure, when);
    const level = (directions: number[]): Level =>
      levelAt(measure, summary(readings, measure, directions, when).most, largest);
    const bundles = drawing.bundles.map(({ there, back }) => [level(there), level(back)] as [Level, Level]);
    const groups = drawing.groups.map((_, i) => level(drawing.inner[i]));
    drawing.bundles.forEach(({ a, b }, i) => {
      for (const g of [a, b]) for (const l of bundles[i]) if (l.value > groups[g].value) groups[g] = l;
    });
    const shownNodes = drawing.groups.reduce((sum, g) => sum + (g.outside ? 0 : g.members.length), 0);
    this.canvas.set({
      drawing,
      bundles,
      groups,
      letters: this.letters,
      chosen: this.drawnId(drawing),
      label:
        `Network map of ${several(shownNodes, "node")} in ${several(drawing.groups.length, "box", "boxes")}, ` +
        `${KINDS[measure].title.toLowerCase()}, ${timeText(this.run.recording!.ends, when)}. ` +
        "Arrows go from box to box, Enter opens one, Escape goes back. " +
        `The table has the figures of at most ${BUSIEST} links, those with the most: ${KINDS[this.sort ?? measure].title.toLowerCase()}.`,
    });
  }

  /** The box or link on the map of what is chosen: a row of the table may be one of a bundle's links. */
  private drawnId({ bundles }: Drawing): string | null {
    const { chosen } = this;
    if (!chosen?.id.startsWith("link ")) return chosen?.id ?? null;
    const direction = chosen.ways[0].directions[0];
    return bundles.find((b) => b.there.includes(direction) || b.back.includes(direction))?.id ?? null;
  }

  template(): TemplateResult {
    const { ends, nodes } = this.run.recording!;
    const hosts = nodes.filter((n) => n.layer === null).length;
    queueMicrotask(() => this.draw());
    return html`<div class="tools">
        <label>Colour by
          <select @change=${(e: Event) => {
            this.shown.measure = (e.target as HTMLSelectElement).value as Measure;
            this.changed();
          }}>
            ${MEASURES.map((m) => html`<option value=${m} .selected=${m === this.shown.measure}>${KINDS[m].title}</option>`)}
          </select>
        </label>
        ${this.clock.template(ends)}
      </div>
      <nav class="path" aria-label="Opened groups">
        ${this.path.length
          ? html`<button type="button" @click=${() => this.open(0)}>Whole network</button>`
          : html`<span>${several(hosts, "host")} and ${several(nodes.length - hosts, "switch", "switches")}</span>`}
        ${this.path.map((p, i) =>
          i < this.path.length - 1
            ? html`<span>›</span><button type="button" @click=${() => this.open(i + 1)}>${p.title}</button>`
            : html`<span>›</span><b aria-current="location">${p.title}</b>`,
        )}
      </nav>
      <div class="map-and-panel">
        <div>${this.canvas.element} ${this.legend()}</div>
        ${this.figures.template(this.chosen, this.when)}
        <div>${this.busiest()}</div>
      </div>`;
  }

  private open(depth: number): void {
    this.path.length = depth;
    this.chosen = null;
    this.changed();
  }

  private legend(): TemplateResult {
    const { measure } = this.shown;
    const { show, text } = KINDS[measure];
    const largest = this.readings.largest(measure, this.when);
    const [first, second] = stepsOf(measure).map((part) => (measure === "busy" ? percent(part) : show(part * largest)));
    const entries: [string, string, number][] = largest
      ? [
          ["unknown", "0", 1],
          ["light", `below ${first}`, 2],
          ["busy", `to ${second}`, 4],
          ["full", measure === "busy" ? "above" : `to ${show(largest)}`, 6],
        ]
      : [["unknown", "0 everywhere", 1]];
    const { tenants } = this.places;
    return html`<p class="legend" aria-label="Legend">
        <span>${capital(text)}:</span>
        ${entries.map(
          ([name, label, thick]) =>
            html`<span><svg class="key link ${name}" aria-hidden="true"><path d="M0 6H20" stroke-width=${thick}></path></svg>${label}</span>`,
        )}
        <span>Traffic keeps to the right of each link.</span>
        ${this.run.recording!.nodes.some((n) => n.sums) ? html`<span><b class="tenant sums">${SUMS}</b> sums</span>` : nothing}
      </p>
      ${tenants.length
        ? html`<p class="legend">
            ${tenants.slice(0, 26).map((t) => html`<span><b class="tenant ${t.colour}">${t.letter}</b> ${t.name}</span>`)}
            ${tenants.length > 26 ? html`<span>and ${several(tenants.length - 26, "more job")}</span>` : nothing}
            ${tenants.some((t) => t.servers) ? html`<span>Round: workers. Square: a server too.</span>` : nothing}
          </p>`
        : nothing}`;
  }

  private busiest(): TemplateResult {
    const { nodes, directions } = this.run.recording!;
    const { readings, when } = this;
    const sort = this.sort ?? this.shown.measure;
    const rows = readings.top(sort, when, BUSIEST);
    return html`${rows.length
      ? table(
          `Links with the most: ${KINDS[sort].title.toLowerCase()}, ${timeText(this.run.recording!.ends, when)}`,
          [
            {
              head: "Link",
              cell: (d: number) =>
                html`<button type="button" class="pick" aria-pressed=${this.chosen?.id === `link ${d >> 1}`} @click=${() => this.choose(this.link(d))}>
                  ${nodes[directions[d].from].name} → ${nodes[directions[d].to].name}
                </button>`,
            },
            ...MEASURES.map((m) => ({
              head: html`<button type="button" class="sort" aria-pressed=${m === sort} @click=${() => {
                this.sort = m;
                this.changed();
              }}>${KINDS[m].title}</button>`,
              number: true,
              cell: (d: number) => KINDS[m].show(readings.value(m, d, when)),
            })),
          ],
          rows,
          { tall: true },
        )
      : html`<p class="hint">
          No link has any: ${KINDS[sort].title.toLowerCase()}, ${timeText(this.run.recording!.ends, when)}.
          ${MEASURES.map((m) => html`<button type="button" aria-pressed=${m === sort} @click=${() => {
            this.sort = m;
            this.changed();
          }}>${KINDS[m].title}</button> `)}
        </p>`}`;
  }
}
