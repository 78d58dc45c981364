// The arithmetic of the timeline: when each rank computed, waited and summed.
import type { Sum } from "./contract";

export interface Span {
  rank: number;
  sum: Sum;
  /** Collectives that overlap are drawn below each other. */
  lane: number;
  /** Computing from `from` to `began`, waiting until `last`, summing until `ended`. */
  from: number;
  began: number;
  last: number;
  ended: number;
}

export interface Picture {
  /** By rank: its spans, oldest first. */
  rows: Map<number, Span[]>;
  lanes: number;
  /** When the first begins to compute, and the last has ended. */
  from: number;
  to: number;
}

const MOST_LANES = 4;

/** When the last rank began. */
export function lastBegin(sum: Sum): number {
  let least = Infinity;
  for (const [, took] of sum.ranks) least = Math.min(least, took);
  return sum.ended - (Number.isFinite(least) ? Math.max(0, least) : 0);
}

/** When the first rank began. */
export function firstBegin(sum: Sum): number {
  let most = 0;
  for (const [, took] of sum.ranks) most = Math.max(most, took);
  return sum.ended - most;
}

/** For each collective, the first lane that is free when its first rank begins. */
export function lanesOf(sums: readonly Sum[]): number[] {
  const lanes = new Array<number>(sums.length).fill(0);
  const free: number[] = [];
  const begins = sums.map(firstBegin);
  const order = begins.map((_, i) => i).sort((a, b) => begins[a] - begins[b]);
  for (const i of order) {
    // A microsecond of rounding makes no overlap.
    const begin = begins[i] + 1e-6;
    let lane = free.findIndex((end) => end <= begin);
    if (lane < 0) lane = free.length < MOST_LANES ? free.length : MOST_LANES - 1;
    free[lane] = Math.max(free[lane] ?? 0, sums[i].ended);
    lanes[i] = lane;
  }
  return lanes;
}

/** `only`: the ranks whose spans are wanted, out of thousands. The bounds are those of all. */
export function picture(sums: readonly Sum[], only?: ReadonlySet<number>): Picture {
  const rows = new Map<number, Span[]>();
  const lanes = lanesOf(sums);
  let from = Infinity;
  let to = -Infinity;
  sums.forEach((sum, i) => {
    const last = lastBegin(sum);
    to = Math.max(to, sum.ended);
    for (const [rank, took, computed] of sum.ranks) {
      const began = sum.ended - Math.max(0, took);
      const start = began - Math.max(0, computed);
      from = Math.min(from, start);
      if (only && !only.has(rank)) continue;
      let row = rows.get(rank);
      if (!row) rows.set(rank, (row = []));
      row.push({ rank, sum, lane: lanes[i], from: start, began, last, ended: sum.ended });
    }
  });
  return { rows, lanes: lanes.length ? Math.max(...lanes) + 1 : 1, from, to };
}

/** Where the last steps begin: three of them, or twelve collectives. */
export function lastSteps(sums: readonly Sum[], perStep: number | null): number {
  if (!sums.length) return 0;
  const shown = perStep ? Math.max(1, Math.round(perStep * 3)) : 12;
  const first = sums[Math.max(0, sums.length - shown)];
  const computed = Math.max(0, ...first.ranks.map((r) => r[2]));
  return firstBegin(first) - computed;
}

/** The span of a row at a time, the upper lane first; null where there is none. */
export function spanAt(row: readonly Span[], time: number, lane: number | null): Span | null {
  let found: Span | null = null;
  for (const span of row) {
    if (time < span.from || time > span.ended) continue;
    if (span.lane === lane) return span;
    if (!found || time >= span.began) found = span;
  }
  return found;
}
