// How a job's sums are shared, by plan and as measured; and its bytes by collective.
import { html, nothing, type TemplateResult } from "lit-html";
import type { Job, Share, Total } from "./contract";
import { bytes, count, msPerMB, percent } from "./format";
import { facts } from "./panel";
import { gain } from "./time";

const MOST = 40;

export function sharesView(job: Job): TemplateResult {
  const { plan } = job;
  const shown = [...job.shares].sort((a, b) => b.share - a.share).slice(0, MOST);
  return html`${job.shares.length
    ? html`<div class=${shown.length > 12 ? "scroll tall" : "scroll"} tabindex=${shown.length > 12 ? 0 : nothing} role="region" aria-label="Shares">
        <table>
          <caption class="sr">Shares of the services</caption>
          <thead>
            <tr>
              <th scope="col">Service</th>
              <th scope="col">In</th>
              <th scope="col" class="n">Plan</th>
              <th scope="col" class="n">Measured</th>
              <th scope="col" class="bars"><span class="sr">Bars</span></th>
            </tr>
          </thead>
          <tbody>
            ${shown.map(shareRow)}
          </tbody>
        </table>
      </div>
      <p class="hint">
        The upper bar is the plan, the lower is measured.
        ${job.shares.length > shown.length ? html`The ${shown.length} largest of ${count(job.shares.length)} shares are shown.` : nothing}
      </p>`
    : html`<p class="empty">The ranks have told no shares yet.</p>`}
  ${plan
    ? facts([
        ["Predicted", msPerMB(plan.predicted)],
        ["Measured", msPerMB(plan.measured)],
        ["A ring, as predicted", msPerMB(plan.ring)],
        ["Bound by", plan.bound ?? "–"],
        ["Rates", plan.links ?? "–"],
        ["Largest miss of a share", percent(plan.imbalance)],
      ])
    : nothing}
  ${plan && gain(plan) ? html`<p>${gain(plan)}</p>` : nothing}`;
}

function shareRow({ service, share, host, measured }: Share): TemplateResult {
  const wide = (part: number): string => `${Math.max(0, Math.min(1, part)) * 100}%`;
  return html`<tr>
    <th scope="row" class="name" title=${service}>${service}</th>
    <td class="name">${host === null ? "a switch" : `rank ${host}`}</td>
    <td class="n">${percent(share)}</td>
    <td class="n">${percent(measured)}</td>
    <td class="bars">
      <svg class="bar" width="100%" height="14" aria-hidden="true">
        <rect class="plan" y="1" width=${wide(share)} height="5"></rect>
        <rect class="measured" y="8" width=${wide(measured ?? 0)} height="5"></rect>
      </svg>
    </td>
  </tr>`;
}

export function totalsView(totals: Total[]): TemplateResult {
  if (!totals.length) return html`<p class="empty">Nothing has been summed yet.</p>`;
  return html`<div class="scroll">
    <table>
      <caption class="sr">Collectives since the job began</caption>
      <thead>
        <tr>
          <th scope="col">Collective</th>
          <th scope="col">Type</th>
          <th scope="col" class="n">Count</th>
          <th scope="col" class="n">Bytes</th>
        </tr>
      </thead>
      <tbody>
        ${[...totals].sort((a, b) => b.bytes - a.bytes).map(
          (t) =>
            html`<tr>
              <th scope="row" class="name" title=${t.collective}>${t.collective}</th>
              <td class="name" title=${t.dtype}>${t.dtype}</td>
              <td class="n">${count(t.count)}</td>
              <td class="n">${bytes(t.bytes)}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
