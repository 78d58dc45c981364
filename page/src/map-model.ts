// Machines, relays and services as a graph in three columns, and what its links carry.
import type { Job, Service, State } from "./contract";
import { bits, percent } from "./format";
import type { Store } from "./store";

export interface MachineJob {
  job: string;
  ranks: number[];
  /** Median lateness of its latest rank, seconds. */
  late: number;
  waitedFor: number;
}

export interface Machine {
  key: string;
  name: string;
  addresses: string[];
  /** The relay next to it, by job, where one tells so. */
  via: Map<string, string>;
  jobs: MachineJob[];
}

export interface Summer {
  address: string;
  /** Null where a plan names it and nothing else is told. */
  told: Service | null;
  /** The machine in whose rank it is. */
  machine: string | null;
  host: { job: string; rank: number } | null;
}

export interface MapNode {
  id: string;
  kind: "machine" | "relay" | "service";
  title: string;
  machines: Machine[];
  summers: Summer[];
}

/** A job's part of a link, and what the plan expects of it, bits of gradients a second. */
export interface Carried {
  job: string;
  share: number;
  expected: number | null;
}

export interface Link {
  id: string;
  from: MapNode;
  to: MapNode;
  carried: Carried[];
  /** In the machine itself, so that no network carries it. */
  local: boolean;
  /** False where nobody told that packets go this way. */
  certain: boolean;
  /** Bits a second towards `to` and back, as an equal part of what its service's link carries. */
  up: number | null;
  down: number | null;
  rate: number | null;
  /** How full the service's link is, 0 to 1. */
  load: number | null;
}

export interface Graph {
  columns: { machine: MapNode[]; relay: MapNode[]; service: MapNode[] };
  links: Link[];
  /** Before groups were made. */
  counts: { machine: number; relay: number; service: number };
}

export const MOST_MACHINES = 40;
const MOST_SUMMERS = 12;
const GROUPS = 16;

export function load(service: Service | null): number | null {
  if (!service?.rate || (service.received === null && service.sent === null)) return null;
  return Math.max(service.received ?? 0, service.sent ?? 0) / service.rate;
}

const byName = new Intl.Collator("en", { numeric: true }).compare;
const present = (job: Job): boolean => job.state !== "aborted";

export function machinesOf(jobs: readonly Job[]): Machine[] {
  const machines = new Map<string, Machine>();
  for (const job of jobs) {
    const parts = new Map<string, MachineJob>();
    for (const rank of job.ranks) {
      if (rank.left) continue;
      let machine = machines.get(rank.machine);
      if (!machine) {
        machine = { key: rank.machine, name: rank.name, addresses: [], via: new Map(), jobs: [] };
        machines.set(rank.machine, machine);
      }
      if (rank.via !== null) machine.via.set(job.name, rank.via);
      const address = rank.address.replace(/:\d+$/, "");
      if (!machine.addresses.includes(address)) machine.addresses.push(address);
      let part = parts.get(rank.machine);
      if (!part) {
        part = { job: job.name, ranks: [], late: 0, waitedFor: 0 };
        parts.set(rank.machine, part);
        machine.jobs.push(part);
      }
      for (const r of rank.ranks) part.ranks.push(r);
      part.late = Math.max(part.late, rank.late?.median ?? 0);
      part.waitedFor = Math.max(part.waitedFor, rank.waited_for);
    }
  }
  return [...machines.values()].sort((a, b) => byName(a.name, b.name));
}

function summersOf(state: State): Summer[] {
  const summers = new Map<string, Summer>();
  for (const told of state.services) {
    summers.set(told.address, { address: told.address, told, machine: null, host: null });
  }
  for (const job of state.jobs.filter(present)) {
    for (const share of job.shares) {
      let summer = summers.get(share.service);
      if (!summer) {
        summer = { address: share.service, told: null, machine: null, host: null };
        summers.set(share.service, summer);
      }
      if (share.host === null || summer.host) continue;
      summer.host = { job: job.name, rank: share.host };
      const rank = job.ranks.find((r) => r.rank === share.host || r.ranks.includes(share.host!));
      summer.machine = rank?.machine ?? null;
    }
  }
  return [...summers.values()];
}

/** Nodes of one member each, or of several where there are too many. */
function nodes<T>(members: T[], most: number, kind: MapNode["kind"], title: (m: T) => string, wrap: (m: T[]) => Partial<MapNode>): MapNode[] {
  const size = members.length > most ? Math.ceil(members.length / Math.min(most, GROUPS)) : 1;
  const made: MapNode[] = [];
  for (let i = 0; i < members.length; i += size) {
    const group = members.slice(i, i + size);
    const ends = [title(group[0]), title(group[group.length - 1])];
    made.push({
      id: `${kind} ${ends[0]}#${i}`,
      kind,
      title: group.length === 1 ? ends[0] : `${ends[0]} … ${ends[1]}`,
      machines: [],
      summers: [],
      ...wrap(group),
    });
  }
  return made;
}

export function graph(state: State, store: Store): Graph {
  const jobs = state.jobs.filter(present);
  const machines = machinesOf(jobs);
  const all = summersOf(state);
  const relays = all.filter((s) => s.told?.upstream != null);
  const roots = all.filter((s) => s.told?.upstream == null);
  const summerNodes = (list: Summer[], kind: "relay" | "service"): MapNode[] =>
    nodes(list, MOST_SUMMERS, kind, (s) => s.address, (summers) => ({ summers }));
  const columns = {
    machine: nodes(machines, MOST_MACHINES, "machine", (m) => m.name, (m) => ({ machines: m })),
    relay: summerNodes(relays, "relay"),
    service: summerNodes(roots, "service"),
  };
  const nodeOf = new Map<string, MapNode>();
  for (const node of columns.machine) for (const m of node.machines) nodeOf.set(`machine ${m.key}`, node);
  for (const node of [...columns.relay, ...columns.service]) for (const s of node.summers) nodeOf.set(s.address, node);

  const links = new Map<string, Link>();
  const link = (from: MapNode, to: MapNode, certain: boolean, local = false): Link => {
    const id = `${from.id} > ${to.id}`;
    let found = links.get(id);
    if (!found) {
      found = { id, from, to, carried: [], local, certain, up: null, down: null, rate: null, load: null };
      links.set(id, found);
    }
    return found;
  };

  const below = new Map<string, Set<MapNode>>();
  for (const relay of relays) {
    const from = nodeOf.get(relay.address)!;
    const upstream = relay.told!.upstream!;
    const to = nodeOf.get(upstream);
    if (!to || to === from) continue;
    link(from, to, true);
    const list = below.get(to.id) ?? new Set();
    below.set(to.id, list.add(from));
  }
  /** The relays next to the machines, on the way to a node. */
  const lowest = (node: MapNode, seen = new Set<MapNode>()): MapNode[] => {
    if (seen.has(node)) return [];
    seen.add(node);
    const next = [...(below.get(node.id) ?? [])];
    return next.length ? next.flatMap((n) => lowest(n, seen)) : [node];
  };

  for (const job of jobs) {
    const parts = [...new Set(job.ranks.filter((r) => !r.left).map((r) => nodeOf.get(`machine ${r.machine}`)!))];
    for (const [to, { share, hosts, told }] of sharesByNode(job, nodeOf, columns.service)) {
      const summed = latest(store.jobs.get(job.name)?.summed);
      const carried = { job: job.name, share, expected: summed === null || !told ? null : summed * 8 * share };
      const entries = lowest(to);
      for (const entry of entries) for (const on of way(entry, to, links)) add(on, carried);
      for (const from of parts) {
        const local = from.machines.length === 1 && to.summers.length === 1 && hosts.has(from.machines[0].key);
        // Machines that are drawn together may have several.
        const vias = [...new Set(from.machines.map((m) => nodeOf.get(m.via.get(job.name) ?? "")))];
        const by = vias.filter((n): n is MapNode => n !== undefined && way(n, to, links).at(-1)?.to === to);
        const known = by.length === vias.length;
        for (const entry of local ? [to] : known ? by : entries) {
          add(link(from, entry, told && (local || known || entry === to), local), carried);
        }
      }
    }
  }
  measure([...links.values()]);
  return {
    columns,
    links: [...links.values()],
    counts: { machine: machines.length, relay: relays.length, service: roots.length },
  };
}

function add(link: Link, carried: Carried): void {
  if (!link.carried.some((c) => c.job === carried.job)) link.carried.push(carried);
}

/** The links from a relay up to a node. */
function way(entry: MapNode, to: MapNode, links: Map<string, Link>): Link[] {
  const found: Link[] = [];
  for (let at = entry; at !== to; ) {
    const next = [...links.values()].find((l) => l.from === at && !found.includes(l));
    if (!next) break;
    found.push(next);
    at = next.to;
  }
  return found;
}

interface NodeShare {
  share: number;
  /** Machines in whose ranks its services are. */
  hosts: Set<string>;
  told: boolean;
}

function sharesByNode(job: Job, nodeOf: Map<string, MapNode>, roots: MapNode[]): Map<MapNode, NodeShare> {
  const shares = new Map<MapNode, NodeShare>();
  const machineOf = new Map<number, string>();
  for (const rank of job.ranks) for (const r of rank.ranks) machineOf.set(r, rank.machine);
  for (const share of job.shares) {
    const node = nodeOf.get(share.service);
    if (!node) continue;
    const sum = shares.get(node) ?? { share: 0, hosts: new Set<string>(), told: true };
    sum.share += share.share;
    const host = share.host === null ? undefined : machineOf.get(share.host);
    if (host !== undefined) sum.hosts.add(host);
    shares.set(node, sum);
  }
  // Ranks that tell nothing can only send to a service that is alone.
  if (!shares.size && job.state === "running" && roots.length === 1) {
    shares.set(roots[0], { share: 1, hosts: new Set(), told: false });
  }
  return shares;
}

/** A service knows what its link carries, not from whom: each of its links counts equally. */
function measure(links: Link[]): void {
  const ends = new Map<MapNode, number>();
  for (const { from, to, local } of links) {
    if (local) continue;
    for (const node of [from, to]) ends.set(node, (ends.get(node) ?? 0) + 1);
  }
  for (const link of links) {
    if (link.local) continue;
    const port = link.from.kind === "relay" ? link.from : link.to;
    const share = (total: number | null): number | null => (total === null ? null : total / ends.get(port)!);
    const [received, sent] = [share(total(port, "received")), share(total(port, "sent"))];
    [link.up, link.down] = port === link.from ? [sent, received] : [received, sent];
    link.rate = port.summers.length === 1 ? (port.summers[0].told?.rate ?? null) : null;
    const loads = [...port.summers, ...link.to.summers].map((s) => load(s.told)).filter((l) => l !== null);
    link.load = loads.length ? Math.max(...loads) : null;
  }
}

function total(node: MapNode, way: "received" | "sent"): number | null {
  const known = node.summers.map((s) => s.told?.[way] ?? null).filter((x) => x !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
}

export function latest(values: readonly (number | null)[] | undefined): number | null {
  return values?.length ? values[values.length - 1] : null;
}

export function linkText(link: Link): string {
  const ends = `${link.from.title} to ${link.to.title}`;
  if (link.local) return `${ends}: in the machine itself`;
  const load = link.load === null ? "load not known" : `the link of the service is ${percent(link.load)} full`;
  return `${ends}: about ${bits(link.up)} there, ${bits(link.down)} back; ${load}`;
}
