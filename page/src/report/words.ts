// The run in a few sentences.
import { html, type TemplateResult } from "lit-html";
import { bytes, count, duration, gbps, percent, several } from "../format";
import type { Result, Run } from "./contract";
import { tooFew } from "./jobs";

export interface Sentence {
  warning: boolean;
  text: string;
}

const MOST_JOBS = 6;

export function sentences({ result, recording }: Run): Sentence[] {
  return [...ofJobs(result), ...ofLinks(result), ...ofTheRest(result, recording !== null)];
}

function ofJobs({ jobs, ended_s }: Result): Sentence[] {
  const said: Sentence[] = [];
  const say = (warning: boolean, text: string): void => void said.push({ warning, text });
  // Warnings first, and those of all jobs.
  for (const job of jobs) {
    if (job.died_s !== null) say(true, `All machines of job ${job.name} vanished at ${duration(job.died_s)}.`);
    else if (job.unfinished !== null) say(true, `Job ${job.name} did not finish: ${job.unfinished}.`);
    if (!job.measurement.enough) say(true, `The throughput of job ${job.name} is not measured: ${tooFew(job)}`);
  }
  const finished = jobs.filter((j) => j.finished_s !== null);
  if (finished.length > MOST_JOBS) {
    const times = finished.map((j) => j.finished_s!);
    const last = finished.find((j) => j.finished_s === Math.max(...times))!;
    say(
      false,
      `${several(finished.length, "job")} of ${count(jobs.length)} finished between ${duration(Math.min(...times))} and ` +
        `${duration(Math.max(...times))}; job ${last.name} was the last one.`,
    );
  } else {
    for (const job of finished) {
      const speed = job.measurement.enough ? `, and each worker received ${gbps(job.aggregation_gbps)} in the mean` : "";
      say(false, `Job ${job.name} with ${several(job.workers, "worker")} finished at ${duration(job.finished_s)}${speed}.`);
    }
  }
  const open = jobs.filter((j) => j.finished_s === null && j.died_s === null && j.unfinished === null);
  if (open.length) {
    const names = open.slice(0, MOST_JOBS).map((j) => j.name).join(", ");
    say(false, `${open.length > MOST_JOBS ? several(open.length, "job") : open.length > 1 ? `Jobs ${names}` : `Job ${names}`} ran until the end at ${duration(ended_s)}.`);
  }
  return said;
}

function ofLinks({ links, drops }: Result): Sentence[] {
  const said: Sentence[] = [];
  const say = (text: string): void => void said.push({ warning: false, text });
  const most = (value: (l: Result["links"][number]) => number): Result["links"][number] | null => {
    let best: Result["links"][number] | null = null;
    for (const l of links) if (value(l) > (best ? value(best) : 0)) best = l;
    return best;
  };
  const busiest = most((l) => l.load);
  if (busiest) {
    say(
      `The busiest link was ${busiest.from} to ${busiest.to} at ${gbps(busiest.rate_gbps)}. ` +
        `It was busy for ${percent(busiest.load)} of the run, and for ${percent(busiest.load_max)} of its fullest interval.`,
    );
  }
  const queue = most((l) => l.queue_max_bytes);
  if (queue) say(`The longest queue had ${bytes(queue.queue_max_bytes)}, from ${queue.from} to ${queue.to}.`);
  const lost = drops.reduce((sum, d) => sum + d.count, 0);
  const drop = most((l) => l.dropped);
  if (lost) {
    const reasons = drops.filter((d) => d.count).map((d) => `${d.name} ${count(d.count)}`).join(", ");
    const where = drop ? ` The link with the most losses was ${drop.from} to ${drop.to}, with ${count(drop.dropped)}.` : "";
    say(`${several(lost, "packet")} did not get through (${reasons}).${where}`);
  } else say("Every packet got through.");
  const mark = most((l) => l.marked);
  if (mark) say(`The link with the most marks was ${mark.from} to ${mark.to}, with ${count(mark.marked)}.`);
  return said;
}

function ofTheRest(result: Result, recorded: boolean): Sentence[] {
  const said: Sentence[] = [];
  for (const ps of result.parameter_servers) {
    if (!ps.flow_times.unfinished && !ps.unopened) continue;
    said.push({
      warning: true,
      text: `Training ${ps.name} with parameter servers has ${several(ps.flow_times.unfinished, "flow")} that did not end, and ${count(ps.unopened)} that did not begin.`,
    });
  }
  for (const flow of result.background) {
    if (!flow.times?.unfinished) continue;
    said.push({ warning: false, text: `${several(flow.times.unfinished, "flow")} from ${flow.from} to ${flow.to} did not end.` });
  }
  if (!recorded) {
    said.push({ warning: false, text: "This file has figures alone. fanin sim --report records the network and the tensors over time too." });
  }
  return said.sort((a, b) => Number(b.warning) - Number(a.warning));
}

export function words(run: Run): TemplateResult {
  const said = sentences(run);
  const warnings = said.filter((s) => s.warning);
  return html`${warnings.length
      ? html`<ul class="words" tabindex=${warnings.length > 6 ? 0 : -1}>
          ${warnings.map((s) => html`<li class="word warning"><span class="badge">Warning</span><p>${s.text}</p></li>`)}
        </ul>`
      : ""}
    <ul class="said">
      ${said.filter((s) => !s.warning).map((s) => html`<li>${s.text}</li>`)}
    </ul>`;
}
