// The lines of the network map: their ends, their drawing, and their distance from a point.
import type { Drawing } from "./fabric";

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** Links end side by side along a box's edge, in the order of their other ends. */
export function portsOf({ bundles, groups }: Drawing, boxes: Box[]): Float64Array {
  const ports = new Float64Array(2 * bundles.length);
  const middle = (g: number): number => boxes[g].x + boxes[g].width / 2;
  const edges = new Map<number, { end: number; other: number }[]>();
  bundles.forEach(({ a, b }, i) => {
    if (groups[a].level === groups[b].level) return;
    // Above a box and below it are two edges.
    for (const [edge, end, other] of [[2 * a, 2 * i, b], [2 * b + 1, 2 * i + 1, a]]) {
      const list = edges.get(edge);
      if (list) list.push({ end, other: middle(other) });
      else edges.set(edge, [{ end, other: middle(other) }]);
    }
  });
  for (const [edge, list] of edges) {
    const { x, width } = boxes[edge >> 1];
    const wide = Math.min(width * 0.8, list.length * 9);
    list.sort((p, q) => p.other - q.other);
    list.forEach(({ end }, k) => (ports[end] = x + width / 2 + ((k + 0.5) / list.length - 0.5) * wide));
  }
  return ports;
}

export interface Line {
  from: { x: number; y: number };
  to: { x: number; y: number };
  /** How far up the middle of its curve is pulled. */
  bend: number;
}

function normal({ from, to }: Line): [number, number] {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  return [-(to.y - from.y) / length, (to.x - from.x) / length];
}

export function stroke(pen: CanvasRenderingContext2D, line: Line, apart: number, thick: number, style: string): void {
  const [nx, ny] = normal(line);
  const { from, to, bend } = line;
  pen.strokeStyle = style;
  pen.lineWidth = thick;
  pen.beginPath();
  pen.moveTo(from.x + nx * apart, from.y + ny * apart);
  if (bend) pen.quadraticCurveTo((from.x + to.x) / 2 + nx * apart, from.y + bend + ny * apart, to.x + nx * apart, to.y + ny * apart);
  else pen.lineTo(to.x + nx * apart, to.y + ny * apart);
  pen.stroke();
}

/** The point of a link's direction, at three quarters of its way. */
export function arrow(pen: CanvasRenderingContext2D, line: Line, apart: number, forwards: boolean, thick: number, style: string): void {
  if (line.bend) return;
  const [nx, ny] = normal(line);
  const [ux, uy] = forwards ? [ny, -nx] : [-ny, nx];
  const t = forwards ? 0.72 : 0.28;
  const x = line.from.x + (line.to.x - line.from.x) * t + nx * apart;
  const y = line.from.y + (line.to.y - line.from.y) * t + ny * apart;
  const half = thick / 2 + 2;
  pen.fillStyle = style;
  pen.beginPath();
  pen.moveTo(x + ux * 7, y + uy * 7);
  pen.lineTo(x + nx * half, y + ny * half);
  pen.lineTo(x - nx * half, y - ny * half);
  pen.fill();
}

/** From a line's middle curve to a point. */
export function distance({ from, to, bend }: Line, x: number, y: number): number {
  const steps = bend ? 12 : 1;
  let least = Infinity;
  let last = from;
  for (let i = 1; i <= steps; i++) {
    const t = i / steps;
    const lift = 2 * t * (1 - t) * bend;
    const next = { x: from.x + (to.x - from.x) * t, y: from.y + (to.y - from.y) * t + lift };
    const [dx, dy] = [next.x - last.x, next.y - last.y];
    const along = Math.max(0, Math.min(1, ((x - last.x) * dx + (y - last.y) * dy) / (dx * dx + dy * dy || 1)));
    least = Math.min(least, Math.hypot(x - last.x - along * dx, y - last.y - along * dy));
    last = next;
  }
  return least;
}
