// Load, queue, marks and drops of each direction of each link, in an interval or over the whole run.
import type { Direction, Recording } from "./contract";
import { bytes, count, percent } from "../format";

export type Measure = "busy" | "queued" | "marked" | "dropped";

export interface Kind {
  /** In a list of choices. */
  title: string;
  /** A value, for people. */
  show: (value: number | null) => string;
  /** Before "in the interval" and "in the whole run". */
  text: string;
}

/** Below a per mille, the unit of the recording, a mean has no digits that are worth a read; it is not 0 either. */
const load = (value: number | null): string => (value !== null && value > 0 && value < 1e-3 ? "< 0.1 %" : percent(value));

export const KINDS: { [measure in Measure]: Kind } = {
  busy: { title: "Load", show: load, text: "part of the time in which it was busy" },
  queued: { title: "Queue", show: bytes, text: "bytes that waited, in the mean" },
  marked: { title: "Marks", show: (v) => (v === null ? "–" : count(v)), text: "packets marked" },
  dropped: { title: "Drops", show: (v) => (v === null ? "–" : count(v)), text: "packets dropped" },
};
export const MEASURES = Object.keys(KINDS) as Measure[];

/** An interval's number, or null for the whole run. */
export type When = number | null;

export class Readings {
  private readonly wholes = new Map<Measure, Float64Array>();
  private readonly most = new Map<string, number>();
  private readonly lengths: number[];
  private readonly total: number;

  constructor(private readonly recording: Recording) {
    const { ends } = recording;
    this.lengths = ends.map((end, i) => end - (i ? ends[i - 1] : 0));
    this.total = ends.length ? ends[ends.length - 1] : 0;
  }

  /** Loads are parts of 1; queues are bytes. */
  value(measure: Measure, direction: number, when: When): number {
    if (when === null) return this.whole(measure)[direction];
    const series = this.recording.directions[direction][measure];
    return series ? series[when] * (measure === "busy" ? 1e-3 : 1) : 0;
  }

  /** The largest value of any direction: over the whole run, or in any interval. */
  largest(measure: Measure, when: When): number {
    const key = `${measure} ${when === null}`;
    let most = this.most.get(key);
    if (most === undefined) {
      most = 0;
      if (when === null) for (const v of this.whole(measure)) most = Math.max(most, v);
      else for (const d of this.recording.directions) for (const v of d[measure] ?? []) most = Math.max(most, v);
      if (when !== null && measure === "busy") most *= 1e-3;
      this.most.set(key, most);
    }
    return most;
  }

  /** The directions with the largest values, the largest first; none with 0. */
  top(measure: Measure, when: When, how: number): number[] {
    const best: { direction: number; value: number }[] = [];
    let least = 0;
    for (let direction = 0; direction < this.recording.directions.length; direction++) {
      const value = this.value(measure, direction, when);
      if (value <= least) continue;
      let at = best.length;
      while (at > 0 && best[at - 1].value < value) at--;
      best.splice(at, 0, { direction, value });
      if (best.length > how) best.pop();
      if (best.length === how) least = best[how - 1].value;
    }
    return best.map((b) => b.direction);
  }

  /** A direction over time, in units of `value`. */
  series(measure: Measure, direction: number): number[] {
    const series = this.recording.directions[direction][measure];
    if (!series) return this.lengths.map(() => 0);
    return measure === "busy" ? series.map((v) => v * 1e-3) : series;
  }

  private whole(measure: Measure): Float64Array {
    let whole = this.wholes.get(measure);
    if (!whole) {
      const mean = measure === "busy" || measure === "queued";
      whole = Float64Array.from(this.recording.directions, (d) => this.over(d, measure, mean));
      this.wholes.set(measure, whole);
    }
    return whole;
  }

  private over(direction: Direction, measure: Measure, mean: boolean): number {
    const series = direction[measure];
    if (!series) return 0;
    let sum = 0;
    for (let i = 0; i < series.length; i++) sum += mean ? series[i] * this.lengths[i] : series[i];
    if (!mean) return sum;
    return this.total > 0 ? (sum / this.total) * (measure === "busy" ? 1e-3 : 1) : 0;
  }
}

/** How much of the scale a value takes, 0 to 1: of its rate for loads, of the largest value otherwise. */
export function part(measure: Measure, value: number, largest: number): number {
  const full = measure === "busy" ? 1 : largest;
  return full > 0 ? Math.min(1, value / full) : 0;
}

/** A step of the scale, which is the name of its colour. Loads have the live page's steps. */
export function step(measure: Measure, value: number, largest: number): "unknown" | "light" | "busy" | "full" {
  if (value <= 0) return "unknown";
  const [first, second] = stepsOf(measure);
  const p = part(measure, value, largest);
  return p < first ? "light" : p < second ? "busy" : "full";
}

export function stepsOf(measure: Measure): [number, number] {
  return measure === "busy" ? [0.5, 0.85] : [1 / 3, 2 / 3];
}

/** How much something carries: the largest value of its directions. */
export interface Level {
  value: number;
  part: number;
  step: ReturnType<typeof step>;
}

export const levelAt = (measure: Measure, value: number, largest: number): Level => ({
  value,
  part: part(measure, value, largest),
  step: step(measure, value, largest),
});
