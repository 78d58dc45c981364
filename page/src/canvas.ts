// A canvas of rows over time, with names at its left, that zooms and pans. Its subclasses draw the rows.
import { html, type TemplateResult } from "lit-html";
import { colour, onScheme } from "./palette";
import { panned, tick, type View, zoomed } from "./view";

export const AXIS = 20;
export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export abstract class TimeCanvas {
  protected readonly canvas = document.createElement("canvas");
  protected readonly box = document.createElement("div");
  /** The width of the names. */
  protected left = 0;
  private readonly tip = document.createElement("div");
  private pointer: { x: number; y: number } | null = null;
  private readonly observer: ResizeObserver;
  private readonly unwatch: () => void;

  constructor(
    protected readonly changed: () => void,
    /** The shortest time that can be zoomed to. */
    private readonly least?: number,
  ) {
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

  protected abstract bounds(): View;
  protected abstract view(): View;
  protected abstract hold(view: View): void;
  /** The act of the Escape key. */
  protected abstract release(): void;
  protected abstract height(): number;
  protected abstract names(): string[];
  protected abstract rowHeight(row: number): number;
  protected abstract drawRow(pen: CanvasRenderingContext2D, row: number, top: number, view: View, toX: (time: number) => number): void;
  /** `y` counts from the row's upper edge. */
  protected abstract tipAt(row: number, time: number, y: number): string[] | null;
  protected abstract summary(): string;
  /** The text at a tick, so many seconds after the view's beginning. */
  protected abstract tickText(from: number, after: number): string;

  protected zoom(factor: number, at: number): void {
    this.hold(zoomed(this.view(), factor, at, this.bounds(), this.least));
  }

  protected pan(part: number): void {
    const view = this.view();
    this.hold(panned(view, (view.to - view.from) * part, this.bounds()));
  }

  protected buttons(): TemplateResult {
    const button = (label: string, text: string, act: () => void): TemplateResult =>
      html`<button type="button" aria-label=${label} title=${label} @click=${act}>${text}</button>`;
    return html`${button("Zoom in", "+", () => this.zoom(0.5, 0.5))} ${button("Zoom out", "−", () => this.zoom(2, 0.5))}
      ${button("Earlier", "←", () => this.pan(-0.25))} ${button("Later", "→", () => this.pan(0.25))}
      <button type="button" @click=${() => this.hold(this.bounds())}>All</button>`;
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
        Escape: () => this.release(),
      };
      if (!acts[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      acts[e.key]();
    });
  }

  /** Tells what is under the pointer, also when the picture moves below it. */
  private point(): void {
    this.tip.hidden = true;
    if (!this.pointer) return;
    const { x, y } = this.pointer;
    let top = AXIS;
    let row = 0;
    const rows = this.names().length;
    while (row < rows && y >= top + this.rowHeight(row)) top += this.rowHeight(row++);
    if (row === rows || y < AXIS || x < this.left) return;
    const view = this.view();
    const time = view.from + ((x - this.left) / (this.canvas.clientWidth - this.left)) * (view.to - view.from);
    const lines = this.tipAt(row, time, y - top);
    if (!lines) return;
    this.tip.hidden = false;
    this.tip.replaceChildren(
      ...lines.map((text) => {
        const line = document.createElement("div");
        line.textContent = text;
        return line;
      }),
    );
    const room = this.box.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.transform = `translate(${Math.max(0, Math.min(x + 12, room))}px, ${top + this.rowHeight(row)}px)`;
  }

  protected draw(): void {
    const width = this.box.clientWidth;
    if (!width) return;
    const names = this.names();
    const height = this.height();
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    if (!pen) return;
    pen.scale(scale, scale);
    pen.font = FONT;
    pen.textBaseline = "middle";
    this.left = Math.min(width * 0.28, 12 + Math.max(40, ...names.map((n) => pen.measureText(n).width)));
    const view = this.view();
    const toX = (time: number): number => this.left + ((time - view.from) / (view.to - view.from)) * (width - this.left);
    this.drawAxis(pen, view, toX, width, height);
    let y = AXIS;
    names.forEach((name, i) => {
      const tall = this.rowHeight(i);
      pen.fillStyle = colour("text");
      pen.save();
      pen.beginPath();
      pen.rect(0, y, this.left - 6, tall);
      pen.clip();
      pen.fillText(name, 4, y + tall / 2);
      pen.restore();
      pen.save();
      pen.beginPath();
      pen.rect(this.left, y, width - this.left, tall);
      pen.clip();
      this.drawRow(pen, i, y, view, toX);
      pen.restore();
      y += tall;
    });
    this.point();
    this.canvas.setAttribute("aria-label", this.summary());
  }

  private drawAxis(pen: CanvasRenderingContext2D, view: View, toX: (t: number) => number, width: number, height: number): void {
    const span = view.to - view.from;
    const step = tick(span, (width - this.left) / 90);
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    for (let k = 0; k * step <= span; k++) {
      const x = Math.round(toX(view.from + k * step)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillStyle = colour("quiet");
      const text = this.tickText(view.from, k * step);
      if (x + pen.measureText(text).width + 4 < width) pen.fillText(text, x + 3, AXIS / 2);
    }
  }
}
