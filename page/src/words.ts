// What people should know, at the top.
import { html, nothing, type TemplateResult } from "lit-html";
import type { State, Word } from "./contract";
import { ranges, several } from "./format";

export interface Said {
  job: string;
  word: Word;
}

/** The words of services and of all jobs, warnings first, each job's in its order. */
export function said(state: State): Said[] {
  const ofServices = state.words.map((word) => ({ job: "", word }));
  const all = ofServices.concat(state.jobs.flatMap((job) => job.words.map((word) => ({ job: job.name, word }))));
  const severe = (s: Said): number => (s.word.severity === "warning" ? 0 : 1);
  return all.sort((a, b) => severe(a) - severe(b));
}

export interface Verdict {
  tone: "good" | "warning" | "idle";
  text: string;
}

export function verdict(state: State): Verdict {
  const words = said(state);
  const warnings = words.filter((s) => s.word.severity === "warning").length;
  const silent = state.services.filter((s) => s.silent !== null).length;
  const running = state.jobs.filter((j) => j.state === "running").length + state.hidden_jobs;
  const runs = `${several(running, "job")} ${running === 1 ? "runs" : "run"}.`;
  if (warnings) {
    return { tone: "warning", text: `${several(warnings, "thing")} ${warnings === 1 ? "needs" : "need"} attention.` };
  }
  if (silent) {
    return { tone: "warning", text: `${several(silent, "service")} ${silent === 1 ? "does" : "do"} not answer.` };
  }
  if (running) return { tone: "good", text: words.length ? `Nothing is wrong. ${runs}` : `All is well. ${runs}` };
  const gathering = state.jobs.filter((j) => j.state === "gathering");
  if (gathering.length) {
    return { tone: "idle", text: `No job runs yet. ${several(gathering.length, "job")} ${gathering.length === 1 ? "waits" : "wait"} for ranks.` };
  }
  if (state.jobs.length) return { tone: "idle", text: "No job runs now." };
  return { tone: "idle", text: "No job is here." };
}

/** The command that starts a job at this service. */
export function startCommand(state: State): string {
  const root = state.services.find((s) => s.upstream === null) ?? state.services[0];
  const where = root ? `FANIN_SWITCH=${root.address} ` : "";
  return `${where}torchrun --nnodes 4 --nproc-per-node 2 … train.py`;
}

function entry({ job, word }: Said, many: boolean): TemplateResult {
  const warning = word.severity === "warning";
  return html`<li class=${warning ? "word warning" : "word note"}>
    <span class="badge">${warning ? "Warning" : "Note"}</span>
    <div>
      <p>${many && job ? html`<b class="name" title=${job}>${job}</b> ` : nothing}${word.text}</p>
      ${word.cure ? html`<p class="cure">${word.cure}</p>` : nothing}
    </div>
  </li>`;
}

export function words(state: State): TemplateResult {
  const { tone, text } = verdict(state);
  const all = said(state);
  const waiting = state.jobs.filter((j) => j.state === "gathering");
  return html`<p class="verdict ${tone}" role="status"><span class="dot" aria-hidden="true"></span>${text}</p>
    ${all.length ? html`<ul class="words" tabindex=${all.length > 6 ? 0 : nothing}>${all.map((s) => entry(s, state.jobs.length > 1))}</ul>` : nothing}
    ${state.jobs.length
      ? nothing
      : html`<p>
          A training joins with <code>init_process_group("fanin")</code>, started like this:
          <code>${startCommand(state)}</code>
        </p>`}
    ${waiting.slice(0, 3).map(
      (job) =>
        html`<p class="aside">
          <b class="name" title=${job.name}>${job.name}</b> waits for
          ${several(job.missing.length, "rank")}${job.missing.length ? `: ${ranges(job.missing).slice(0, 120)}` : ""}.
        </p>`,
    )}`;
}
