// How late each rank begins: quartile boxes, in a table.
import { html, nothing, svg, type TemplateResult } from "lit-html";
import type { Job } from "./contract";
import { ms, percent, several } from "./format";
import type { Late } from "./lateness";
import { tick } from "./view";

const MOST_ROWS = 20;

export function latenessView(job: Job, late: readonly Late[], ranks: ReadonlySet<number>): TemplateResult {
  const rows = late.filter((l) => ranks.has(l.rank));
  if (!rows.length) return html`<p class="empty">No two ranks have ended a collective together yet.</p>`;
  const shown = rows.slice(0, MOST_ROWS);
  // Stragglers that come once must not flatten the boxes of all.
  const most = Math.max(1e-5, ...shown.map((l) => Math.min(l.most, l.high + 3 * (l.high - l.low) + l.median)));
  const step = tick(most, 4);
  const top = Math.ceil(most / step) * step;
  const marks = Array.from({ length: Math.round(top / step) + 1 }, (_, i) => i * step);
  const names = new Map(job.ranks.map((r) => [r.rank, r.name]));
  return html`<div class="scroll">
      <table class="lateness">
        <caption class="sr">
          How much later than the earliest rank each rank begins a collective, over the last
          ${several(Math.max(...shown.map((l) => l.of)), "collective")}, the latest first
        </caption>
        <thead>
          <tr>
            <th scope="col" class="n">Rank</th>
            <th scope="col">Machine</th>
            <th scope="col" class="n">Median</th>
            <th scope="col" class="n wide">Quartiles</th>
            <th scope="col" class="n">Last in</th>
            <th scope="col" class="plot">
              <svg class="scale" width="100%" height="14" aria-hidden="true">
                ${marks.map(
                  (t, i) =>
                    svg`<text class=${i === 0 || i === marks.length - 1 ? "" : "middle"} x=${`${(t / top) * 100}%`} y="11" text-anchor=${i === 0 ? "start" : i === marks.length - 1 ? "end" : "middle"}>${ms(t)}</text>`,
                )}
              </svg>
              <span class="sr">Distribution</span>
            </th>
          </tr>
        </thead>
        <tbody>
          ${shown.map((l) => row(l, names.get(l.rank) ?? "", top, marks))}
        </tbody>
      </table>
    </div>
    <p class="hint">
      Boxes are quartiles with the median. Lines reach to the least and the most.
      ${rows.length > shown.length ? html`The ${shown.length} latest of ${several(rows.length, "rank")} are shown.` : nothing}
    </p>`;
}

function row(l: Late, name: string, top: number, marks: number[]): TemplateResult {
  const x = (seconds: number): string => `${(Math.min(seconds, top) / top) * 100}%`;
  const wide = (from: number, to: number): string => `${Math.max(0.4, ((Math.min(to, top) - Math.min(from, top)) / top) * 100)}%`;
  return html`<tr>
    <th scope="row" class="n">${l.rank}</th>
    <td class="name" title=${name}>${name}</td>
    <td class="n">${ms(l.median)}</td>
    <td class="n wide">${ms(l.low)} – ${ms(l.high)}</td>
    <td class="n">${percent(l.last)}</td>
    <td class="plot">
      <svg class="box" width="100%" height="18" role="img" aria-label=${`From ${ms(l.least)} to ${ms(l.most)}`}>
        ${marks.map((t) => svg`<line class="grid" x1=${x(t)} x2=${x(t)} y1="0" y2="18"></line>`)}
        <line class="whisker" x1=${x(l.least)} x2=${x(l.most)} y1="9" y2="9"></line>
        <rect x=${x(l.low)} y="3" width=${wide(l.low, l.high)} height="12"></rect>
        <line class="median" x1=${x(l.median)} x2=${x(l.median)} y1="1" y2="17"></line>
      </svg>
    </td>
  </tr>`;
}
