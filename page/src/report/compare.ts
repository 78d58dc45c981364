// Figures of two runs beside each other.
import type { TemplateResult } from "lit-html";
import { bytes, count, digits, duration, gbps, percent } from "../format";
import type { Durations, Job, Result, Run } from "./contract";
import { table } from "./table";

export interface Figure {
  name: string;
  show: (x: number | null) => string;
  ours: number | null;
  other: number | null;
}

/** Jobs of one name are a pair; the rest are pairs in their order. The last ones, of one run alone, have null beside them. */
export function paired<T extends { name: string }>(ours: readonly T[], others: readonly T[]): [T | null, T | null][] {
  const free = [...others];
  const named = ours.map((o) => {
    const at = free.findIndex((x) => x.name === o.name);
    return at < 0 ? null : free.splice(at, 1)[0];
  });
  const pairs = ours.map((o, i): [T | null, T | null] => [o, named[i] ?? free.shift() ?? null]);
  return [...pairs, ...free.map((x): [null, T] => [null, x])];
}

/** Both names, where they differ. */
const nameOf = (a: { name: string } | null, b: { name: string } | null): string =>
  [...new Set([a, b].flatMap((x) => (x ? [x.name] : [])))].join(" / ");

export function figures(ours: Result, other: Result): Figure[] {
  const list: Figure[] = [];
  const add = (name: string, show: Figure["show"], value: (r: Result) => number | null): void => {
    list.push({ name, show, ours: value(ours), other: value(other) });
  };
  const whole = (x: number | null): string => count(x);
  for (const [job, twin] of paired(ours.jobs, other.jobs)) {
    const alone = !job || !twin;
    const both = (name: string, show: Figure["show"], value: (j: Job) => number | null): void => {
      const figure = { name: `${nameOf(job, twin)}: ${name}`, show, ours: job && value(job), other: twin && value(twin) };
      // A job of one run is listed even where it has no figure.
      if (figure.ours !== null || figure.other !== null || (alone && name === "finished")) list.push(figure);
    };
    both("finished", duration, (j) => j.finished_s);
    both("throughput", gbps, (j) => (j.measurement.enough ? j.aggregation_gbps : null));
    both("tensor time, mean", duration, (j) => ifAny(j.tensor_times, (t) => t.mean_s));
    both("tensor time, 99 %", duration, (j) => ifAny(j.tensor_times, (t) => t.p99_s));
    both("samples a second and worker", digits, (j) => j.training?.samples_per_s ?? null);
    both("packets sent again", whole, (j) => j.retransmissions);
  }
  if (ours.flow_times || other.flow_times) {
    add("flow time, mean", duration, (r) => r.flow_times && ifAny(r.flow_times, (t) => t.mean_s));
    add("flow time, 99 %", duration, (r) => r.flow_times && ifAny(r.flow_times, (t) => t.p99_s));
  }
  // Large reports have no links of their later runs: nothing is known of these then.
  const over = (r: Result, join: (a: number, b: number) => number, value: (l: Result["links"][number]) => number): number | null =>
    r.links.length ? r.links.reduce((sum, l) => join(sum, value(l)), 0) : null;
  const most = (r: Result, value: (l: Result["links"][number]) => number): number | null => over(r, Math.max, value);
  add("load of the busiest link", percent, (r) => most(r, (l) => l.load));
  add("longest queue", bytes, (r) => most(r, (l) => l.queue_max_bytes));
  add("packets marked", whole, (r) => over(r, (a, b) => a + b, (l) => l.marked));
  add("packets dropped", whole, (r) => r.drops.reduce((sum, d) => sum + d.count, 0));
  add("packet hops", whole, (r) => r.packet_hops);
  add("virtual time", duration, (r) => r.ended_s);
  return list;
}

const ifAny = (times: Durations, value: (t: Durations) => number): number | null => (times.count ? value(times) : null);

/** "1.25 ×", of ours to the other. */
export function ratio({ ours, other }: Figure): string {
  return ours === null || other === null || other === 0 ? "–" : `${digits(ours / other)} ×`;
}

export function comparison(ours: Run, other: Run): TemplateResult {
  return table(
    "This run and the other one",
    [
      { head: "Figure", cell: (f: Figure) => f.name },
      { head: "This", number: true, cell: (f) => f.show(f.ours) },
      { head: "Other", number: true, cell: (f) => f.show(f.other) },
      { head: "This / other", number: true, cell: (f) => ratio(f) },
    ],
    figures(ours.result, other.result),
    { hidden: true },
  );
}
