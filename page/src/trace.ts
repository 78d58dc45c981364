// The timeline as Chrome's trace format, which Perfetto and chrome://tracing open.
import type { Job } from "./contract";
import { save } from "./save";
import { picture } from "./timeline";

export interface TraceEvent {
  name: string;
  ph: "X" | "M";
  pid: number;
  tid: number;
  ts?: number;
  dur?: number;
  cat?: string;
  args: { [name: string]: string | number };
}

/** Threads of a rank: events of one thread must not overlap. */
const LANES = 8;

export function trace(job: Job): { traceEvents: TraceEvent[]; displayTimeUnit: "ms" } {
  const events: TraceEvent[] = [];
  const machines = new Map<string, number>();
  const names = new Map<number, { pid: number; name: string }>();
  for (const rank of job.ranks) {
    let pid = machines.get(rank.machine);
    if (pid === undefined) {
      pid = machines.size + 1;
      machines.set(rank.machine, pid);
      events.push({ name: "process_name", ph: "M", pid, tid: 0, args: { name: rank.name } });
    }
    names.set(rank.rank, { pid, name: rank.name });
  }
  const drawn = picture(job.sums);
  for (const [rank, spans] of drawn.rows) {
    const pid = names.get(rank)?.pid ?? 0;
    const ends = new Map<number, number>();
    for (const span of spans) {
      const tid = rank * LANES + span.lane;
      if (!ends.has(tid)) {
        ends.set(tid, 0);
        const lane = span.lane ? `, ${span.lane + 1}` : "";
        events.push({ name: "thread_name", ph: "M", pid, tid, args: { name: `rank ${rank}${lane}` } });
        events.push({ name: "thread_sort_index", ph: "M", pid, tid, args: { sort_index: tid } });
      }
      const { number, collective, dtype, bytes } = span.sum;
      const part = (name: string, from: number, to: number, args: TraceEvent["args"]): void => {
        // Rounded times must not make events overlap.
        const ts = Math.max(Math.round(from * 1e6), ends.get(tid)!);
        const dur = Math.round(to * 1e6) - ts;
        if (dur <= 0) return;
        events.push({ name, ph: "X", cat: "fanin", pid, tid, ts, dur, args });
        ends.set(tid, ts + dur);
      };
      const args = { number, bytes, dtype };
      // Computing beside an overlapping collective is drawn once, in the first lane.
      if (span.lane === 0) part("computing", span.from, span.began, { before: number });
      part(`${collective}: waiting`, span.began, span.last, args);
      part(collective, Math.max(span.began, span.last), span.ended, args);
    }
  }
  return { traceEvents: events, displayTimeUnit: "ms" };
}

/** A name for the file that any system takes. */
export function fileName(job: string): string {
  return `fanin-${job.replace(/[^A-Za-z0-9._-]+/g, "-").slice(0, 60)}.trace.json`;
}

export function download(job: Job): void {
  save(fileName(job.name), JSON.stringify(trace(job)), "application/json");
}
