// The arithmetic of the Gantt chart: each rank's tensors in lanes, found quickly for any stretch of time.
import type { RecordedJob } from "./contract";
import { duration, rankList, several } from "../format";

/** A bar: a tensor at a rank, or over all ranks. */
export interface Bar {
  number: number;
  lane: number;
  from: number;
  /** Until here the others waited for the last rank to submit. It is `from` in a rank's own row, and where ranks wait for nobody. */
  waited: number;
  to: number;
  /** When the first rank had its sum; `to` in a rank's own row. */
  first: number;
}

export interface Row {
  /** By begin. */
  bars: Bar[];
  computing: [number, number][];
  lanes: number;
  /** The longest bar, so that a search knows how far back bars may begin. */
  longest: number;
}

const MOST_LANES = 5;

/** For each bar, the first lane that is free when it begins. Bars have to be sorted by begin. */
export function lay(bars: Bar[]): number {
  const free: number[] = [];
  for (const bar of bars) {
    let lane = free.findIndex((end) => end <= bar.from + 1e-12);
    if (lane < 0) lane = Math.min(free.length, MOST_LANES - 1);
    free[lane] = Math.max(free[lane] ?? 0, bar.to);
    bar.lane = lane;
  }
  return Math.max(1, free.length);
}

function row(bars: Bar[], computing: [number, number][]): Row {
  bars.sort((a, b) => a.from - b.from);
  computing.sort((a, b) => a[0] - b[0]);
  return { bars, computing, lanes: lay(bars), longest: bars.reduce((most, b) => Math.max(most, b.to - b.from), 0) };
}

export class Gantt {
  readonly all: Row;
  readonly from: number;
  readonly to: number;
  private readonly spans = new Map<number, number[]>();
  private readonly computing = new Map<number, [number, number][]>();
  private readonly rows = new Map<number, Row>();

  constructor(readonly job: RecordedJob) {
    let from = Infinity;
    let to = 0;
    const reach = (a: number, b: number): void => {
      from = Math.min(from, a);
      to = Math.max(to, b);
    };
    job.spans.forEach(([rank, , submitted, summed], i) => {
      const list = this.spans.get(rank);
      if (list) list.push(i);
      else this.spans.set(rank, [i]);
      reach(submitted, summed);
    });
    for (const [rank, began, ended] of job.computing) {
      const list = this.computing.get(rank);
      if (list) list.push([began, ended]);
      else this.computing.set(rank, [[began, ended]]);
      reach(began, ended);
    }
    this.all = row(
      job.tensors.map(([number, submitted, waited, first, last]) => {
        reach(submitted, last);
        return { number, lane: 0, from: submitted, waited: job.asynchronous ? submitted : waited, to: last, first };
      }),
      [],
    );
    this.from = Number.isFinite(from) ? from : 0;
    this.to = Math.max(to, this.from + 1e-9);
  }

  has(rank: number): boolean {
    return this.spans.has(rank) || this.computing.has(rank);
  }

  /** A rank's own row, made when it is first drawn. */
  row(rank: number): Row {
    let found = this.rows.get(rank);
    if (!found) {
      const bars = (this.spans.get(rank) ?? []).map((i): Bar => {
        const [, number, submitted, summed] = this.job.spans[i];
        return { number, lane: 0, from: submitted, waited: submitted, to: summed, first: summed };
      });
      this.rows.set(rank, (found = row(bars, this.computing.get(rank) ?? [])));
    }
    return found;
  }

  /** The iteration of a tensor. */
  step(number: number): number {
    return Math.floor(number / Math.max(1, this.job.tensors_per_step));
  }
}

/** A stretch of the chart in numbers, for people who do not see it. */
export function told({ all, job }: Gantt, ranks: readonly number[], from: number, to: number): string {
  const shown = all.bars.filter((b) => b.to >= from && b.from <= to);
  const lasted = shown.map((b) => b.to - b.from);
  const [sum, most] = lasted.reduce(([s, m], t) => [s + t, Math.max(m, t)], [0, 0]);
  const rows = ranks.length < job.workers.length ? `, of which ${rankList(ranks)} ${ranks.length === 1 ? "is" : "are"} drawn` : "";
  return (
    `Tensors over time, ${duration(from)} to ${duration(to)}: ${several(shown.length, "tensor")} of ` +
    `${several(job.workers.length, "rank")}${rows}.` +
    (shown.length ? ` From the first rank's submission to the last rank's sum, a tensor took ${duration(sum / shown.length)} in the mean, ${duration(most)} at most.` : "")
  );
}

/** The place of the first bar that may reach beyond a time. */
export function firstAt({ bars, longest }: Row, time: number): number {
  let low = 0;
  let high = bars.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (bars[middle].from + longest < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The bar of a row at a time, that of the lane first. */
export function barAt(row: Row, time: number, lane: number): Bar | null {
  let found: Bar | null = null;
  for (let i = firstAt(row, time); i < row.bars.length && row.bars[i].from <= time; i++) {
    const bar = row.bars[i];
    if (bar.to < time) continue;
    if (bar.lane === lane) return bar;
    found = bar;
  }
  return found;
}

/** "0-3, 7" as numbers below `ranks`, at most so many; null where it is not understood. */
export function ranksIn(text: string, ranks: number, most: number): number[] | null {
  const found = new Set<number>();
  for (const entry of text.split(/[,;\s]+/).filter(Boolean)) {
    const match = /^(\d{1,7})(?:[-–](\d{1,7}))?$/.exec(entry);
    if (!match) return null;
    const [from, to] = [Number(match[1]), Number(match[2] ?? match[1])];
    if (to < from || to >= ranks) return null;
    for (let r = from; r <= to && found.size < most; r++) found.add(r);
  }
  return found.size ? [...found].sort((a, b) => a - b) : null;
}
