// Figures of two runs beside each other.
import type { TemplateResult } from "lit-html";
import { bytes, count, digits, duration, gbps, percent } from "../format";
import type { Durations, Result, Run } from "./contract";
import { table } from "./table";

export interface Figure {
  name: string;
  show: (x: number | null) => string;
  ours: number | null;
  other: number | null;
}

/** The other run's job of a name; where no name is there twice, or in its place otherwise. */
function paired<T extends { name: string }>(ours: readonly T[], others: readonly T[]): [T, T | null][] {
  return ours.map((o, i) => {
    const named = others.filter((x) => x.name === o.name);
    return [o, named.length === 1 ? named[0] : (others[i] ?? null)];
  });
}

export function figures(ours: Result, other: Result): Figure[] {
  const list: Figure[] = [];
  const add = (name: string, show: Figure["show"], value: (r: Result) => number | null): void => {
    list.push({ name, show, ours: value(ours), other: value(other) });
  };
  const whole = (x: number | null): string => count(x);
  for (const [job, twin] of paired(ours.jobs, other.jobs)) {
    const both = (name: string, show: Figure["show"], value: (j: typeof job) => number | null): void => {
      const figure = { name: `${job.name}: ${name}`, show, ours: value(job), other: twin && value(twin) };
      if (figure.ours !== null || figure.other !== null) list.push(figure);
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
  const most = (r: Result, value: (l: Result["links"][number]) => number): number =>
    r.links.reduce((sum, l) => Math.max(sum, value(l)), 0);
  add("load of the busiest link", percent, (r) => most(r, (l) => l.load));
  add("longest queue", bytes, (r) => most(r, (l) => l.queue_max_bytes));
  add("packets marked", whole, (r) => r.links.reduce((sum, l) => sum + l.marked, 0));
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
