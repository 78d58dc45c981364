// Whether an answer has the shape of contract.ts. Names what it misses; extra fields are welcome.
import { boolean, list, map, number, object, orNull, text, tuple } from "./shape";

const series = list(orNull(number));

const word = object({ name: text, severity: text, text, cure: orNull(text) });

const state = object({
  now: number,
  version: text,
  server: text,
  every: number,
  kept: number,
  hidden_jobs: number,
  words: list(word),
  services: list(
    object({
      address: text,
      upstream: orNull(text),
      silent: orNull(text),
      protocol: text,
      version: text,
      shards: number,
      pool: orNull(object({ units: number, free: number })),
      rate: orNull(number),
      received: orNull(number),
      sent: orNull(number),
    }),
  ),
  jobs: list(
    object({
      name: text,
      world_size: number,
      state: text,
      reason: orNull(text),
      missing: list(number),
      left: list(number),
      generation: number,
      protocol: text,
      wire_dtype: text,
      security: text,
      window: number,
      shares: list(
        object({ service: text, share: number, host: orNull(number), measured: orNull(number) }),
      ),
      plan: orNull(
        object({
          predicted: orNull(number),
          ring: orNull(number),
          bound: orNull(text),
          links: orNull(text),
          measured: orNull(number),
          imbalance: number,
        }),
      ),
      ranks: list(
        object({
          rank: number,
          ranks: list(number),
          machine: text,
          name: text,
          address: text,
          via: orNull(text),
          left: boolean,
          round_trip: orNull(number),
          waited_for: number,
          late: orNull(object({ low: number, median: number, high: number, last: number, of: number })),
        }),
      ),
      totals: list(object({ collective: text, dtype: text, count: number, bytes: number })),
      sums_per_step: orNull(number),
      steps: orNull(number),
      in_sums: orNull(number),
      sums: list(
        object({
          number,
          ended: number,
          bytes: number,
          collective: text,
          dtype: text,
          ranks: list(tuple(3)),
        }),
      ),
      words: list(word),
    }),
  ),
  events: list(
    object({ at: number, name: text, severity: text, job: orNull(text), service: orNull(text), text }),
  ),
  history: object({
    times: list(number),
    services: map(object({ received: series, sent: series, resent: series, dropped: series })),
    jobs: map(object({ summed: series, resent: series, lost: series, steps: series, in_sums: series })),
  }),
});

/** The first field that is missing or of another type; null where the answer is understood. */
export function misses(answer: unknown): string | null {
  return state(answer);
}

/** What an answer that is not understood says of its version. */
export function versionOf(answer: unknown): string {
  const version = (answer as { version?: unknown } | null)?.version;
  return typeof version === "string" ? version : "unknown";
}
