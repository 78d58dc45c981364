// Tables of figures.
import { html, nothing, type TemplateResult } from "lit-html";

export interface Column<Row> {
  head: unknown;
  /** Numbers stand at the right. */
  number?: boolean;
  cell: (row: Row, index: number) => unknown;
}

/** The first column heads its rows. Columns that are null are left out. */
export function table<Row>(caption: string, columns: (Column<Row> | null)[], rows: readonly Row[], more: { hidden?: boolean; tall?: boolean } = {}): TemplateResult {
  const there = columns.filter((c) => c !== null);
  const { hidden = false, tall = false } = more;
  return html`<div class=${tall ? "scroll tall" : "scroll"} tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class=${hidden ? "sr" : ""}>${caption}</caption>
      <thead>
        <tr>${there.map((c) => html`<th scope="col" class=${c.number ? "n" : ""}>${c.head}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          (row, r) =>
            html`<tr>
              ${there.map((c, i) =>
                i
                  ? html`<td class=${c.number ? "n" : ""}>${c.cell(row, r)}</td>`
                  : html`<th scope="row" class="name">${c.cell(row, r)}</th>`,
              )}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** A heading with what follows it; nothing without rows. */
export function part(title: string, rows: readonly unknown[], content: () => TemplateResult): TemplateResult | typeof nothing {
  return rows.length ? html`<h4>${title}</h4>${content()}` : nothing;
}
