// Tables of servers, switches, background flows and parameter servers, and drops by reason.
import { html, nothing, type TemplateResult } from "lit-html";
import { bytes, bytesPerSecond, count, duration } from "../format";
import type { Durations, Result } from "./contract";
import { type Column, part, table } from "./table";

const MOST = 200;

/** Makes columns for rows of one kind. */
class Columns<Row> {
  constructor(private readonly rows: readonly Row[]) {}

  text(head: string, cell: (row: Row) => string): Column<Row> {
    return { head, cell };
  }

  number(head: string, cell: (row: Row) => string): Column<Row> {
    return { head, number: true, cell };
  }

  /** A count that no row may be able to have. */
  optional(head: string, value: (row: Row) => number | null): Column<Row> | null {
    return this.rows.some((r) => value(r) !== null) ? this.number(head, (r) => count(value(r))) : null;
  }

  times(of: (row: Row) => Durations | null): (Column<Row> | null)[] {
    const show = (head: string, value: (times: Durations) => string): Column<Row> =>
      this.number(head, (r) => {
        const times = of(r);
        return times ? value(times) : "–";
      });
    if (!this.rows.some((r) => of(r))) return [];
    const some = (t: Durations, seconds: number): string => (t.count ? duration(seconds) : "–");
    return [
      show("Time, mean", (t) => some(t, t.mean_s)),
      show("99 %", (t) => some(t, t.p99_s)),
      show("Unfinished", (t) => count(t.unfinished)),
    ];
  }
}

function kind<Row>(
  title: string,
  rows: readonly Row[],
  columns: (make: Columns<Row>) => (Column<Row> | null)[],
): TemplateResult | typeof nothing {
  return part(
    title,
    rows,
    () => html`${table(title, columns(new Columns(rows)), rows.slice(0, MOST), { hidden: true, tall: rows.length > 12 })}
    ${rows.length > MOST ? html`<p class="hint">The first ${MOST} of ${count(rows.length)} are shown.</p>` : nothing}`,
  );
}

export const hasMachines = (r: Result): boolean =>
  [r.servers, r.switches, r.background, r.parameter_servers, r.drops.filter((d) => d.count)].some((list) => list.length);

export function machines(result: Result): TemplateResult {
  return html`${kind("Switches that sum", result.switches, (make) => [
    make.text("Switch", (s) => s.name),
    make.number("Aggregators", (s) => count(s.aggregators)),
    make.number("Most in use", (s) => count(s.in_use_max)),
    make.number("Packets added", (s) => count(s.aggregations)),
    make.optional("Found none free", (s) => s.collisions),
    make.optional("Freed by parameters", (s) => s.freed_by_parameters),
    make.optional("Freed by resends", (s) => s.freed_by_resend),
    make.optional("Freed as left behind", (s) => s.freed_stale),
  ])}
  ${kind("Servers", result.servers, (make) => [
    make.text("Host", (s) => s.host),
    make.number("Packets received", (s) => count(s.received_packets)),
    make.number("Received", (s) => bytes(s.received_bytes)),
    make.number("In the mean", (s) => bytesPerSecond(result.ended_s ? s.received_bytes / result.ended_s : null)),
  ])}
  ${kind("Parameter servers", result.parameter_servers, (make) => [
    make.text("Name", (p) => p.name),
    make.number("Workers", (p) => count(p.workers)),
    make.number("Servers", (p) => count(p.servers)),
    make.number("Flows ended", (p) => count(p.flow_times.count)),
    ...make.times((p) => p.flow_times),
    make.number("Not begun", (p) => count(p.unopened)),
    make.number("Last arrived", (p) => duration(p.last_arrived_s)),
    make.number("Delivered", (p) => bytes(p.delivered_bytes)),
    make.number("Packets sent", (p) => count(p.sent_packets)),
    make.number("Sent again", (p) => count(p.retransmissions)),
    make.optional("Timeouts", (p) => p.timeouts),
  ])}
  ${kind("Background flows", result.background, (make) => [
    make.text("Flow", (f) => `${f.from} → ${f.to}`),
    make.number("Begun", (f) => count(f.flows)),
    ...make.times((f) => f.times),
    make.number("Delivered", (f) => bytes(f.delivered_bytes)),
    make.number("Sent again", (f) => count(f.retransmissions)),
    make.number("Timeouts", (f) => count(f.timeouts)),
  ])}
  ${kind("Packets that did not get through", result.drops.filter((d) => d.count), (make) => [
    make.text("Reason", (d) => d.name),
    make.number("Packets", (d) => count(d.count)),
  ])}`;
}
