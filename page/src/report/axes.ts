// Axes of charts in reports: virtual time, and how long things took.
import type { Across } from "../chart";
import { duration, percent } from "../format";

const seconds = (marks: (number | null)[]): (string | null)[] => marks.map((t) => (t === null ? null : duration(t)));

export const VIRTUAL_TIME: Across = {
  day: false,
  tell: (t) => `from ${duration(t)}`,
  ticks: seconds,
  stretch: (from, to) => `${duration(from)} to ${duration(to)}`,
  ends: false,
};

export const HOW_LONG: Across = { ...VIRTUAL_TIME, tell: (t) => `within ${duration(t)}` };

/** For charts of parts of all, up to 100 %. */
export const ofAll = (x: number | null): string => percent(x);

/** The values of intervals for a stepped chart: each one at its beginning, the last one at the end again. */
export function steps(ends: readonly number[], values: readonly number[]): { at: number[]; values: number[] } {
  const n = Math.min(ends.length, values.length);
  if (!n) return { at: [], values: [] };
  return { at: [0, ...ends.slice(0, n)], values: [...values.slice(0, n), values[n - 1]] };
}

/**
 * The same rates, where the run's end cut the last interval short: less than half an interval is joined to the one before.
 * A tensor counts when it is whole, and a tensor in a short interval would be a rate that no link carries.
 */
export function joined(ends: readonly number[], values: readonly number[]): { ends: number[]; values: number[] } {
  const n = Math.min(ends.length, values.length);
  const length = (i: number): number => ends[i] - (ends[i - 1] ?? 0);
  if (n < 2 || length(n - 1) >= length(n - 2) / 2) return { ends: ends.slice(0, n), values: values.slice(0, n) };
  const both = values[n - 2] * length(n - 2) + values[n - 1] * length(n - 1);
  return {
    ends: [...ends.slice(0, n - 2), ends[n - 1]],
    values: [...values.slice(0, n - 2), both / (length(n - 2) + length(n - 1))],
  };
}

/** Ends of intervals of one length, the last one cut short by the run's end. */
export function endsOf(interval: number, count: number, ended: number): number[] {
  return Array.from({ length: count }, (_, i) => Math.min((i + 1) * interval, Math.max(ended, i * interval)));
}
