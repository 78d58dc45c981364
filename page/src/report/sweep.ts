// The arithmetic of a sweep: values as numbers, and the lines of a chart.
import type { Point, Sweep, SweptRow } from "./contract";

/** Factors of the units of fanin, which it takes in any case (crates/units). */
const UNITS = new Map<string, number>([
  ["", 1],
  ["%", 0.01],
  ["ps", 1e-12],
  ["ns", 1e-9],
  ["us", 1e-6],
  ["ms", 1e-3],
  ["s", 1],
  ...["", "k", "m", "g", "t"].flatMap((prefix, i): [string, number][] => [
    [`${prefix}bit`, 1e3 ** i],
    [`${prefix}b`, 1e3 ** i],
    ...(i ? ([[`${prefix}ibit`, 1024 ** i], [`${prefix}ib`, 1024 ** i]] as [string, number][]) : []),
  ]),
]);

/** "64", "-1e3", "100kB", "10us", "5%"; null where fanin would not take it for a number. Signs and exponents have no unit behind them. */
export function numeric(text: string): number | null {
  const match = /^(?:([-+]?\d+(?:[_.]\d+)*(?:e[-+]?\d+)?)|(\d+(?:[_.]\d+)*)([a-z]+|%))$/.exec(text.replace(/^"(.*)"$/, "$1").toLowerCase());
  if (!match) return null;
  const value = Number((match[1] ?? match[2]).replaceAll("_", "")) * (UNITS.get(match[3] ?? "") ?? NaN);
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

/** A point's value on the axis of a parameter. Runs that differ by their seeds alone have no parameter, and share the value "". */
export const valueOf = (point: Point, parameter: string): string => point.values[parameter] ?? "";

/** Rows of a point with their names; a name that was there before gets a number. */
export function named({ rows }: Point): { name: string; row: SweptRow }[] {
  const seen = new Map<string, number>();
  return rows.map((row) => {
    const times = (seen.get(row.name) ?? 0) + 1;
    seen.set(row.name, times);
    return { name: times > 1 ? `${row.name} (${times})` : row.name, row };
  });
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
  const short = shortNames(Object.keys(sweep));
  const others = Object.keys(sweep).filter((p) => p !== parameter && sweep[p].length > 1);
  const rows = new Set(points.flatMap((p) => named(p).map((r) => r.name)));
  const lines = new Map<string, SweptLine>();
  for (const point of points) {
    for (const { name, row } of named(point)) {
      const told = row.figures[figure];
      if (!told) continue;
      const parts = [...(rows.size > 1 ? [name] : []), ...others.map((p) => `${short(p)} ${valueOf(point, p)}`)];
      const label = parts.join(", ") || name;
      let line = lines.get(label);
      if (!line) lines.set(label, (line = { label, marks: [] }));
      const [low, high] = told.interval;
      line.marks.push({ point, row, value: valueOf(point, parameter), median: told.median, low, high });
    }
  }
  const at = (m: Mark): number => scale.at.get(m.value) ?? 0;
  for (const line of lines.values()) line.marks.sort((a, b) => at(a) - at(b));
  return [...lines.values()];
}

/** "aggregators" for "topology.switch.aggregators": the shortest end of its path that no other parameter has. */
export function shortNames(parameters: readonly string[]): (parameter: string) => string {
  const ends = (parameter: string): string[] => {
    const parts = parameter.split(".");
    return parts.map((_, i) => parts.slice(parts.length - 1 - i).join("."));
  };
  const owners = new Map<string, number>();
  for (const p of new Set(parameters)) for (const end of ends(p)) owners.set(end, (owners.get(end) ?? 0) + 1);
  return (parameter) => ends(parameter).find((end) => owners.get(end) === 1) ?? parameter;
}
