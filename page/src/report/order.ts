// The order of the boxes in each row, so that few links cross.
import type { Bundle, Group } from "./fabric";

/** More links than this are not counted for crossings: the recording's order is a good one then. */
const MOST_COUNTED = 1500;
const ROUNDS = 8;

/** Rows by level, the lowest first; levels without boxes are left out. */
export function ordered(groups: Group[], bundles: Bundle[], top: number): number[][] {
  const rows: number[][] = Array.from({ length: top + 1 }, () => []);
  groups.forEach((g, i) => rows[g.level].push(i));
  for (const row of rows) row.sort((x, y) => groups[x].members[0] - groups[y].members[0]);
  const there = rows.filter((row) => row.length);
  const across = bundles.filter((b) => groups[b.a].level !== groups[b.b].level);
  const along = bundles.filter((b) => groups[b.a].level === groups[b.b].level);
  // Switches in a ring or a line stand in its order, which the sweeps leave alone.
  const fixed = new Set<number[]>();
  for (const row of there) {
    const links = along.filter((b) => groups[b.a].level === groups[row[0]].level);
    if (!links.length) continue;
    walk(row, links);
    fixed.add(row);
  }
  if (across.length > MOST_COUNTED) return there;
  const neighbours = new Map<number, number[]>();
  for (const { a, b } of across) {
    neighbours.set(a, [...(neighbours.get(a) ?? []), b]);
    neighbours.set(b, [...(neighbours.get(b) ?? []), a]);
  }
  let best = there.map((row) => [...row]);
  let least = crossings(there, across);
  for (let round = 0; round < ROUNDS && least > 0; round++) {
    const downwards = round % 2 === 0;
    const order = downwards ? [...there].reverse() : there;
    for (const row of order) if (!fixed.has(row)) sweep(row, there, neighbours);
    const now = crossings(there, across);
    if (now >= least) continue;
    least = now;
    best = there.map((row) => [...row]);
  }
  return best;
}

/** Sorts a row by the mean place of each box's neighbours. */
function sweep(row: number[], rows: number[][], neighbours: Map<number, number[]>): void {
  const place = places(rows);
  const aim = new Map(
    row.map((g) => {
      const near = neighbours.get(g) ?? [];
      return [g, near.length ? near.reduce((sum, n) => sum + place.get(n)!, 0) / near.length : place.get(g)!];
    }),
  );
  row.sort((x, y) => aim.get(x)! - aim.get(y)! || place.get(x)! - place.get(y)!);
}

/** The place of each box in its row, 0 to 1. */
function places(rows: number[][]): Map<number, number> {
  return new Map(rows.flatMap((row) => row.map((g, i) => [g, (i + 0.5) / row.length] as const)));
}

/** Sorts a row along its links, from its first box. */
function walk(row: number[], links: Bundle[]): void {
  const near = new Map<number, number[]>();
  for (const { a, b } of links) {
    near.set(a, [...(near.get(a) ?? []), b]);
    near.set(b, [...(near.get(b) ?? []), a]);
  }
  const rank = new Map(row.map((g, i) => [g, i]));
  const seen = new Set<number>();
  for (const start of [...row]) {
    const stack = [start];
    while (stack.length) {
      const g = stack.pop()!;
      if (seen.has(g)) continue;
      seen.add(g);
      // The last one pushed is the next one visited.
      stack.push(...(near.get(g) ?? []).sort((x, y) => rank.get(y)! - rank.get(x)!));
    }
  }
  row.splice(0, row.length, ...seen);
}

export function crossings(rows: number[][], bundles: readonly Pick<Bundle, "a" | "b">[]): number {
  const place = places(rows);
  const level = new Map(rows.flatMap((row, i) => row.map((g) => [g, i] as const)));
  const sides = new Map<string, [number, number][]>();
  for (const { a, b } of bundles) {
    const key = `${level.get(a)} ${level.get(b)}`;
    const side = sides.get(key);
    const ends: [number, number] = [place.get(a)!, place.get(b)!];
    if (side) side.push(ends);
    else sides.set(key, [ends]);
  }
  let found = 0;
  for (const side of sides.values()) {
    for (let i = 0; i < side.length; i++) {
      for (let j = 0; j < i; j++) if ((side[i][0] - side[j][0]) * (side[i][1] - side[j][1]) < 0) found++;
    }
  }
  return found;
}
