// A paper's findings beside ours, with the pictures.
import { html, nothing, type TemplateResult } from "lit-html";
import type { Reproduction } from "./contract";
import { table } from "./table";

/** Pictures are in the file: an address elsewhere would be fetched. */
const isPicture = (url: string): boolean => /^data:image\/(png|svg\+xml|webp|jpeg)[;,]/.test(url);

export function reproduction({ paper, summary, experiments }: Reproduction): TemplateResult {
  return html`<h2 id="reproduction-title">${paper}</h2>
    <p class="verdict">${summary}</p>
    ${experiments.map(
      (e) =>
        html`<article class="job" aria-label=${e.title}>
          <h3>${e.title}</h3>
          <p class="hint"><code>${e.name}</code></p>
          ${isPicture(e.picture) ? html`<img class="picture" src=${e.picture} alt=${`${e.title}: the figures are in the table below`} />` : nothing}
          ${e.findings.length
            ? table(
                `Findings of ${e.title}`,
                [
                  { head: "Place", cell: (f) => f.figure },
                  { head: "Finding", cell: (f) => html`<span class="long">${f.what}</span>` },
                  { head: "Paper", number: true, cell: (f) => html`<span class="long">${f.paper}</span>` },
                  { head: "Agrees from", number: true, cell: (f) => f.agrees_from },
                  { head: "Ours", number: true, cell: (f) => f.ours },
                  { head: "Verdict", cell: (f) => html`<b class="finding long ${tone(f.verdict)}">${f.verdict}</b>` },
                ],
                e.findings,
                { hidden: true },
              )
            : nothing}
        </article>`,
    )}`;
}

/** The words are those of lab/fanin_lab/papers/finding.py. */
export function tone(verdict: string): "agrees" | "differs" | "open" {
  if (/^(agrees|in the range)/.test(verdict)) return "agrees";
  return /^(differs|unexplained)/.test(verdict) ? "differs" : "open";
}
