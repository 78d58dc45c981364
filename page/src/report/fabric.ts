// The nodes and links that are drawn. A large network is drawn as groups, and each group opens.
//
// The levels are those of the recording: hosts, then switches by layer. Nodes of a level become one
// group when they have the same neighbours: hosts of a rack, leaves of a pod. If these are still too
// many, neighbours in the recording's order share a box.
import type { Node, Recording } from "./contract";
import { several } from "../format";
import { ordered } from "./order";

export interface Group {
  id: string;
  /** 0 for hosts. */
  level: number;
  members: number[];
  title: string;
  /** Whether it is outside of what was opened, and drawn for its links. */
  outside: boolean;
}

/** All links between two groups. */
export interface Bundle {
  id: string;
  /** Indices of the groups: `a` is at the lower level; within a level `a` has the lower index, wherever it is drawn. */
  a: number;
  b: number;
  /** Directions from `a` to `b`, and back. */
  there: number[];
  back: number[];
}

export interface Drawing {
  groups: Group[];
  /** By level, the lowest first: indices of groups, from left to right. */
  rows: number[][];
  bundles: Bundle[];
  /** Directions within each group. */
  inner: number[][];
}

export interface Room {
  /** How many boxes fit into a row: of hosts, and of switches. */
  hosts: number;
  switches: number;
}

export const levelOf = (node: Node): number => (node.layer === null ? 0 : node.layer + 1);

export class Fabric {
  readonly levels: number[];
  /** Each node's neighbours, once for each link. */
  readonly neighbours: number[][];
  /** The directions that leave and reach each node. */
  readonly touching: number[][];

  constructor(readonly recording: Recording) {
    const { nodes, directions } = recording;
    this.levels = nodes.map(levelOf);
    this.neighbours = nodes.map(() => []);
    this.touching = nodes.map(() => []);
    directions.forEach(({ from, to }, i) => {
      this.touching[from].push(i);
      if (to !== from) this.touching[to].push(i);
      if (i % 2) return;
      this.neighbours[from].push(to);
      this.neighbours[to].push(from);
    });
  }

  /** `opened`: the nodes of a group, or null for the whole network. */
  drawing(opened: readonly number[] | null, room: Room): Drawing {
    const { nodes } = this.recording;
    const inside = opened === null ? new Set(nodes.keys()) : new Set(this.withHosts(opened));
    const beside = new Set<number>();
    if (opened) for (const n of inside) for (const m of this.neighbours[n]) if (!inside.has(m)) beside.add(m);
    const groups: Group[] = [];
    const of = new Int32Array(nodes.length).fill(-1);
    const top = this.levels.reduce((a, b) => Math.max(a, b), 0);
    // Switches first: racks can only be put together along their leaves.
    for (let level = top; level >= 0; level--) {
      for (const [set, outside] of [[inside, false], [beside, true]] as const) {
        const those = [...set].filter((n) => this.levels[n] === level).sort((a, b) => a - b);
        const most = level ? room.switches : room.hosts;
        for (const members of this.parts(those, level, most, room, of, opened !== null && !outside)) {
          for (const n of members) of[n] = groups.length;
          groups.push({ id: `${members[0]} ${members.length}`, level, members, title: this.title(members), outside });
        }
      }
    }
    const { bundles, inner } = this.bundles(groups, of);
    return { groups, bundles, inner, rows: ordered(groups, bundles, top) };
  }

  /** Hosts whose switches are all among the nodes come along when switches next to hosts are opened. */
  private withHosts(opened: readonly number[]): number[] {
    const set = new Set(opened);
    if (!opened.every((n) => this.levels[n] <= 1)) return [...set];
    for (const n of opened) {
      for (const m of this.neighbours[n]) {
        if (this.levels[m] === 0 && this.neighbours[m].every((s) => set.has(s))) set.add(m);
      }
    }
    return [...set];
  }

  /** `split`: these were opened, so that they have to become more than one group. */
  private parts(nodes: number[], level: number, most: number, room: Room, of: Int32Array, split: boolean): number[][] {
    const alone = nodes.map((n) => [n]);
    if (alone.length <= most) return alone;
    const few = split || level > 0 ? Math.min(4, most) : 1;
    const by = (key: (n: number) => number[]): number[][] => {
      const sets = new Map<string, number[]>();
      for (const n of nodes) {
        const name = [...new Set(key(n))].sort((a, b) => a - b).join(" ");
        const set = sets.get(name);
        if (set) set.push(n);
        else sets.set(name, [n]);
      }
      return [...sets.values()];
    };
    const below = (n: number): number[] => this.neighbours[n].filter((m) => this.levels[m] < level);
    const above = (n: number): number[] => this.neighbours[n].filter((m) => this.levels[m] > level);
    const tries =
      level === 0
        ? [above, (n: number): number[] => above(n).map((m) => of[m])]
        : level === 1
          ? [above]
          : [below, above];
    let best = alone;
    for (const key of tries) {
      const sets = by(key);
      // Racks are boxes as wide as switches.
      if (sets.length < few || (split && sets.length < 2)) continue;
      if (sets.length <= room.switches) return sets;
      if (sets.length < best.length) best = sets;
      // Too many pods still are pods: neighbours of them share a box.
      if (level > 0 && sets.length <= alone.length / 2) break;
    }
    const wanted = best === alone ? most : room.switches;
    const each = Math.ceil(best.length / wanted);
    return Array.from({ length: Math.ceil(best.length / each) }, (_, i) => best.slice(i * each, (i + 1) * each).flat());
  }

  private title(members: number[]): string {
    const { nodes } = this.recording;
    const first = nodes[members[0]].name;
    if (members.length === 1) return first;
    const how = nodes[members[0]].layer === null ? several(members.length, "host") : several(members.length, "switch", "switches");
    return `${how}, ${first} … ${nodes[members[members.length - 1]].name}`;
  }

  private bundles(groups: Group[], of: Int32Array): { bundles: Bundle[]; inner: number[][] } {
    const found = new Map<number, Bundle>();
    const inner: number[][] = groups.map(() => []);
    this.recording.directions.forEach(({ from, to }, i) => {
      const [f, t] = [of[from], of[to]];
      if (f < 0 || t < 0 || (groups[f].outside && groups[t].outside)) return;
      if (f === t) return void inner[f].push(i);
      const up = groups[f].level < groups[t].level || (groups[f].level === groups[t].level && f < t);
      const [a, b] = up ? [f, t] : [t, f];
      const key = a * groups.length + b;
      let bundle = found.get(key);
      if (!bundle) found.set(key, (bundle = { id: `${groups[a].id} ${groups[b].id}`, a, b, there: [], back: [] }));
      (up ? bundle.there : bundle.back).push(i);
    });
    return { bundles: [...found.values()], inner };
  }
}
