// A job's ranks: all of them by machine, or the machines and the latest ranks where there are many.
import { html, nothing, type TemplateResult } from "lit-html";
import type { Job, Rank } from "./contract";
import { count, ms, percent, rankList, ranges, several } from "./format";

export const MANY = 64;
const MOST_LATEST = 20;
const MOST_MACHINES = 50;

export interface MachineRanks {
  key: string;
  name: string;
  ranks: Rank[];
}

const byName = new Intl.Collator("en", { numeric: true }).compare;

export function byMachine(ranks: readonly Rank[]): MachineRanks[] {
  const machines = new Map<string, MachineRanks>();
  for (const rank of ranks) {
    const found = machines.get(rank.machine);
    if (found) found.ranks.push(rank);
    else machines.set(rank.machine, { key: rank.machine, name: rank.name, ranks: [rank] });
  }
  return [...machines.values()].sort((a, b) => byName(a.name, b.name));
}

/** By a rank's number, or a part of its machine's name or address. */
export function matching(ranks: readonly Rank[], filter: string): Rank[] {
  const wanted = filter.trim().toLowerCase();
  if (!wanted) return [...ranks];
  const number = /^\d+$/.test(wanted) ? Number(wanted) : null;
  return ranks.filter(
    (r) =>
      (number !== null && r.ranks.includes(number)) ||
      [r.name, r.address, r.machine].some((text) => text.toLowerCase().includes(wanted)),
  );
}

const lateOf = (r: Rank): number => r.late?.median ?? 0;

/** The latest first, then those that sums wait for now. */
export function latestFirst(ranks: readonly Rank[]): Rank[] {
  return [...ranks].sort((a, b) => lateOf(b) - lateOf(a) || b.waited_for - a.waited_for || a.rank - b.rank);
}

export function ranksView(job: Job, ranks: Rank[]): TemplateResult {
  if (!ranks.length) return html`<p class="empty">${job.ranks.length ? "No rank matches the filter." : "No rank is there yet."}</p>`;
  const machines = byMachine(ranks);
  if (ranks.length <= MANY) {
    return rankTable(
      several(machines.length, "machine"),
      machines.flatMap((m) => m.ranks.sort((a, b) => a.rank - b.rank)),
    );
  }
  return html`${machineTable(machines)} ${rankTable(`The ${MOST_LATEST} latest ranks`, latestFirst(ranks).slice(0, MOST_LATEST))}`;
}

function rankTable(caption: string, ranks: Rank[]): TemplateResult {
  return html`<div class="scroll">
    <table>
      <caption>${caption}</caption>
      <thead>
        <tr>
          <th scope="col">Machine</th>
          <th scope="col">Ranks</th>
          <th scope="col" class="wide">Address</th>
          <th scope="col" class="n wide">Round trip</th>
          <th scope="col" class="n">Late</th>
          <th scope="col" class="n">Last in</th>
          <th scope="col" class="n">Waited for</th>
        </tr>
      </thead>
      <tbody>
        ${ranks.map(
          (r) =>
            html`<tr class=${r.left ? "gone" : ""}>
              <th scope="row" class="name" title=${`${r.name} (${r.machine})`}>${r.name}</th>
              <td class="name" title=${rankList(r.ranks)}>${ranges(r.ranks)}${r.left ? html` <span class="badge">left</span>` : nothing}</td>
              <td class="name wide" title=${r.address}>${r.address}</td>
              <td class="n wide">${ms(r.round_trip)}</td>
              <td class="n">${ms(r.late?.median)}</td>
              <td class="n">${percent(r.late?.last)}</td>
              <td class="n">${percent(r.waited_for)}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function machineTable(machines: MachineRanks[]): TemplateResult {
  const latest = (m: MachineRanks): number => Math.max(...m.ranks.map(lateOf));
  const shown = [...machines].sort((a, b) => latest(b) - latest(a)).slice(0, MOST_MACHINES);
  return html`<div class="scroll tall" tabindex="0" role="region" aria-label="Machines">
    <table>
      <caption>
        ${several(machines.length, "machine")}${machines.length > shown.length ? `, the ${shown.length} latest` : ", the latest first"}
      </caption>
      <thead>
        <tr>
          <th scope="col">Machine</th>
          <th scope="col">Ranks</th>
          <th scope="col" class="n">Count</th>
          <th scope="col" class="n">Latest rank</th>
          <th scope="col" class="n">Late</th>
          <th scope="col" class="n">Waited for</th>
        </tr>
      </thead>
      <tbody>
        ${shown.map((m) => {
          const all = m.ranks.flatMap((r) => r.ranks);
          const [first] = latestFirst(m.ranks);
          return html`<tr>
            <th scope="row" class="name" title=${`${m.name} (${m.key})`}>${m.name}</th>
            <td class="name" title=${rankList(all)}>${ranges(all)}</td>
            <td class="n">${count(all.length)}</td>
            <td class="n">${first.rank}</td>
            <td class="n">${ms(first.late?.median)}</td>
            <td class="n">${percent(Math.max(...m.ranks.map((r) => r.waited_for)))}</td>
          </tr>`;
        })}
      </tbody>
    </table>
  </div>`;
}
