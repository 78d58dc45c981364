// How a job's time is spent, and what would make it faster.
import type { Job, Plan, Sum } from "./contract";
import { msPerMB, percent } from "./format";
import { lateness } from "./lateness";
import { lastBegin } from "./timeline";

/** Parts of the time of a rank; together 1. */
export interface Split {
  computing: number;
  waiting: number;
  summing: number;
}

/** Waiting and summing are told apart by the last collectives. Null where nothing is known. */
export function split(job: Job): Split | null {
  let computing = 0;
  let waiting = 0;
  let summing = 0;
  for (const sum of job.sums) {
    const last = lastBegin(sum);
    for (const [, took, computed] of sum.ranks) {
      computing += Math.max(0, computed);
      summing += sum.ended - last;
      waiting += Math.max(0, took - (sum.ended - last));
    }
  }
  const inSums = waiting + summing;
  const all = computing + inSums;
  const part = job.in_sums ?? (all > 0 ? inSums / all : null);
  if (part === null) return null;
  // Without collectives to tell them apart, all of it counts as summing.
  const waitingPart = inSums > 0 ? waiting / inSums : 0;
  return { computing: 1 - part, waiting: part * waitingPart, summing: part * (1 - waitingPart) };
}

/** How long a rank computed and waited for these collectives, on average. */
function duration(sums: readonly Sum[]): number {
  let all = 0;
  for (const { ranks } of sums) {
    if (ranks.length) all += ranks.reduce((t, [, took, computed]) => t + took + Math.max(0, computed), 0) / ranks.length;
  }
  return all;
}

/** Sums beside those of a ring on the same links. Null where no rates are known. */
export function gain({ ring, predicted, measured }: Plan): string | null {
  if (!ring || !predicted) return null;
  const beside = (seconds: number): string => `${(ring / seconds).toPrecision(3)} times as fast as a ring`;
  const found = measured ? ` As measured, they are ${beside(measured)} is predicted to be.` : "";
  return `By the plan, sums are ${beside(predicted)} (Gloo) on these links.${found}`;
}

/** Sentences, the one that helps most first. */
export function faster(job: Job): string[] {
  const times = split(job);
  if (!times || job.state !== "running") return [];
  const hints: { gain: number; text: string }[] = [];
  // Where only some collectives are told, what lies between them is not known.
  const whole = job.sums.every((sum, at) => at === 0 || sum.number === job.sums[at - 1].number + 1);
  const latest = [...lateness(whole ? job.sums : [])].sort((a, b) => b.cost - a.cost)[0];
  const all = duration(job.sums);
  if (latest && all > 0) {
    const part = Math.min(0.99, latest.cost / all);
    if (part > 0.01) {
      const rank = job.ranks.find((r) => r.rank === latest.rank);
      const where = rank ? ` on ${rank.name}` : "";
      hints.push({
        gain: part,
        text:
          `Rank ${latest.rank}${where} is the last in ${percent(latest.last)} of the sums. ` +
          `Steps would be ${percent(1 / (1 - part) - 1)} faster if it began with the next one.`,
      });
    }
  }
  if (times.summing > 0.01) {
    const plan = job.plan;
    const bound = plan?.bound ? ` The plan says that ${plan.bound} bounds them.` : "";
    const slower =
      plan?.predicted && plan.measured && plan.measured > 1.15 * plan.predicted
        ? ` They take ${msPerMB(plan.measured)}, and the plan expects ${msPerMB(plan.predicted)}.`
        : "";
    hints.push({
      gain: times.summing,
      text:
        `Steps would be at most ${percent(1 / (1 - Math.min(0.99, times.summing)) - 1)} faster ` +
        `if sums took no time.${bound}${slower}`,
    });
  }
  if (times.computing > 0.9) {
    hints.push({
      gain: 1 - times.computing,
      text: `Computing takes ${percent(times.computing)} of the time. A faster network would change little.`,
    });
  }
  return hints.sort((a, b) => b.gain - a.gain).map((h) => h.text);
}
