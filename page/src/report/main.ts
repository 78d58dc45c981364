// Reads the report that is in the page, and draws it after what people do.
import { html, nothing, render, type TemplateResult } from "lit-html";
import "../page.css";
import "./report.css";
import { misses } from "./check";
import { Clock } from "./clock";
import { comparison } from "./compare";
import type { Report } from "./contract";
import { type Choice, chooser, origin, topbar, titleOf } from "./header";
import { hasMachines, machines } from "./machines";
import { reproduction } from "./reproduction";
import type { Shown } from "./network";
import { RunView } from "./run-view";
import { SweepView } from "./sweep-view";
import { Times } from "./times";
import { words } from "./words";

const top = document.getElementById("top")!;
const page = document.getElementById("page")!;

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

  constructor(private readonly report: Report) {
    this.choice = { shown: 0, beside: report.runs.length === 2 && !report.sweep && !report.reproduction ? 1 : null };
    this.sweep = report.sweep ? new SweepView(report.sweep, (run) => this.choose({ ...this.choice, shown: run }), () => this.changed()) : null;
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
    this.choice = choice;
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
      html`${report.reproduction
        ? html`<section id="reproduction" aria-labelledby="reproduction-title">${reproduction(report.reproduction)}</section>`
        : nothing}
      ${this.sweep
        ? html`<section id="sweep" aria-labelledby="sweep-title"><h2 id="sweep-title">Sweep</h2>${this.sweep.template(choice.shown)}</section>`
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
        ${chooser(report, choice, (c) => this.choose(c))}
        <div class=${shown.length > 1 ? "pair" : ""}>${shown.map((v) => html`<div>${origin(report, v.run)}</div>`)}</div>
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

document.getElementById("old")?.remove();
const data = read();
const wrong = misses(data);
if (wrong === null) new Page(data as Report).draw();
else {
  const text =
    data === null
      ? "This page has no report in it, or the file was cut off. fanin sim SCENARIO.toml --report OUT.html writes one."
      : `This page cannot read its report: ${wrong || "the report"} is missing or of another kind. The report and the page may be of different versions of fanin.`;
  render(html`<section><p class="trouble" role="alert">${text}</p></section>`, page);
}
