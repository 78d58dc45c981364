import { describe, expect, test } from "vitest";
import { type Drawing, Fabric } from "../src/report/fabric";
import { crossings } from "../src/report/order";
import { fatTree, network } from "./report";

const room = { hosts: 60, switches: 30 };
const titles = (d: Drawing, level: number): string[] =>
  (d.rows.find((row) => d.groups[row[0]].level === level) ?? []).map((g) => d.groups[g].title);
const membersAt = (d: Drawing, level: number): number[] => d.groups.filter((g) => g.level === level).flatMap((g) => g.members);

describe("small networks", () => {
  test("each node is a box, and each link has its two directions", () => {
    const fabric = new Fabric(network([["s", 0], ["a", null], ["b", null]], [["a", "s"], ["s", "b"]]));
    const drawing = fabric.drawing(null, room);
    expect(titles(drawing, 0)).toEqual(["a", "b"]);
    const up = drawing.bundles.map(({ a, there, back }) => [drawing.groups[a].title, there, back]);
    expect(up).toEqual([["a", [0], [1]], ["b", [3], [2]]]);
  });

  test("boxes are ordered so that links do not cross", () => {
    const fabric = new Fabric(
      network(
        [["s0", 0], ["s1", 0], ["a", null], ["b", null], ["c", null], ["d", null]],
        [["a", "s1"], ["b", "s0"], ["c", "s1"], ["d", "s0"]],
      ),
    );
    const drawing = fabric.drawing(null, room);
    expect(crossings(drawing.rows, drawing.bundles)).toBe(0);
  });

  test("switches in a ring stand in its order", () => {
    const ring: [string, string][] = [["s0", "s3"], ["s3", "s1"], ["s1", "s2"], ["s2", "s0"]];
    const fabric = new Fabric(network([["s0", 0], ["s1", 0], ["s2", 0], ["s3", 0]], ring));
    expect(titles(fabric.drawing(null, room), 1)).toEqual(["s0", "s2", "s1", "s3"]);
  });

  test("parallel links are one bundle", () => {
    const fabric = new Fabric(network([["s", 0], ["a", null]], [["a", "s"], ["a", "s"]]));
    expect(fabric.drawing(null, room).bundles).toMatchObject([{ there: [0, 2], back: [1, 3] }]);
  });
});

describe("large networks", () => {
  const recording = fatTree(8, 4, 16, 4);
  const fabric = new Fabric(recording);
  const whole = fabric.drawing(null, room);

  test("rows fit, no node is lost, and no link between groups is", () => {
    for (const row of whole.rows) expect(row.length).toBeLessThanOrEqual(60);
    expect(whole.groups.flatMap((g) => g.members).sort((a, b) => a - b)).toEqual([...recording.nodes.keys()]);
    const drawn = whole.bundles.reduce((sum, b) => sum + b.there.length + b.back.length, 0) + whole.inner.flat().length;
    expect(drawn).toBe(recording.directions.length);
  });

  test("leaves are grouped by pod, with their hosts", () => {
    expect(titles(whole, 1)).toEqual(Array.from({ length: 8 }, (_, p) => `4 switches, leaf${p}-0 … leaf${p}-3`));
    expect(titles(whole, 0)[0]).toBe("64 hosts, h0-0-0 … h0-3-15");
  });

  test("a pod opens into its leaves and racks, with the switches above", () => {
    const pod = whole.groups.find((g) => g.title.includes("leaf2-0"))!;
    const opened = fabric.drawing(pod.members, room);
    expect(titles(opened, 1)).toEqual(["leaf2-0", "leaf2-1", "leaf2-2", "leaf2-3"]);
    expect(membersAt(opened, 0)).toHaveLength(64);
    expect(opened.groups.filter((g) => g.level === 2).every((g) => g.outside)).toBe(true);
    expect(membersAt(opened, 2)).toHaveLength(4);
  });

  test("opening goes on until each node has its box", () => {
    const small = { hosts: 6, switches: 4 };
    for (let level = 0; level < 4; level++) {
      let drawing = fabric.drawing(null, small);
      for (let depth = 0; depth < 12; depth++) {
        const many = drawing.groups.find((g) => g.level === level && !g.outside && g.members.length > 1);
        if (!many) break;
        const next = fabric.drawing(many.members, small);
        const largest = Math.max(...next.groups.filter((g) => g.level === level && !g.outside).map((g) => g.members.length));
        expect(largest).toBeLessThan(many.members.length);
        drawing = next;
      }
      expect(drawing.groups.filter((g) => g.level === level && !g.outside).every((g) => g.members.length === 1)).toBe(true);
    }
  });

  test("one switch with many hosts is a switch and a rack", () => {
    const hosts = Array.from({ length: 200 }, (_, i) => `h${i}`);
    const star = new Fabric(network([["s", 0], ...hosts.map((h) => [h, null] as [string, null])], hosts.map((h) => [h, "s"])));
    expect(titles(star.drawing(null, room), 0)).toEqual(["200 hosts, h0 … h199"]);
    expect(star.drawing(Array.from({ length: 200 }, (_, i) => i + 1), room).groups.length).toBeGreaterThan(20);
  });

  test("leaves that are all alike are not put into one box", () => {
    const leaves = Array.from({ length: 200 }, (_, i) => `l${i}`);
    const links = leaves.flatMap((l): [string, string][] => [[l, "a"], [l, "b"]]);
    const clos = new Fabric(network([["a", 1], ["b", 1], ...leaves.map((l) => [l, 0] as [string, number])], links));
    expect(titles(clos.drawing(null, room), 1).length).toBeGreaterThan(20);
  });
});
