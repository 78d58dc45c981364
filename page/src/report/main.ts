// Reads the report that is in the page, and draws it after what people do.
import { html, nothing, render, type TemplateResult } from "lit-html";
import "../page.css";
import "./report.css";
import { type LeftOut, understood } from "./check";
import { Clock } from "./clock";
import { comparison } from "./compare";
import type { Report } from "./contract";
import { type Choice, chooser, origin, settled, sweepTitle, topbar, titleOf, writtenBy } from "./header";
import { several } from "../format";
import { hasMachines, machines } from "./machines";
import { reproduction } from "./reproduction";
import type { Shown } from "./network";
import { RunView } from "./run-view";
import { SweepView } from "./sweep-view";
import { Times } from "./times";
import { words } from "./words";

const top = document.getElementById("top")!;
const page = document.getElementById("page")!;
/** Sentences of parts that are left out; more are a number. */
const MOST_LEFT = 6;

/** Null where the data are no JSON: a file that was cut off, or the page without a report. */
function read(): unknown {
  try {
    return JSON.parse(document.getElementById("data")?.textContent ?? "");
  } catch {
    return null;
  }
}

class Page {
  private choice: Choice;
  private readonly views = new Map<number, RunView>();
  private readonly clock = new Clock(() => this.changed());
  private readonly shown: Shown = { measure: "busy" };
  private readonly sweep: SweepView | null;
  private times: { of: string; view: Times } | null = null;
  private asked = false;

  constructor(
    private readonly report: Report,
    private readonly left: readonly LeftOut[],
  ) {
    this.choice = { shown: 0, beside: report.runs.length === 2 && !report.sweep && !report.reproduction ? 1 : null };
    this.sweep = report.sweep ? new SweepView(report.sweep, report.runs, (run) => this.choose({ ...this.choice, shown: run }), () => this.changed()) : null;
    document.title = `${titleOf(report, report.runs[0] ?? null)} · fanin`;
  }

  /** Draws once before the next frame, however often it is called. */
  private changed(): void {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.draw();
    });
  }

  private choose(choice: Choice): void {
    this.choice = settled(choice);
    this.changed();
  }

  private view(run: number): RunView {
    let view = this.views.get(run);
    if (!view) this.views.set(run, (view = new RunView(this.report.runs[run], this.clock, this.shown, () => this.changed())));
    return view;
  }

  draw(): void {
    const { report, choice } = this;
    render(topbar(report, report.runs[choice.shown] ?? null), top);
    render(
      html`${this.left.length ? html`<section>${troubles(this.left)}</section>` : nothing}
      ${report.reproduction
        ? html`<section id="reproduction" aria-labelledby="reproduction-title">${reproduction(report.reproduction)}</section>`
        : nothing}
      ${this.sweep
        ? html`<section id="sweep" aria-labelledby="sweep-title"><h2 id="sweep-title">${sweepTitle(report.sweep!)}</h2>${this.sweep.template(choice.shown)}</section>`
        : nothing}
      ${report.runs.length ? this.runs() : nothing}`,
      page,
    );
  }

  private runs(): TemplateResult {
    const { report, choice } = this;
    const shown = [this.view(choice.shown), ...(choice.beside === null ? [] : [this.view(choice.beside)])];
    const key = `${choice.shown} ${choice.beside}`;
    if (this.times?.of !== key) {
      this.times?.view.close();
      this.times = { of: key, view: new Times(shown.map((v) => v.run), () => this.changed()) };
    }
    const times = this.times.view;
    /** A section with a column for each run; absent where none has anything. */
    const section = (id: string, title: string, has: (view: RunView) => boolean, draw: (view: RunView) => TemplateResult): unknown => {
      if (!shown.some(has)) return nothing;
      const each = shown.map(
        (v) => html`<div>
          ${shown.length > 1 ? html`<p class="run-name">${v.run.name}</p>` : nothing}
          ${has(v) ? draw(v) : html`<p class="empty">This run has nothing of it.</p>`}
        </div>`,
      );
      return html`<section id=${id} aria-labelledby=${`${id}-title`}>
        <h2 id=${`${id}-title`}>${title}</h2>
        <div class=${shown.length > 1 ? "pair" : ""}>${each}</div>
      </section>`;
    };
    return html`<section id="run" aria-label="The run">
        ${chooser(report, choice, (c) => this.choose(c))} ${writtenBy(report)}
        <div class=${shown.length > 1 ? "pair" : ""}>${shown.map((v) => html`<div>${origin(v.run)}</div>`)}</div>
      </section>
      ${section("words", "In words", () => true, (v) => words(v.run))}
      ${shown.length > 1
        ? html`<section id="compared" aria-labelledby="compared-title">
            <h2 id="compared-title">Compared</h2>
            ${comparison(shown[0].run, shown[1].run)}
          </section>`
        : nothing}
      ${section("network", "Network", (v) => v.network !== null, (v) => v.network!.template())}
      ${section("jobs", "Jobs", (v) => v.run.result.jobs.length > 0, (v) => v.jobs.template())}
      ${times.empty
        ? nothing
        : html`<section id="times" aria-labelledby="times-title"><h2 id="times-title">Times</h2>${times.template()}</section>`}
      ${section("machines", "Machines and flows", (v) => hasMachines(v.run.result), (v) => machines(v.run.result))}`;
  }
}

function troubles(left: readonly LeftOut[]): TemplateResult {
  return html`<ul class="hints" role="alert">
    ${left.slice(0, MOST_LEFT).map(
      ({ name, place }) =>
        html`<li class="trouble">${name} is left out: this page does not understand ${place}. Another version of fanin may have written it.</li>`,
    )}
    ${left.length > MOST_LEFT ? html`<li class="trouble">${several(left.length - MOST_LEFT, "more part")} of the file did not fit.</li>` : nothing}
  </ul>`;
}

document.getElementById("old")?.remove();
const data = read();
const { report, left } = understood(data);
if (report) new Page(report, left).draw();
else {
  const place = left[0].place || "the report";
  const text =
    data === null
      ? "This page has no report in it, or the file was cut off. fanin sim SCENARIO.toml --report OUT.html writes one."
      : `This page cannot read its report: ${place} is missing or of another kind. The report and the page may be of different versions of fanin.`;
  render(html`<section><p class="trouble" role="alert">${text}</p></section>`, page);
}
