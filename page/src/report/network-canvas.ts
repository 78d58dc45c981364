// Draws a network on a canvas: hosts at the bottom, switches above, and both directions of each link.
import { FONT } from "../canvas";
import { colour, onScheme } from "../palette";
import type { Drawing, Group } from "./fabric";
import { arrow, type Box, distance, type Line, portsOf, stroke } from "./lines";
import type { Level } from "./readings";

export interface Letter {
  text: string;
  colour: string;
  server: boolean;
}

export interface Scene {
  drawing: Drawing;
  /** By bundle: there and back. */
  bundles: [Level, Level][];
  /** By group: the most of its links. */
  groups: Level[];
  letters: Letter[][];
  chosen: string | null;
  label: string;
}

export type Hit = { kind: "group"; index: number } | { kind: "bundle"; index: number };

/** The section that the canvas is in. */
export interface Owner {
  resized(): void;
  choose(hit: Hit): void;
  back(): void;
  tip(hit: Hit): string[];
}

const ROW = 116;
const TOP = 18;
const TALL = 34;
const LETTERS = 18;
/** Nearer than this a link is under the pointer. */
const NEAR = 6;

export class NetworkCanvas {
  readonly element = document.createElement("div");
  private readonly canvas = document.createElement("canvas");
  private readonly tip = document.createElement("div");
  private readonly said = document.createElement("p");
  private scene: Scene | null = null;
  private boxes: Box[] = [];
  /** Two places across for each bundle: at its lower box, and at its upper one. */
  private ports: Float64Array = new Float64Array(0);
  private under: Hit | null = null;
  /** The box that keys are at. */
  private at: string | null = null;
  private frame = 0;

  constructor(private readonly owner: Owner) {
    this.element.className = "network";
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.said.className = "sr";
    this.said.setAttribute("aria-live", "polite");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "network map");
    this.element.append(this.canvas, this.tip, this.said);
    let width = 0;
    new ResizeObserver(() => {
      if (this.element.clientWidth === width) return;
      width = this.element.clientWidth;
      owner.resized();
    }).observe(this.element);
    onScheme(() => this.draw());
    this.listen();
  }

  get width(): number {
    return this.element.clientWidth;
  }

  set(scene: Scene): void {
    if (scene.drawing !== this.scene?.drawing) {
      this.under = null;
      this.tip.hidden = true;
      this.boxes = [];
    }
    this.scene = scene;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  private layout(width: number): number {
    const { groups, rows } = this.scene!.drawing;
    const arcs = this.scene!.drawing.bundles.some((b) => groups[b.a].level === groups[b.b].level) ? 26 : 0;
    const height = TOP + arcs + (rows.length - 1) * ROW + TALL + LETTERS + 2;
    this.boxes = groups.map(() => ({ x: 0, y: 0, width: 0, height: 0 }));
    rows.forEach((row, i) => {
      const slot = width / row.length;
      const wide = Math.max(5, Math.min(row.length > 60 ? 14 : 96, slot * 0.82));
      const tall = TALL;
      row.forEach((g, k) => {
        this.boxes[g] = {
          x: slot * (k + 0.5) - wide / 2,
          y: TOP + arcs + (rows.length - 1 - i) * ROW,
          width: wide,
          height: tall,
        };
      });
    });
    this.ports = portsOf(this.scene!.drawing, this.boxes);
    return height;
  }

  private draw(): void {
    const width = this.width;
    const { scene } = this;
    if (!width || !scene) return;
    const height = this.layout(width);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.canvas.setAttribute("aria-label", scene.label);
    const pen = this.canvas.getContext("2d");
    if (!pen) return;
    pen.scale(scale, scale);
    pen.font = FONT;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const { bundles, groups } = scene.drawing;
    // The fullest links are drawn last, above the others.
    const order = bundles.map((_, i) => i).sort((i, k) => most(scene.bundles[i]) - most(scene.bundles[k]));
    const dense = bundles.length > 150;
    for (const i of order) if (!this.stressed(i)) this.drawBundle(pen, i, dense ? 0.5 : 1, dense);
    for (const i of order) if (this.stressed(i)) this.drawBundle(pen, i, 1, false);
    pen.globalAlpha = 1;
    groups.forEach((group, i) => this.drawGroup(pen, group, i));
  }

  /** Whether it is chosen, or at a box that is chosen or pointed at. */
  private stressed(i: number): boolean {
    const { drawing, chosen } = this.scene!;
    const bundle = drawing.bundles[i];
    const { under } = this;
    if (bundle.id === chosen || (under?.kind === "bundle" && under.index === i)) return true;
    const ends = [bundle.a, bundle.b];
    return ends.some((g) => drawing.groups[g].id === chosen || (under?.kind === "group" && under.index === g));
  }

  private drawBundle(pen: CanvasRenderingContext2D, i: number, alpha: number, thin: boolean): void {
    const { drawing, bundles, chosen } = this.scene!;
    const bundle = drawing.bundles[i];
    const line = this.line(i);
    if (bundle.id === chosen) {
      pen.globalAlpha = 0.25;
      stroke(pen, line, 0, 18, colour("accent"));
    }
    // Traffic keeps to the right, as on a road.
    bundles[i].forEach((level, way) => {
      const thick = (level.step === "unknown" ? 1 : 1.2 + 5 * level.part) * (thin ? 0.5 : 1);
      const apart = (way ? -1 : 1) * (thin ? 1 : 3.4);
      pen.globalAlpha = level.step === "unknown" ? alpha * 0.5 : alpha;
      stroke(pen, line, apart, thick, colour(level.step));
      if (!thin) arrow(pen, line, apart, way === 0, thick, colour(level.step));
    });
  }

  /** From `a` to `b`; with a bend where both are in one row and others are between. */
  private line(i: number): Line {
    const { a, b } = this.scene!.drawing.bundles[i];
    const [p, q] = [this.boxes[a], this.boxes[b]];
    if (p.y === q.y) {
      const [l, r] = p.x < q.x ? [p, q] : [q, p];
      const row = this.scene!.drawing.rows.find((row) => row.includes(a))!;
      const near = Math.abs(row.indexOf(a) - row.indexOf(b)) === 1;
      const from = near ? { x: l.x + l.width, y: l.y + l.height / 2 } : { x: l.x + l.width / 2, y: l.y };
      const to = near ? { x: r.x, y: r.y + r.height / 2 } : { x: r.x + r.width / 2, y: r.y };
      const bend = near ? 0 : -48;
      return l === p ? { from, to, bend } : { from: to, to: from, bend };
    }
    return { from: { x: this.ports[2 * i], y: p.y }, to: { x: this.ports[2 * i + 1], y: q.y + q.height }, bend: 0 };
  }

  private drawGroup(pen: CanvasRenderingContext2D, group: Group, i: number): void {
    const { x, y, width, height } = this.boxes[i];
    const { groups, letters, chosen } = this.scene!;
    const many = group.members.length > 1;
    pen.globalAlpha = group.outside ? 0.75 : 1;
    pen.fillStyle = colour("card");
    pen.strokeStyle = group.id === chosen ? colour("accent") : colour("edge");
    pen.lineWidth = group.id === chosen ? 2.5 : 1;
    // A box of many looks like a pile.
    if (many && width > 12) box(pen, { x: x + 3, y: y - 3, width, height });
    box(pen, { x, y, width, height });
    pen.fillStyle = colour(groups[i].step);
    pen.fillRect(x + 1, y + height - 5, (width - 2) * groups[i].part, 4);
    pen.fillStyle = colour("text");
    const lines = fitting(pen, namesOf(group), width - 4);
    lines.forEach((text, k) => pen.fillText(text, x + width / 2, y + height / 2 - 2 + (k - (lines.length - 1) / 2) * 12));
    if (this.at === group.id && document.activeElement === this.canvas) {
      pen.strokeStyle = colour("accent");
      pen.lineWidth = 2;
      pen.strokeRect(x - 4, y - 6, width + 10, height + 10);
    }
    const shown = letters[i];
    if (!shown.length) return;
    // Below hosts; above switches, whose links leave below.
    const at = group.level === 0 ? y + height + 10 : y - 9;
    const room = Math.max(1, Math.floor((width + 6) / 13));
    if (shown.length > room) {
      pen.fillStyle = colour("quiet");
      const [text = ""] = fitting(pen, [[`${shown.length} jobs`], [`${shown.length} j`], ["+"]], width + 6);
      pen.fillText(text, x + width / 2, at + 0.5);
      return;
    }
    let left = x + width / 2 - (shown.length * 13) / 2 + 6.5;
    for (const l of shown) {
      pen.fillStyle = colour(l.colour);
      if (l.server) box(pen, { x: left - 6, y: at - 6, width: 12, height: 12 }, true);
      else disc(pen, left, at, Math.min(6, Math.max(3, width / 2)));
      pen.fillStyle = colour("on-series");
      if (width >= 10) pen.fillText(fitting(pen, [[l.text]], 12)[0] ?? "", left, at + 0.5);
      left += 13;
    }
  }

  private hit(x: number, y: number): Hit | null {
    const { scene } = this;
    if (!scene || !this.boxes.length) return null;
    const index = this.boxes.findIndex(
      (b) => x >= b.x - 2 && x <= b.x + b.width + 2 && y >= b.y - 4 && y <= b.y + b.height + LETTERS / 2,
    );
    if (index >= 0) return { kind: "group", index };
    let best: Hit | null = null;
    let least = NEAR;
    scene.drawing.bundles.forEach((_, i) => {
      const far = distance(this.line(i), x, y);
      if (far >= least) return;
      least = far;
      best = { kind: "bundle", index: i };
    });
    return best;
  }

  private listen(): void {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (e) => {
      const hit = this.hit(e.offsetX, e.offsetY);
      const same = hit?.kind === this.under?.kind && hit?.index === this.under?.index;
      this.under = hit;
      canvas.classList.toggle("pointing", hit !== null);
      if (!same) this.draw();
      this.showTip(hit, e.offsetX, e.offsetY);
    });
    canvas.addEventListener("pointerleave", () => {
      this.under = null;
      this.tip.hidden = true;
      this.draw();
    });
    canvas.addEventListener("click", (e) => {
      const hit = this.hit(e.offsetX, e.offsetY);
      if (hit) this.owner.choose(hit);
    });
    canvas.addEventListener("focus", () => this.draw());
    canvas.addEventListener("blur", () => this.draw());
    canvas.addEventListener("keydown", (e) => this.key(e));
  }

  private showTip(hit: Hit | null, x: number, y: number): void {
    this.tip.hidden = !hit;
    if (!hit) return;
    this.tip.replaceChildren(
      ...this.owner.tip(hit).map((text) => {
        const line = document.createElement("div");
        line.textContent = text;
        return line;
      }),
    );
    const room = this.width - this.tip.offsetWidth - 4;
    this.tip.style.transform = `translate(${Math.max(0, Math.min(x + 12, room))}px, ${y + 16}px)`;
  }

  /** Arrows go from box to box; Enter chooses; Escape goes back. */
  private key(e: KeyboardEvent): void {
    const { scene } = this;
    if (!scene || e.ctrlKey || e.metaKey || e.altKey) return;
    const { groups, rows } = scene.drawing;
    if (e.key === "Escape") {
      e.preventDefault();
      return this.owner.back();
    }
    const index = groups.findIndex((g) => g.id === this.at);
    const row = Math.max(0, rows.findIndex((r) => r.includes(index)));
    const place = rows[row].indexOf(index);
    if ((e.key === "Enter" || e.key === " ") && index >= 0) {
      e.preventDefault();
      return this.owner.choose({ kind: "group", index });
    }
    const moves: { [key: string]: [number, number] } = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [1, 0],
      ArrowDown: [-1, 0],
    };
    const move = moves[e.key];
    if (!move) return;
    e.preventDefault();
    const to = rows[Math.max(0, Math.min(rows.length - 1, index < 0 ? row : row + move[0]))];
    const kept = move[0] ? Math.floor(((place + 0.5) / rows[row].length) * to.length) : place + move[1];
    const next = to[index < 0 ? 0 : Math.max(0, Math.min(to.length - 1, kept))];
    this.at = groups[next].id;
    this.said.textContent = this.owner.tip({ kind: "group", index: next }).join(", ");
    this.draw();
  }
}

const most = (levels: [Level, Level]): number => Math.max(levels[0].part, levels[1].part);

function box(pen: CanvasRenderingContext2D, { x, y, width, height }: Box, filled = false): void {
  pen.beginPath();
  pen.rect(Math.round(x) + 0.5, Math.round(y) + 0.5, Math.round(width) - 1, Math.round(height) - 1);
  pen.fill();
  if (!filled) pen.stroke();
}

function disc(pen: CanvasRenderingContext2D, x: number, y: number, radius: number): void {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

/** A box's texts as lines, the widest first: the first one that fits is written. */
function namesOf(group: Group): string[][] {
  const n = group.members.length;
  if (n === 1) return [[group.title], [group.title.replace(/^.*?(\d[\d.-]*)$/, "$1")]];
  const kind = group.level === 0 ? "hosts" : "switches";
  return [[`${n} ${kind}`], [String(n), kind], [String(n), kind === "hosts" ? "h." : "sw."], [String(n)]];
}

function fitting(pen: CanvasRenderingContext2D, texts: string[][], width: number): string[] {
  return texts.find((lines) => lines.every((t) => pen.measureText(t).width <= width)) ?? [];
}
