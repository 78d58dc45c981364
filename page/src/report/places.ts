// The nodes of each job's workers and servers, and the letters that stand for jobs on the map.
import type { Run } from "./contract";

export interface Tenant {
  /** "A" for the first one. */
  letter: string;
  name: string;
  /** The name of its colour. Several have the same one: the letter tells them apart. */
  colour: string;
  workers: number;
  servers: number;
}

export interface Places {
  tenants: Tenant[];
  /** Each node's tenants, by number, and whether they have a worker there, a server, or both. */
  at: Map<number, Map<number, { worker: boolean; server: boolean }>>;
}

export const COLOURS = 6;

/** "A" to "Z", then "A2" and so on. */
export const letter = (i: number): string => String.fromCharCode(65 + (i % 26)) + (i < 26 ? "" : String(Math.floor(i / 26) + 1));

export function places({ result, recording }: Run): Places {
  const tenants: Tenant[] = [];
  const at: Places["at"] = new Map();
  if (!recording) return { tenants, at };
  const settle = (name: string, workers: number[], servers: number[]): void => {
    const tenant = tenants.length;
    const note = (node: number, kind: "worker" | "server"): void => {
      let there = at.get(node);
      if (!there) at.set(node, (there = new Map()));
      const had = there.get(tenant) ?? { worker: false, server: false };
      had[kind] = true;
      there.set(tenant, had);
    };
    for (const n of workers) note(n, "worker");
    for (const n of servers) note(n, "server");
    tenants.push({
      letter: letter(tenant),
      name,
      colour: `series${tenant % COLOURS}`,
      workers: workers.length,
      servers: servers.length,
    });
  };
  recording.jobs.forEach((job, i) => settle(result.jobs[i].name, job.workers, job.servers));
  recording.parameter_servers.forEach((ps, i) => settle(result.parameter_servers[i].name, ps.workers, ps.servers));
  return { tenants, at };
}
