// The last answer, and an hour of history that grows with each.
import type { History, JobSeries, ServiceSeries, State } from "./contract";

export type Values = (number | null)[];
const HOUR = 3600;
/** Times without samples in a row that make a gap in the charts. */
const GAP = 3;

const SERVICE: (keyof ServiceSeries)[] = ["received", "sent", "resent", "dropped"];
const JOB: (keyof JobSeries)[] = ["summed", "resent", "lost", "steps", "in_sums"];

export class Store {
  state: State | null = null;
  readonly times: number[] = [];
  readonly services = new Map<string, ServiceSeries>();
  readonly jobs = new Map<string, JobSeries>();

  /** The time of the last sample; 0 without any. */
  get last(): number {
    return this.times.length ? this.times[this.times.length - 1] : 0;
  }

  apply(state: State): void {
    const before = this.state;
    const turnedBack = state.now < this.last - 2 * state.every;
    if (before && (before.server !== state.server || turnedBack)) this.clear();
    this.state = state;
    this.merge(state.history, state.every);
    this.forget(state.now - Math.min(state.kept, HOUR));
  }

  private clear(): void {
    this.times.length = 0;
    this.services.clear();
    this.jobs.clear();
  }

  private merge(history: History, every: number): void {
    const fresh: number[] = [];
    let last = this.last;
    history.times.forEach((time, i) => {
      if (time <= last) return;
      if (last && time - last > GAP * every) {
        this.times.push(last + every);
        fresh.push(-1);
      }
      this.times.push(time);
      fresh.push(i);
      last = time;
    });
    if (!fresh.length) return;
    grow(this.services, history.services, SERVICE, fresh, this.times.length);
    grow(this.jobs, history.jobs, JOB, fresh, this.times.length);
  }

  private forget(before: number): void {
    let n = 0;
    while (n < this.times.length && this.times[n] < before) n++;
    if (!n) return;
    this.times.splice(0, n);
    shrink(this.services, n, new Set(this.state?.services.map((s) => s.address)));
    shrink(this.jobs, n, new Set(this.state?.jobs.map((j) => j.name)));
  }
}

/** Appends the samples at `fresh` (-1: none) to each series; one that is not told has nulls. */
function grow<K extends string>(
  kept: Map<string, { [k in K]: Values }>,
  told: { [name: string]: { [k in K]: Values } },
  keys: K[],
  fresh: number[],
  length: number,
): void {
  const names = new Set([...kept.keys(), ...Object.keys(told)]);
  for (const name of names) {
    let series = kept.get(name);
    if (!series) {
      series = {} as { [k in K]: Values };
      for (const key of keys) series[key] = new Array<null>(length - fresh.length).fill(null);
      kept.set(name, series);
    }
    const source = Object.prototype.hasOwnProperty.call(told, name) ? told[name] : null;
    for (const key of keys) {
      for (const i of fresh) series[key].push(source?.[key][i] ?? null);
    }
  }
}

/** Drops the first n samples of each series, and a series that is gone and has no value left. */
function shrink(kept: Map<string, object>, n: number, present: Set<string>): void {
  for (const [name, series] of kept) {
    const all = Object.values(series) as Values[];
    for (const values of all) values.splice(0, n);
    if (!present.has(name) && all.every((values) => values.every((v) => v === null))) kept.delete(name);
  }
}
