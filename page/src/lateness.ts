// How late each rank begins its collectives, and what that costs.
import type { Sum } from "./contract";
import { quantile } from "./format";
import { firstBegin } from "./timeline";

export interface Late {
  rank: number;
  /** Seconds after the earliest rank. */
  least: number;
  low: number;
  median: number;
  high: number;
  most: number;
  /** The part of the collectives in which it was the last, and how many there were. */
  last: number;
  of: number;
  /** Seconds for which all others waited for it alone, over all collectives. */
  cost: number;
}

const known = new WeakMap<readonly Sum[], Late[]>();

/** The latest rank first. Each answer's collectives are looked through once. */
export function lateness(sums: readonly Sum[]): readonly Late[] {
  let late = known.get(sums);
  if (!late) known.set(sums, (late = measured(sums)));
  return late;
}

function measured(sums: readonly Sum[]): Late[] {
  const delays = new Map<number, number[]>();
  const lasts = new Map<number, { times: number; cost: number }>();
  for (const sum of sums) {
    if (sum.ranks.length < 2) continue;
    const first = firstBegin(sum);
    let last = -1;
    let most = -1;
    let second = -1;
    for (const [rank, took] of sum.ranks) {
      const delay = Math.max(0, sum.ended - took - first);
      const all = delays.get(rank);
      if (all) all.push(delay);
      else delays.set(rank, [delay]);
      if (delay > most) {
        second = most;
        most = delay;
        last = rank;
      } else second = Math.max(second, delay);
    }
    if (most <= second) continue;
    const of = lasts.get(last) ?? { times: 0, cost: 0 };
    of.times += 1;
    of.cost += most - second;
    lasts.set(last, of);
  }
  return [...delays]
    .map(([rank, values]) => {
      const sorted = values.sort((a, b) => a - b);
      return {
        rank,
        least: sorted[0],
        low: quantile(sorted, 0.25),
        median: quantile(sorted, 0.5),
        high: quantile(sorted, 0.75),
        most: sorted[sorted.length - 1],
        last: (lasts.get(rank)?.times ?? 0) / sorted.length,
        of: sorted.length,
        cost: lasts.get(rank)?.cost ?? 0,
      };
    })
    .sort((a, b) => b.median - a.median || a.rank - b.rank);
}
