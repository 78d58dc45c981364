// The answer to `GET page/state?since=SECONDS`, which `crates/controller/src/page/view.rs` writes.
// Times are seconds since 1970 by the clock of whoever serves the page; durations are seconds.
// `page/fixtures/state.json` is one such answer: tests of both sides read it.

export interface State {
  now: number;
  version: string;
  /** Who serves: "switch 10.0.0.9:4800", "rank 0 of gpt", "fanin page". */
  server: string;
  /** Seconds between two samples of the history. */
  every: number;
  /** Seconds of history that are kept at most. */
  kept: number;
  services: Service[];
  jobs: Job[];
  /** Jobs beyond those that are told (100 at most are). */
  hidden_jobs: number;
  /** What people should know of services: "silent", "pool", "version". */
  words: Word[];
  /** Oldest first; 500 at most. */
  events: Event[];
  history: History;
}

/** Whatever sums: a switch, a part of a rank's process, or a switch on the way to one (a relay). */
export interface Service {
  address: string;
  /** Of a relay: whom it sends to. */
  upstream: string | null;
  /** Why nothing is known of it now; null where it answers. */
  silent: string | null;
  protocol: string;
  version: string;
  /** Cores that sum. */
  shards: number;
  /** Memory of each shard, in units of 256 elements. Null for relays. */
  pool: { units: number; free: number } | null;
  /** What its link carries each way, bits a second, where it is known. */
  rate: number | null;
  /** What goes over its link now, bits a second, headers included; null before the second sample. */
  received: number | null;
  sent: number | null;
}

export interface Job {
  name: string;
  world_size: number;
  state: "gathering" | "running" | "aborted";
  /** Of an aborted one. */
  reason: string | null;
  /** Ranks that are not there yet (gathering), or that left (running). */
  missing: number[];
  left: number[];
  generation: number;
  protocol: string;
  wire_dtype: string;
  security: string;
  /** Packets of a rank that may be on the way, over all shards. */
  window: number;
  /** How its sums are shared, as the plan has it. Empty where the ranks tell nothing. */
  shares: Share[];
  plan: Plan | null;
  /** One a process that speaks for itself, or for all ranks of its machine. */
  ranks: Rank[];
  /** Since the job began, over all collectives of a rank (the first that tells). */
  totals: Total[];
  /** Collectives of a step, where they repeat. */
  sums_per_step: number | null;
  /** Now; null before the second sample. Steps a second, and the part of the time in which a rank waits for sums (0 to 1). */
  steps: number | null;
  in_sums: number | null;
  /** The last collectives, oldest first, 200 at most; not all where there are many a second. */
  sums: Sum[];
  /** What people should know, most important first. */
  words: Word[];
}

export interface Share {
  service: string;
  /** 0 to 1. */
  share: number;
  /** The rank in whose process it is. */
  host: number | null;
  /** The part of the job's bytes that it really summed of late, 0 to 1; null where it is not asked. */
  measured: number | null;
}

/** Times are seconds for a byte as it travels. */
export interface Plan {
  predicted: number | null;
  /** What a ring, such as Gloo's, takes on the same links for the elements that travel in a byte here. */
  ring: number | null;
  /** The link that bounds it, in words. */
  bound: string | null;
  /** Where the rates are from, in words. */
  links: string | null;
  measured: number | null;
  /** By how much a service misses its share, as a fraction. */
  imbalance: number;
}

export interface Rank {
  rank: number;
  /** The ranks that it speaks for, itself among them. */
  ranks: number[];
  machine: string;
  /** The machine's name for people. */
  name: string;
  address: string;
  /** The relay next to it, where one tells so. */
  via: string | null;
  left: boolean;
  round_trip: number | null;
  /** The part of what is being summed now that waits for it and not for all, 0 to 1. */
  waited_for: number;
  /** Of its last collectives: how much later than the earliest rank it began (quartiles), and in which part of them it was the last. */
  late: { low: number; median: number; high: number; last: number; of: number } | null;
}

export interface Total {
  collective: string;
  dtype: string;
  count: number;
  bytes: number;
}

/** A collective: all ranks end together, so a rank that took less began later. */
export interface Sum {
  number: number;
  ended: number;
  bytes: number;
  collective: string;
  dtype: string;
  /** [rank, how long it took there, how long that rank had computed before: since its last collective ended]. */
  ranks: [number, number, number][];
}

export interface Word {
  /** As in logs and metrics: "late", "stands", "losses", "slow_link", "waits", "aborted", "silent", "pool", "version". */
  name: string;
  severity: "note" | "warning";
  text: string;
  /** What mends it. */
  cure: string | null;
}

export interface Event {
  at: number;
  /** As in logs: "job_started", "rank_joined", "rank_left", "job_aborted", "job_ended", "job_set_up_again", "service_silent", "service_back", "taken_over", "planned_again", "refused". */
  name: string;
  severity: "note" | "warning";
  job: string | null;
  service: string | null;
  text: string;
}

/** Samples after `since`, oldest first. Series have a value, or null, for each time. */
export interface History {
  times: number[];
  services: { [address: string]: ServiceSeries };
  jobs: { [name: string]: JobSeries };
}

export interface ServiceSeries {
  received: (number | null)[];
  sent: (number | null)[];
  /** Packets a second. */
  resent: (number | null)[];
  dropped: (number | null)[];
}

export interface JobSeries {
  /** Bytes of gradients a second that are summed. */
  summed: (number | null)[];
  resent: (number | null)[];
  lost: (number | null)[];
  steps: (number | null)[];
  in_sums: (number | null)[];
}
