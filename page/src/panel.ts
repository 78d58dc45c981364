// The figures of what is chosen on the map.
import { html, nothing, type TemplateResult } from "lit-html";
import { Charts } from "./charts";
import { bits, capital, count, ms, percent, ranges, rankList, several } from "./format";
import { type Graph, type Link, linkText, load, type Machine, type MapNode, type Summer } from "./map-model";
import type { Store, Values } from "./store";

const MOST_MEMBERS = 30;

export class Panel {
  private charts: Charts | null = null;
  private charted = "";
  private said = "";

  constructor(
    private readonly changed: () => void,
    private readonly close: () => void,
  ) {}

  template(chosen: MapNode | Link | null, graph: Graph, store: Store, now: number): TemplateResult {
    const service = chosen && !("from" in chosen) && chosen.summers.length === 1 ? chosen.summers[0] : null;
    const charts = this.chartsOf(service, store, now);
    const title = !chosen ? "Links of the services" : "from" in chosen ? `${chosen.from.title} → ${chosen.to.title}` : chosen.title;
    // A screen reader hears what was chosen, not each second's new figures.
    const id = chosen?.id ?? "";
    if (id !== this.said.split("\n")[0]) this.said = `${id}\n${chosen ? summary(chosen) : "Nothing is chosen."}`;
    return html`<aside class="panel" aria-label="Figures of what is chosen on the map">
      <p class="sr" aria-live="polite">${this.said.slice(this.said.indexOf("\n") + 1)}</p>
      <h3 title=${title}>${title}</h3>
      ${chosen ? html`<button type="button" class="close" @click=${this.close} aria-label="Close the figures">×</button>` : nothing}
      ${!chosen
        ? overview(graph)
        : "from" in chosen
          ? linkFigures(chosen)
          : chosen.kind === "machine"
            ? machines(chosen.machines)
            : service
              ? serviceFigures(service, graph)
              : summers(chosen.summers)}
      ${charts ? charts.template() : nothing}
    </aside>`;
  }

  private chartsOf(service: Summer | null, store: Store, now: number): Charts | null {
    const series = service ? store.services.get(service.address) : undefined;
    if (this.charted !== (series ? service!.address : "")) {
      this.charts?.close();
      this.charts = series
        ? new Charts(
            [
              {
                title: "On its link",
                show: bits,
                lines: [
                  { label: "in", colour: "summing" },
                  { label: "out", colour: "waiting", dash: [5, 3] },
                ],
              },
            ],
            this.changed,
          )
        : null;
      this.charted = series ? service!.address : "";
    }
    if (series) this.charts?.set(store.times, [[series.received, series.sent] as Values[]], now);
    return this.charts;
  }
}

function summary(chosen: MapNode | Link): string {
  if ("from" in chosen) return linkText(chosen);
  if (chosen.kind === "machine") return `${chosen.title}: ${several(chosen.machines.length, "machine")}.`;
  const { told } = chosen.summers[0];
  if (chosen.summers.length > 1) return `${chosen.title}: ${several(chosen.summers.length, "service")}.`;
  return `${chosen.title}: in ${bits(told?.received)}, out ${bits(told?.sent)}, ${percent(load(told))} full.`;
}

type Fact = [string, unknown] | null;

export function facts(list: Fact[]): TemplateResult {
  return html`<dl class="facts">
    ${list.map((f) => (f ? html`<div><dt>${f[0]}</dt><dd>${f[1]}</dd></div>` : nothing))}
  </dl>`;
}

function overview(graph: Graph): TemplateResult {
  const all = [...graph.columns.relay, ...graph.columns.service].flatMap((n) => n.summers);
  if (!all.length) return html`<p class="empty">No service is known.</p>`;
  const shown = all.sort((a, b) => (load(b.told) ?? -1) - (load(a.told) ?? -1)).slice(0, MOST_MEMBERS);
  return html`${summerTable(shown)}
    ${all.length > shown.length ? html`<p class="hint">The fullest ${shown.length} of ${count(all.length)} are shown.</p>` : nothing}
    <p class="hint">Choose a machine, a service or a link on the map for its figures.</p>`;
}

function summerTable(list: Summer[]): TemplateResult {
  return html`<div class="scroll">
    <table>
      <caption class="sr">Services and what their links carry</caption>
      <thead>
        <tr><th scope="col">Service</th><th scope="col" class="n">In</th><th scope="col" class="n">Out</th><th scope="col" class="n">Full</th></tr>
      </thead>
      <tbody>
        ${list.map(
          ({ address, told }) =>
            html`<tr>
              <th scope="row" class="name" title=${address}>${address}</th>
              ${told?.silent != null
                ? html`<td colspan="3" class="text">${told.silent}</td>`
                : html`<td class="n">${bits(told?.received)}</td><td class="n">${bits(told?.sent)}</td><td class="n">${percent(load(told))}</td>`}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function summers(list: Summer[]): TemplateResult {
  return html`${summerTable(list.slice(0, MOST_MEMBERS))}
  ${list.length > MOST_MEMBERS ? html`<p class="hint">${count(list.length - MOST_MEMBERS)} more are in this group.</p>` : nothing}`;
}

function serviceFigures({ address, told, host }: Summer, graph: Graph): TemplateResult {
  if (!told) return html`<p class="empty">A plan names ${address}, and the service here knows no more of it.</p>`;
  const carried = graph.links
    .filter((l) => l.to.summers.some((s) => s.address === address))
    .flatMap((l) => l.carried)
    .filter((c, i, all) => all.findIndex((o) => o.job === c.job) === i);
  return facts([
    told.silent === null ? null : ["Silent", told.silent],
    ["Kind", host ? `in rank ${host.rank} of ${host.job}` : told.upstream === null ? "a switch" : `a relay to ${told.upstream}`],
    ["In", bits(told.received)],
    ["Out", bits(told.sent)],
    ["Rate of its link", bits(told.rate)],
    ["Full", percent(load(told))],
    ["Protocol", told.protocol],
    ["Version", told.version],
    ["Cores that sum", count(told.shards)],
    told.pool
      ? ["Memory in use", `${percent(1 - told.pool.free / Math.max(1, told.pool.units))} of ${count(told.pool.units)} units a core`]
      : null,
    ...carried.map((c): Fact => [`Share of ${c.job}`, percent(c.share)]),
  ]);
}

function linkFigures(link: Link): TemplateResult {
  if (link.local) return html`<p>The service is in a rank of this machine. No network carries these gradients.</p>
    ${expectations(link)}`;
  return html`${link.certain ? nothing : html`<p>Nobody told that packets go this way. It is the only one, or one of several.</p>`}
    ${facts([
      [`To ${link.to.title}`, `about ${bits(link.up)}`],
      [`To ${link.from.title}`, `about ${bits(link.down)}`],
      ["Rate at the service", bits(link.rate)],
      ["Full at the service", percent(link.load)],
    ])}
    <p class="hint">A service measures its whole link. Each way to it counts as an equal part.</p>
    ${expectations(link)}`;
}

function expectations(link: Link): TemplateResult | typeof nothing {
  if (!link.carried.length) return nothing;
  return html`<div class="scroll"><table>
    <caption>Expected by the plan, for a machine</caption>
    <thead><tr><th scope="col">Job</th><th scope="col" class="n">Share</th><th scope="col" class="n">Gradients</th></tr></thead>
    <tbody>
      ${link.carried.slice(0, MOST_MEMBERS).map(
        (c) =>
          html`<tr><th scope="row" class="name" title=${c.job}>${c.job}</th><td class="n">${percent(c.share)}</td><td class="n">${bits(c.expected)}</td></tr>`,
      )}
    </tbody>
  </table></div>`;
}

function machines(list: Machine[]): TemplateResult {
  const shown = list.slice(0, MOST_MEMBERS);
  const one = list.length === 1 ? list[0] : null;
  return html`${one ? facts([["Addresses", one.addresses.join(", ")], ["Name in fanin", one.key]]) : nothing}
    <div class="scroll"><table>
      <caption class="sr">Ranks by machine</caption>
      <thead>
        <tr>
          ${one ? nothing : html`<th scope="col">Machine</th>`}
          <th scope="col">Job</th><th scope="col">Ranks</th><th scope="col" class="n">Late</th>${one ? html`<th scope="col" class="n">Waited for</th>` : nothing}
        </tr>
      </thead>
      <tbody>
        ${shown.flatMap((m) =>
          m.jobs.map(
            (j) =>
              html`<tr>
                ${one ? nothing : html`<th scope="row" class="name" title=${m.name}>${m.name}</th>`}
                <td class="name" title=${j.job}>${j.job}</td>
                <td class="name" title=${capital(rankList(j.ranks))}>${ranges(j.ranks)}</td>
                <td class="n">${ms(j.late)}</td>
                ${one ? html`<td class="n">${percent(j.waitedFor)}</td>` : nothing}
              </tr>`,
          ),
        )}
      </tbody>
    </table></div>
    ${list.length > shown.length ? html`<p class="hint">${count(list.length - shown.length)} more machines are in this group.</p>` : nothing}`;
}
