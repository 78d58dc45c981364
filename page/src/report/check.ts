// The parts of a file that have the shape of contract.ts; extra fields are welcome.
// Each run is tested alone: with --against, one of them may be by another version of fanin, and the other one is still shown.
import type { Report, Run, Sweep } from "./contract";
import { boolean, list, map, number, object, orNull, type Test, text, tuple } from "../shape";

const durations = object({
  count: number,
  unfinished: number,
  mean_s: number,
  p95_s: number,
  p99_s: number,
  p999_s: number,
  max_s: number,
});

const result = object({
  title: text,
  seed: number,
  ended_s: number,
  interval_s: number,
  packet_hops: number,
  events: number,
  digest: text,
  drops: list(object({ name: text, count: number })),
  jobs: list(
    object({
      name: text,
      system: text,
      workers: number,
      finished: boolean,
      finished_s: orNull(number),
      died_s: orNull(number),
      unfinished: orNull(text),
      aggregation_gbps: number,
      measurement: object({ window_s: number, completed: number, needed: number, enough: boolean }),
      tensors: number,
      tensor_times: durations,
      training: orNull(
        object({ model: text, scale: number, iterations: number, iterations_per_s: number, samples_per_s: number, sample: text }),
      ),
      switch_aggregations: orNull(number),
      server_aggregations: orNull(number),
      retransmissions: orNull(number),
      series: object({ aggregation_gbps: list(number) }),
    }),
  ),
  parameter_servers: list(
    object({
      name: text,
      workers: number,
      servers: number,
      flow_times: durations,
      unopened: number,
      last_arrived_s: number,
      delivered_bytes: number,
      sent_packets: number,
      retransmissions: number,
      timeouts: orNull(number),
    }),
  ),
  servers: list(object({ host: text, received_packets: number, received_bytes: number })),
  switches: list(
    object({
      name: text,
      aggregators: number,
      in_use_max: number,
      aggregations: number,
      collisions: orNull(number),
      freed_by_parameters: orNull(number),
      freed_by_resend: orNull(number),
      freed_stale: orNull(number),
    }),
  ),
  background: list(
    object({
      from: text,
      to: text,
      flows: number,
      times: orNull(durations),
      delivered_bytes: number,
      retransmissions: number,
      timeouts: number,
    }),
  ),
  flow_times: orNull(durations),
  links: list(
    object({
      from: text,
      to: text,
      rate_gbps: number,
      sent_bytes: number,
      load: number,
      load_max: number,
      queue_max_bytes: number,
      marked: number,
      dropped: number,
    }),
  ),
});

const series = orNull(list(number));

const recording = object({
  ends: list(number),
  nodes: list(object({ name: text, layer: orNull(number), programmable: boolean, sums: boolean })),
  directions: list(
    object({ from: number, to: number, rate: number, delay: number, busy: series, queued: series, marked: series, dropped: series }),
  ),
  jobs: list(
    object({
      workers: list(number),
      servers: list(number),
      tensors_per_step: number,
      asynchronous: boolean,
      tensors: list(tuple(5)),
      spans: list(tuple(4)),
      computing: list(tuple(3)),
      left_out: object({ tensors: number, spans: number, computing: number }),
    }),
  ),
  parameter_servers: list(object({ workers: list(number), servers: list(number) })),
  times: list(object({ of: text, count: number, unfinished: number, quantiles: list(number) })),
});

const swept: Test = object({
  name: text,
  enough: boolean,
  figures: map(object({ median: number, interval: tuple(2) })),
});

const run = object({
  name: text,
  fanin: object({ version: text, commit: text }),
  toml: text,
  seed: text,
  result,
  recording: orNull(recording),
});

const sweep = object({
  seeds: list(number),
  sweep: map(list(text)),
  figures: list(object({ name: text, label: text })),
  points: list(
    object({
      values: map(text),
      rows: list(swept),
      runs: list(object({ seed: number, wrong: orNull(text), run: orNull(number) })),
    }),
  ),
});

const reproduction = object({
  paper: text,
  summary: text,
  experiments: list(
    object({
      name: text,
      title: text,
      picture: text,
      findings: list(object({ figure: text, what: text, paper: text, agrees_from: text, ours: text, verdict: text })),
    }),
  ),
});

/** A part of the file that is not shown. */
export interface LeftOut {
  /** "Run b.toml, seed 2", "The sweep". */
  name: string;
  /** The first place in the file that does not fit: "runs[1].recording.nodes[0].name". */
  place: string;
}

export interface Reading {
  /** Null where nothing is left to show. */
  report: Report | null;
  left: LeftOut[];
}

/** Takes the parts that fit. Points of a sweep have the new places of their runs. */
export function understood(file: unknown): Reading {
  const whole = object({ command: text, runs: list(() => null) })(file);
  if (whole !== null) return { report: null, left: [{ name: "The report", place: whole }] };
  const told = file as { command: string; runs: unknown[]; sweep?: unknown; reproduction?: unknown };
  const left: LeftOut[] = [];
  const runs: Run[] = [];
  const places = new Map<number, number>();
  told.runs.forEach((one, i) => {
    const wrong = run(one) ?? numbers(one as Run);
    if (wrong === null) {
      places.set(i, runs.length);
      runs.push(one as Run);
    } else {
      const name = (one as Partial<Run> | null)?.name;
      left.push({ name: `Run ${typeof name === "string" && name ? name : `number ${i + 1}`}`, place: wrong ? `runs[${i}].${wrong}` : `runs[${i}]` });
    }
  });
  const other = <T>(name: string, place: string, test: Test, value: unknown): T | null => {
    const wrong = orNull(test)(value ?? null);
    if (wrong === null) return (value as T | undefined) ?? null;
    left.push({ name, place: wrong ? `${place}.${wrong}` : place });
    return null;
  };
  const grid = other<Sweep>("The sweep", "sweep", sweep, told.sweep);
  const points = grid?.points.map((p) => ({ ...p, runs: p.runs.map((r) => ({ ...r, run: places.get(r.run ?? -1) ?? null })) }));
  const reproduced = other<Report["reproduction"]>("The reproduction", "reproduction", reproduction, told.reproduction);
  const report = { command: told.command, runs, sweep: grid && { ...grid, points: points! }, reproduction: reproduced };
  if (runs.length || grid || reproduced) return { report, left };
  return { report: null, left: left.length ? left : [{ name: "The report", place: "runs[0]" }] };
}

/** Numbers of nodes exist, and series have all intervals. */
function numbers({ recording, result }: Run): string | null {
  if (!recording) return null;
  const { nodes, directions, ends, jobs, parameter_servers } = recording;
  const there = (n: number): boolean => nodes[n] !== undefined;
  const fits = (series: number[] | null): boolean => series === null || series.length === ends.length;
  const direction = directions.findIndex(
    (d) => !there(d.from) || !there(d.to) || !fits(d.busy) || !fits(d.queued) || !fits(d.marked) || !fits(d.dropped),
  );
  if (direction >= 0) return `recording.directions[${direction}]`;
  if (directions.length % 2) return "recording.directions";
  if (jobs.length !== result.jobs.length) return "recording.jobs";
  if (parameter_servers.length !== result.parameter_servers.length) return "recording.parameter_servers";
  const placed = (p: { workers: number[]; servers: number[] }): boolean => p.workers.every(there) && p.servers.every(there);
  const job = jobs.findIndex((j) => !placed(j));
  if (job >= 0) return `recording.jobs[${job}]`;
  const flows = parameter_servers.findIndex((p) => !placed(p));
  return flows < 0 ? null : `recording.parameter_servers[${flows}]`;
}
