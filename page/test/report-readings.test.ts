import { expect, test } from "vitest";
import { KINDS, part, Readings, step } from "../src/report/readings";
import { network } from "./report";

const recording = network([["s", 0], ["a", null]], [["a", "s"]]);
recording.ends = [1, 4];
Object.assign(recording.directions[0], { busy: [1000, 200], queued: [400, 0], dropped: [2, 3] });
recording.directions[1].busy = null;
const readings = new Readings(recording);

test("loads and queues are means over time, drops are sums", () => {
  expect(readings.value("busy", 0, null)).toBeCloseTo((1 * 1 + 0.2 * 3) / 4);
  expect(readings.value("busy", 0, 1)).toBe(0.2);
  expect(readings.value("queued", 0, null)).toBe(100);
  expect(readings.value("dropped", 0, null)).toBe(5);
  expect(readings.value("marked", 0, 1)).toBe(0);
  expect(readings.value("busy", 1, null)).toBe(0);
});

test("a load below a per mille is not 0", () => {
  expect([0, 0.0004, 0.001, 0.25, null].map(KINDS.busy.show)).toEqual(["0 %", "< 0.1 %", "0.100 %", "25.0 %", "–"]);
});

test("the largest value is that of the run, or of any interval", () => {
  expect(readings.largest("busy", 0)).toBe(1);
  expect(readings.largest("dropped", 1)).toBe(3);
  expect(readings.largest("dropped", null)).toBe(5);
});

test("the busiest come first, and idle ones not at all", () => {
  const many = network([["s", 0], ["a", null], ["b", null], ["c", null]], [["a", "s"], ["b", "s"], ["c", "s"]]);
  expect(new Readings(many).top("busy", null, 3)).toEqual([5, 4, 3]);
  expect(readings.top("busy", null, 20)).toEqual([0]);
  expect(readings.top("marked", null, 20)).toEqual([]);
});

test("loads have the steps of the live page, other measures thirds of the largest", () => {
  expect([0, 0.2, 0.6, 0.9].map((v) => step("busy", v, 1))).toEqual(["unknown", "light", "busy", "full"]);
  expect([0, 20, 50, 90].map((v) => step("queued", v, 90))).toEqual(["unknown", "light", "busy", "full"]);
  expect(part("queued", 5, 0)).toBe(0);
});
