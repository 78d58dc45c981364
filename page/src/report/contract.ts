// The data of a report: one file that `fanin sim --report` and `fanin reproduce --report` write.
// Times are seconds of virtual time. Numbers of nodes are indices into `Recording.nodes`.
// `page/fixtures/report.json` is what `fanin sim page/fixtures/report.toml --report` wrote.

export interface Report {
  /** The command that wrote it. */
  command: string;
  /** One; with --against two, the other one last; those of a sweep or a reproduction. */
  runs: Run[];
  sweep: Sweep | null;
  reproduction: Reproduction | null;
}

export interface Run {
  /** "rack.toml, seed 1". */
  name: string;
  fanin: { version: string; commit: string };
  /** The scenario as one file, which `fanin sim` plays again. */
  toml: string;
  /** A decimal number: seeds have 64 bits, more than a number here holds. */
  seed: string;
  result: Result;
  /** Null where a file of figures alone was given, or where recordings would make the report too large. */
  recording: Recording | null;
}

/** What happened over time, and where. */
export interface Recording {
  /** Ends of the intervals; the first one begins at 0. Each series has a value for each interval. */
  ends: number[];
  nodes: Node[];
  /** Both directions of each link: 2 i and 2 i + 1 belong to one link. */
  directions: Direction[];
  /** In the order of `Result.jobs`. */
  jobs: RecordedJob[];
  /** In the order of `Result.parameter_servers`. */
  parameter_servers: { workers: number[]; servers: number[] }[];
  times: Distribution[];
}

export interface Node {
  name: string;
  /** Null for hosts; 0 for switches next to hosts. */
  layer: number | null;
  /** Whether machines that sum may live on it, and whether one does. */
  programmable: boolean;
  sums: boolean;
}

/** A series is null where all its values are 0. */
export interface Direction {
  from: number;
  to: number;
  /** Bits a second. */
  rate: number;
  delay: number;
  /** The part of each interval in which it was busy, in thousandths. */
  busy: number[] | null;
  /** Bytes that waited to be sent into it, in the mean over each interval. */
  queued: number[] | null;
  /** Packets that were marked, and that did not get through, in each interval. */
  marked: number[] | null;
  dropped: number[] | null;
}

export interface RecordedJob {
  /** The node of each rank. */
  workers: number[];
  /** Nodes of its servers or summation services; switches that sum are every job's. */
  servers: number[];
  /** Tensors of an iteration; 1 where each tensor is a step of its own. */
  tensors_per_step: number;
  /** Its workers wait for nobody: a tensor's sum does not need all ranks. */
  asynchronous: boolean;
  /** Each tensor over all ranks: its number, when the first and the last rank submitted it, and when the first and the last had its sum. */
  tensors: [number, number, number, number, number][];
  /** Each tensor of a rank: rank, number, submitted, summed. */
  spans: [number, number, number, number][];
  /** Stretches in which a rank computed, without its pauses, up to the end of the run: rank, from, to. */
  computing: [number, number, number][];
  /** Entries of each list that did not fit, for `computing` its stretches; the lists have the first in time. */
  left_out: { tensors: number; spans: number; computing: number };
}

/** How long things of one kind took. */
export interface Distribution {
  /** "tensors of job 0", "flows h1 to h2". */
  of: string;
  count: number;
  /** How many had begun and not ended. */
  unfinished: number;
  /** Evenly spaced quantiles, from the shortest to the longest; at most 257. All times, if there are no more. */
  quantiles: number[];
}

/** `result` of `fanin sim --json`; crates/sim/src/workload/report.rs explains each field. */
export interface Result {
  title: string;
  /** Rounded where it is above 2^53: `Run.seed` is exact. */
  seed: number;
  ended_s: number;
  warm_up_s: number;
  interval_s: number;
  last_interval_s: number;
  packet_hops: number;
  events: number;
  digest: string;
  drops: { name: string; count: number }[];
  jobs: Job[];
  parameter_servers: ParameterServer[];
  servers: { host: string; received_packets: number; received_bytes: number }[];
  switches: {
    name: string;
    aggregators: number;
    in_use_max: number;
    aggregations: number;
    collisions: number | null;
    freed_by_parameters: number | null;
    freed_by_resend: number | null;
    freed_stale: number | null;
  }[];
  background: Flow[];
  flow_times: Durations | null;
  links: {
    from: string;
    to: string;
    rate_gbps: number;
    sent_bytes: number;
    load: number;
    load_max: number;
    queue_max_bytes: number;
    marked: number;
    dropped: number;
  }[];
}

export interface Durations {
  count: number;
  unfinished: number;
  mean_s: number;
  p95_s: number;
  p99_s: number;
  p999_s: number;
  max_s: number;
}

export interface Job {
  name: string;
  system: string;
  workers: number;
  finished: boolean;
  finished_s: number | null;
  died_s: number | null;
  unfinished: string | null;
  /** Gbit/s that a worker received. It says something only where `measurement.enough`. */
  aggregation_gbps: number;
  measurement: { window_s: number; completed: number; needed: number; enough: boolean };
  tensors: number;
  tensor_times: Durations;
  training: {
    model: string;
    scale: number;
    iterations: number;
    iterations_per_s: number;
    samples_per_s: number;
    sample: string;
  } | null;
  /** Counts that its system has; others are null. */
  switch_aggregations: number | null;
  server_aggregations: number | null;
  retransmissions: number | null;
  series: { aggregation_gbps: number[] };
}

export interface ParameterServer {
  name: string;
  workers: number;
  servers: number;
  flow_times: Durations;
  unopened: number;
  last_arrived_s: number;
  delivered_bytes: number;
  sent_packets: number;
  retransmissions: number;
  timeouts: number | null;
}

export interface Flow {
  from: string;
  to: string;
  flows: number;
  times: Durations | null;
  delivered_bytes: number;
  retransmissions: number;
  timeouts: number;
}

/** `sweep.json` of `fanin sim --sweep`. */
export interface Sweep {
  seeds: number[];
  /** Each parameter's values, as they were written. */
  sweep: { [parameter: string]: string[] };
  /** The most important first: a name, and what stands above its column: "gbps", "Gbit/s". */
  figures: { name: string; label: string }[];
  points: Point[];
}

export interface Point {
  /** By parameter. */
  values: { [parameter: string]: string };
  /** Figures are over all seeds that came to their end. */
  rows: SweptRow[];
  runs: { seed: number; wrong: string | null; /** Its place in `Report.runs`. */ run: number | null }[];
}

/** A job, or an entry of flows. A figure that it does not have is missing. */
export interface SweptRow {
  name: string;
  enough: boolean;
  figures: { [figure: string]: { median: number; interval: [number, number] } };
}

export interface Reproduction {
  paper: string;
  /** "120 of 299 agree", in words. */
  summary: string;
  experiments: Experiment[];
}

export interface Experiment {
  name: string;
  title: string;
  /** A data: URL of its plot. */
  picture: string;
  /** In words, with units: its place in the paper, what it is, the paper's figure, where ours agrees with that, ours. */
  findings: { figure: string; what: string; paper: string; agrees_from: string; ours: string; verdict: string }[];
}
