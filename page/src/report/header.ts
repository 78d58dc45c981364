// The head of a report: where it comes from, and how its run is played again.
import { html, nothing, type TemplateResult } from "lit-html";
import type { Report, Run, Sweep } from "./contract";
import { count, duration } from "../format";
import { facts } from "../panel";
import { save } from "../save";

/** A name that any system and shell takes; it ends in .toml. */
export function scenarioFile({ name }: Run): string {
  const stem = name.split(",")[0].trim().split(/[\\/]/).pop()!.replace(/\.toml$/i, "");
  return `${stem.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[-.]+/, "").slice(0, 60) || "scenario"}.toml`;
}

export const againCommand = (run: Run): string => `fanin sim ${scenarioFile(run)} --seed ${run.seed}`;

/** A paper is the whole of its report; else the run that is shown is. */
export function titleOf(report: Report, run: Run | null): string {
  if (report.reproduction) return `${report.reproduction.paper}, reproduced`;
  return run?.result.title || "fanin report";
}

/** Runs that differ by their seeds alone are no sweep. */
export const sweepTitle = ({ sweep }: Sweep): string => (Object.keys(sweep).length ? "Sweep" : "Seeds");

export function topbar(report: Report, run: Run | null): TemplateResult {
  const title = titleOf(report, run);
  const parts: [string, string, boolean][] = [
    ["reproduction", "Reproduction", report.reproduction !== null],
    ["sweep", report.sweep ? sweepTitle(report.sweep) : "", report.sweep !== null],
    ["network", "Network", run?.recording != null],
    ["jobs", "Jobs", Boolean(run?.result.jobs.length)],
    ["times", "Times", Boolean(run?.recording?.times.length)],
  ];
  return html`<header class="topbar">
    <h1 class="server" title=${title}>${title}</h1>
    <nav aria-label="Sections">
      ${parts.filter((p) => p[2]).map(
        ([id, text]) => html`<button type="button" @click=${() => document.getElementById(id)?.scrollIntoView()}>${text}</button>`,
      )}
    </nav>
  </header>`;
}

export interface Choice {
  shown: number;
  beside: number | null;
}

/** No run is beside itself: its view has one place in the page. */
export const settled = (choice: Choice): Choice => (choice.beside === choice.shown ? { ...choice, beside: null } : choice);

/** The lists of runs to show. `choose` is called with the new choice. */
export function chooser({ runs }: Report, choice: Choice, choose: (choice: Choice) => void): TemplateResult | typeof nothing {
  if (runs.length < 3) return nothing;
  const options = (chosen: number | null, without: number | null): unknown[] =>
    runs.map((r, i) => (i === without ? nothing : html`<option value=${i} .selected=${i === chosen}>${r.name}</option>`));
  const value = (e: Event): string => (e.target as HTMLSelectElement).value;
  return html`<div class="tools">
    <label>Run <select @change=${(e: Event) => choose({ ...choice, shown: Number(value(e)) })}>${options(choice.shown, null)}</select></label>
    <label>Beside it
      <select @change=${(e: Event) => choose({ ...choice, beside: value(e) === "" ? null : Number(value(e)) })}>
        <option value="" .selected=${choice.beside === null}>none</option>
        ${options(choice.beside, choice.shown)}
      </select>
    </label>
    <span class="hint">${count(runs.length)} runs are in this file.</span>
  </div>`;
}

/** One command wrote the file, though a run of --against may be by another. */
export const writtenBy = ({ command }: Report): TemplateResult =>
  html`<p class="again"><b>This file was written by:</b> <code>${command}</code></p>`;

/** The origin of a run, and its scenario. */
export function origin(run: Run): TemplateResult {
  const { result, fanin } = run;
  return html`${facts([
      ["Run", run.name],
      ["Seed", run.seed],
      ["fanin", `${fanin.version}, commit ${fanin.commit.slice(0, 12) || "unknown"}`],
      ["Virtual time", duration(result.ended_s)],
      ["Packet hops", count(result.packet_hops)],
      ["Digest", html`<code>${result.digest}</code>`],
    ])}
    <div class="again">
      <b>Play it again:</b> <code>${againCommand(run)}</code>
      <button type="button" @click=${() => save(scenarioFile(run), run.toml, "application/toml")}>Save ${scenarioFile(run)}</button>
    </div>
    <details>
      <summary>The scenario</summary>
      <pre tabindex="0" aria-label="The scenario">${run.toml}</pre>
    </details>`;
}
