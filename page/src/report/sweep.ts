// The arithmetic of a sweep: values as numbers, and the lines of a chart.
import type { Point, Sweep, SweptRow } from "./contract";

const UNITS: { [unit: string]: number } = {
  "": 1,
  "%": 0.01,
  k: 1e3,
  M: 1e6,
  G: 1e9,
  B: 1,
  kB: 1e3,
  MB: 1e6,
  GB: 1e9,
  KiB: 2 ** 10,
  MiB: 2 ** 20,
  GiB: 2 ** 30,
  kiB: 2 ** 10,
  ns: 1e-9,
  us: 1e-6,
  µs: 1e-6,
  ms: 1e-3,
  s: 1,
  min: 60,
  "bit/s": 1,
  "kbit/s": 1e3,
  "Mbit/s": 1e6,
  "Gbit/s": 1e9,
  kbps: 1e3,
  Mbps: 1e6,
  Gbps: 1e9,
};

/** "64", "100kB", "10us", "5%"; null where it is none of these. */
export function numeric(text: string): number | null {
  const match = /^"?\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([^\d\s"]*)\s*"?$/i.exec(text);
  if (!match) return null;
  const unit = UNITS[match[2]];
  const value = Number(match[1].replaceAll("_", "")) * (unit ?? NaN);
  return Number.isFinite(value) ? value : null;
}

/** The places of a parameter's values along an axis. */
export interface Scale {
  values: string[];
  /** By value, 0 to 1. */
  at: Map<string, number>;
  numeric: boolean;
  log: boolean;
}

/** Numbers that spread over more than this ratio stand on a logarithmic axis. */
const WIDE = 20;

export function scaleOf(values: readonly string[]): Scale {
  const unique = [...new Set(values)];
  const numbers = unique.map(numeric);
  if (numbers.some((n) => n === null)) {
    return { values: unique, at: new Map(unique.map((v, i) => [v, (i + 0.5) / unique.length])), numeric: false, log: false };
  }
  const pairs = unique.map((v, i) => ({ v, n: numbers[i]! })).sort((a, b) => a.n - b.n);
  const [least, most] = [pairs[0].n, pairs[pairs.length - 1].n];
  const log = least > 0 && most / least > WIDE;
  const place = (n: number): number => (log ? Math.log(n / least) / Math.log(most / least) : (n - least) / (most - least));
  const at = new Map(pairs.map(({ v, n }) => [v, most > least ? place(n) : 0.5]));
  return { values: pairs.map((p) => p.v), at, numeric: true, log };
}

export interface Mark {
  point: Point;
  row: SweptRow;
  value: string;
  median: number;
  low: number;
  high: number;
}

export interface SweptLine {
  label: string;
  marks: Mark[];
}

/** A line for each row and each combination of the other parameters. */
export function linesOf({ points, sweep }: Sweep, figure: string, parameter: string, scale: Scale): SweptLine[] {
  const others = Object.keys(sweep).filter((p) => p !== parameter && sweep[p].length > 1);
  const rows = new Set(points.flatMap((p) => p.rows.map((r) => r.name)));
  const lines = new Map<string, SweptLine>();
  for (const point of points) {
    for (const row of point.rows) {
      const told = row.figures[figure];
      if (!told) continue;
      const parts = [...(rows.size > 1 ? [row.name] : []), ...others.map((p) => `${short(p)} ${point.values[p]}`)];
      const label = parts.join(", ") || row.name;
      let line = lines.get(label);
      if (!line) lines.set(label, (line = { label, marks: [] }));
      const [low, high] = told.interval;
      line.marks.push({ point, row, value: point.values[parameter], median: told.median, low, high });
    }
  }
  const at = (m: Mark): number => scale.at.get(m.value) ?? 0;
  for (const line of lines.values()) line.marks.sort((a, b) => at(a) - at(b));
  return [...lines.values()];
}

/** "aggregators" of "topology.switch.aggregators". */
export const short = (parameter: string): string => parameter.split(".").pop()!;
