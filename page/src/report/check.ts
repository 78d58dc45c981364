// Whether a file has the shape of contract.ts. Names what it misses; extra fields are welcome.
import type { Report } from "./contract";
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
  servers: list(object({ host: text, received_packets: number, received_bytes: number, received_gbps: list(number) })),
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
      delivered_gbps: list(number),
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

const report = object({
  command: text,
  runs: list(
    object({
      name: text,
      fanin: object({ version: text, commit: text }),
      toml: text,
      seed: number,
      result,
      recording: orNull(recording),
    }),
  ),
  sweep: orNull(
    object({
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
    }),
  ),
  reproduction: orNull(
    object({
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
    }),
  ),
});

/** The first place that does not fit; null where the file is understood. */
export function misses(file: unknown): string | null {
  const wrong = report(file);
  if (wrong !== null) return wrong;
  const { runs, sweep } = file as Report;
  for (let i = 0; i < runs.length; i++) {
    const inner = numbers(runs[i]);
    if (inner !== null) return `runs[${i}].${inner}`;
  }
  const point = sweep?.points.findIndex((p) => p.runs.some(({ run }) => run !== null && !runs[run])) ?? -1;
  return point < 0 ? null : `sweep.points[${point}].runs`;
}

/** Numbers of nodes exist, and series have all intervals. */
function numbers({ recording, result }: Report["runs"][number]): string | null {
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
