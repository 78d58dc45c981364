// The recorded report, and small networks made up for tests.
import recordedJson from "../fixtures/report.json";
import type { Node, Recording, Report, Run } from "../src/report/contract";

/** A copy that a test may change. */
export const report = (): Report => structuredClone(recordedJson) as unknown as Report;
export const run = (): Run => report().runs[0];

/** Nodes by name and layer, and links between names; each direction was as busy as its number says. */
export function network(nodes: [string, number | null][], links: [string, string][], intervals = 2): Recording {
  const at = new Map(nodes.map(([name], i) => [name, i]));
  const direction = (from: string, to: string, i: number): Recording["directions"][number] => ({
    from: at.get(from)!,
    to: at.get(to)!,
    rate: 1e9,
    delay: 1e-6,
    busy: Array.from({ length: intervals }, () => i),
    queued: null,
    marked: null,
    dropped: null,
  });
  return {
    ends: Array.from({ length: intervals }, (_, i) => i + 1),
    nodes: nodes.map(([name, layer]): Node => ({ name, layer, programmable: layer !== null, sums: false })),
    directions: links.flatMap(([a, b], i) => [direction(a, b, 2 * i), direction(b, a, 2 * i + 1)]),
    jobs: [],
    parameter_servers: [],
    times: [],
  };
}

/** Pods of leaves with hosts, aggregation switches, and core switches in planes. */
export function fatTree(pods: number, leaves: number, hosts: number, spines: number): Recording {
  const nodes: [string, number | null][] = [];
  const links: [string, string][] = [];
  for (let c = 0; c < spines * spines; c++) nodes.push([`core${c}`, 2]);
  for (let p = 0; p < pods; p++) {
    for (let s = 0; s < spines; s++) {
      nodes.push([`agg${p}-${s}`, 1]);
      for (let c = 0; c < spines; c++) links.push([`agg${p}-${s}`, `core${s * spines + c}`]);
    }
    for (let l = 0; l < leaves; l++) {
      nodes.push([`leaf${p}-${l}`, 0]);
      for (let s = 0; s < spines; s++) links.push([`leaf${p}-${l}`, `agg${p}-${s}`]);
      for (let h = 0; h < hosts; h++) {
        nodes.push([`h${p}-${l}-${h}`, null]);
        links.push([`h${p}-${l}-${h}`, `leaf${p}-${l}`]);
      }
    }
  }
  return network(nodes, links);
}
