// The map: machines at the left, relays, and the services that sum at the right.
import { html, nothing, render, svg, type SVGTemplateResult, type TemplateResult } from "lit-html";
import { repeat } from "lit-html/directives/repeat.js";
import type { State } from "./contract";
import { at } from "./at";
import { bits, count, ms, percent, ranges, several } from "./format";
import { type Graph, graph, type Link, linkText, load, type MapNode } from "./map-model";
import { Panel } from "./panel";
import type { Store } from "./store";

const MOST_FOCUSED_LINKS = 60;
/** A lateness worth a mark on the map. */
const LATE = 0.005;

interface Place {
  x: number;
  y: number;
  width: number;
  height: number;
}

export class FanMap {
  private readonly canvas = document.createElement("div");
  private width = 0;
  private chosen: string | null = null;
  private readonly panel: Panel;

  constructor(private readonly changed: () => void) {
    this.canvas.className = "map";
    this.panel = new Panel(changed, () => this.choose(null));
    new ResizeObserver(() => {
      if (this.canvas.clientWidth === this.width) return;
      this.width = this.canvas.clientWidth;
      changed();
    }).observe(this.canvas);
  }

  choose(id: string | null): void {
    this.chosen = this.chosen === id ? null : id;
    this.changed();
  }

  template(state: State, store: Store): TemplateResult {
    const drawn = graph(state, store);
    const nodes = Object.values(drawn.columns).flat();
    const chosen = nodes.find((n) => n.id === this.chosen) ?? drawn.links.find((l) => l.id === this.chosen) ?? null;
    // The canvas is no part of this template, so that it keeps its width between draws.
    render(this.draw(drawn), this.canvas);
    return html`<div class="map-and-panel">
      <div>
        <div class="scroll" tabindex="0" role="region" aria-label="Map">${this.canvas}</div>
        ${legend(drawn)}
      </div>
      ${this.panel.template(chosen, drawn, store, state.now)}
    </div>`;
  }

  private touches(link: Link): boolean {
    return this.chosen !== null && [link.id, link.from.id, link.to.id].includes(this.chosen);
  }

  private draw(drawn: Graph): TemplateResult {
    const { places, height } = layout(drawn, this.width);
    const ends = ports(drawn.links, places);
    const focusable = drawn.links.length <= MOST_FOCUSED_LINKS;
    const names = { machine: "Machines", relay: "Relays", service: "Services" };
    const columns = (["machine", "relay", "service"] as const).filter((c) => drawn.columns[c].length);
    return html`<svg class=${focusable ? "links" : "links dense"} width=${this.width} height=${height} role="group" aria-label="Links">
        ${repeat(
          drawn.links,
          (l) => l.id,
          (l) => this.link(l, ends.get(l)!, focusable),
        )}
      </svg>
      ${columns.map((c) => {
        const { x, width } = places.get(drawn.columns[c][0])!;
        const n = drawn.counts[c];
        const box: Place = { x, y: 0, width, height: 20 };
        return html`<h3 class="column" ${at(box)}>${names[c]} <span>${count(n)}</span></h3>`;
      })}
      ${repeat(
        columns.flatMap((c) => drawn.columns[c]),
        (n) => n.id,
        (n) => this.node(n, places.get(n)!),
      )}
      <div class="height" ${at({ x: 0, y: 0, width: 1, height })}></div>`;
  }

  private node(node: MapNode, place: Place): TemplateResult {
    const { count: members, mark, line } = node.kind === "machine" ? machineText(node) : summerText(node);
    const silent = node.summers.some((s) => s.told?.silent != null);
    const full = node.summers.map((s) => load(s.told)).reduce((a: number | null, b) => (b === null ? a : Math.max(a ?? 0, b)), null);
    const low = place.height < 40;
    return html`<button
      type="button"
      class="node ${node.kind} ${silent ? "silent" : ""} ${low ? "low" : ""}"
      aria-pressed=${this.chosen === node.id}
      title=${`${node.title}\n${line}`}
      ${at(place)}
      @click=${() => this.choose(node.id)}
    >
      <span class="top"><b>${node.title}</b>${members > 1 ? html`<i>${count(members)}</i>` : nothing}${mark ? html`<i class="mark">${mark}</i>` : nothing}</span>
      ${low ? nothing : html`<span class="line">${line}</span>`}
      ${full === null
        ? nothing
        : html`<svg class="gauge ${level(full)}" aria-hidden="true">
            <rect width=${`${Math.min(100, full * 100)}%`} height="100%"></rect>
          </svg>`}
    </button>`;
  }

  private link(link: Link, [a, b]: [Point, Point], focusable: boolean): SVGTemplateResult {
    const thick = (bitsPerSecond: number | null): number =>
      bitsPerSecond === null || !link.rate ? 1.5 : 1.5 + 7 * Math.min(1, bitsPerSecond / link.rate);
    const up = thick(link.up);
    const down = thick(link.down);
    const apart = (up + down) / 4 + 1;
    const text = linkText(link);
    const pick = (): void => this.choose(link.id);
    return svg`<g
      class="link ${level(link.load)} ${link.local ? "local" : ""} ${link.certain ? "" : "guess"} ${this.touches(link) ? "touched" : ""}"
      tabindex=${focusable ? 0 : -1} role="button" aria-label=${text}
      aria-pressed=${this.chosen === link.id}
      @click=${pick}
      @keydown=${(e: KeyboardEvent) => {
        if (e.key !== "Enter" && e.key !== " ") return;
        e.preventDefault();
        pick();
      }}>
      <title>${text}</title>
      <path class="hit" d=${curve(a, b, 0)}></path>
      ${
        link.local
          ? svg`<path d=${curve(a, b, 0)} stroke-width="1.5"></path>`
          : svg`<path d=${curve(a, b, -apart)} stroke-width=${up}></path>
            <path d=${curve(a, b, apart)} stroke-width=${down}></path>
            <path class="tip" d=${arrow(b.x, b.y - apart, 1, up)}></path>
            <path class="tip" d=${arrow(a.x, a.y + apart, -1, down)}></path>`
      }
    </g>`;
  }
}

interface Point {
  x: number;
  y: number;
}

/** Moves relays beside the services above them, so that other links pass below. */
function beside(drawn: Graph, places: Map<MapNode, Place>, bottom: number, step: number): void {
  const above = new Map(drawn.links.filter((l) => l.from.kind === "relay").map((l) => [l.from, l.to]));
  const aim = (node: MapNode): number => places.get(above.get(node) ?? node)!.y;
  const relays = [...drawn.columns.relay].sort((a, b) => aim(a) - aim(b));
  let free = -Infinity;
  for (const node of relays) {
    const place = places.get(node)!;
    place.y = Math.max(aim(node), free);
    free = place.y + step;
  }
  let limit = bottom;
  for (const node of relays.reverse()) {
    const place = places.get(node)!;
    place.y = Math.min(place.y, limit);
    limit = place.y - step;
  }
}

/** Where each link leaves and arrives: side by side, in the order of their other ends. */
function ports(links: Link[], places: Map<MapNode, Place>): Map<Link, [Point, Point]> {
  const spread = (at: "from" | "to", other: "from" | "to"): Map<Link, Point> => {
    const sides = new Map<MapNode, Link[]>();
    for (const link of links) sides.set(link[at], [...(sides.get(link[at]) ?? []), link]);
    const points = new Map<Link, Point>();
    for (const [node, side] of sides) {
      const { x, y, width, height } = places.get(node)!;
      side.sort((l, m) => places.get(l[other])!.y - places.get(m[other])!.y);
      side.forEach((link, i) => {
        const part = (i + 0.5) / side.length;
        points.set(link, { x: at === "from" ? x + width : x, y: y + height * (0.1 + 0.8 * part) });
      });
    }
    return points;
  };
  const from = spread("from", "to");
  const to = spread("to", "from");
  return new Map(links.map((link) => [link, [from.get(link)!, to.get(link)!]]));
}

function curve(a: Point, b: Point, shift: number): string {
  const bend = (b.x - a.x) / 2;
  return `M${a.x} ${a.y + shift}C${a.x + bend} ${a.y + shift} ${b.x - bend} ${b.y + shift} ${b.x} ${b.y + shift}`;
}

function arrow(x: number, y: number, way: 1 | -1, thick: number): string {
  const half = thick / 2 + 2;
  return `M${x} ${y}l${-way * 7} ${-half}v${2 * half}z`;
}

/** How full a link is, in words that are classes too. */
export function level(load: number | null): "unknown" | "light" | "busy" | "full" {
  if (load === null) return "unknown";
  if (load < 0.5) return "light";
  return load < 0.85 ? "busy" : "full";
}

function layout(drawn: Graph, width: number): { places: Map<MapNode, Place>; height: number } {
  const columns = [drawn.columns.machine, drawn.columns.relay, drawn.columns.service].filter((c) => c.length);
  const most = Math.max(1, ...columns.map((c) => c.length));
  const low = most > 12;
  const [tall, gap, top] = low ? [24, 6, 26] : [46, 14, 28];
  const height = top + most * (tall + gap);
  const share = columns.length > 2 ? 0.27 : 0.34;
  const wide = Math.min(250, Math.max(90, width * share));
  const places = new Map<MapNode, Place>();
  columns.forEach((column, c) => {
    const x = columns.length > 1 ? ((width - wide) * c) / (columns.length - 1) : 0;
    const room = (height - top) / column.length;
    column.forEach((node, i) => {
      places.set(node, { x: Math.round(x), y: Math.round(top + room * (i + 0.5) - tall / 2), width: wide, height: tall });
    });
  });
  beside(drawn, places, height - tall - gap / 2, tall + gap);
  return { places, height };
}

interface NodeText {
  count: number;
  mark: string;
  line: string;
}

function machineText(node: MapNode): NodeText {
  const jobs = new Map<string, number[]>();
  let late = 0;
  for (const machine of node.machines) {
    for (const part of machine.jobs) {
      const ranks = jobs.get(part.job) ?? [];
      for (const rank of part.ranks) ranks.push(rank);
      jobs.set(part.job, ranks);
      late = Math.max(late, part.late);
    }
  }
  const line = [...jobs].map(([job, ranks]) => `${job}: ${ranges(ranks)}`).join(" · ");
  return { count: node.machines.length, mark: late >= LATE ? `${ms(late)} late` : "", line };
}

function summerText(node: MapNode): NodeText {
  const { length } = node.summers;
  const loads = node.summers.map((s) => load(s.told)).filter((l) => l !== null);
  const mark = loads.length ? percent(Math.max(...loads)) : "";
  if (length > 1) {
    const hosted = node.summers.filter((s) => s.host).length;
    return { count: length, mark, line: hosted ? `${hosted} of ${length} in ranks` : several(length, "service") };
  }
  const { told, host } = node.summers[0];
  if (!told) return { count: 1, mark: "", line: "nothing is told of it" };
  if (told.silent !== null) return { count: 1, mark: "silent", line: told.silent };
  const flow =
    told.received === null && told.sent === null ? "no sample yet" : `in ${bits(told.received)} · out ${bits(told.sent)}`;
  return { count: 1, mark, line: host ? `${flow} · in rank ${host.rank}` : flow };
}

function legend(drawn: Graph): TemplateResult {
  const guess = drawn.links.some((l) => !l.certain);
  const entries: [string, string][] = [
    ["light", "below 50 % of its rate"],
    ["busy", "50 to 85 %"],
    ["full", "above 85 %"],
    ["unknown", "rate not known"],
  ];
  return html`<p class="legend">
    ${entries.map(
      ([name, text]) =>
        html`<span><svg class="key link ${name}" aria-hidden="true"><path d="M0 6H20" stroke-width=${name === "full" ? 6 : name === "busy" ? 4 : 2}></path></svg>${text}</span>`,
    )}
    <span><svg class="key link local" aria-hidden="true"><path d="M0 6H20" stroke-width="1.5"></path></svg>in the machine</span>
    ${guess
      ? html`<span><svg class="key link unknown guess" aria-hidden="true"><path d="M0 6H20" stroke-width="2"></path></svg>way not told</span>`
      : nothing}
    ${drawn.columns.machine.length < drawn.counts.machine
      ? html`<span>${count(drawn.counts.machine)} machines are shown in ${drawn.columns.machine.length} groups.</span>`
      : nothing}
  </p>`;
}
