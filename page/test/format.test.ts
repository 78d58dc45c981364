import { describe, expect, test } from "vitest";
import { age, bits, bytes, capital, count, digits, moment, ms, msPerMB, NONE, percent, quantile, rankList, ranges, several, si } from "../src/format";

describe("three significant digits", () => {
  test.each([
    [0, "0"],
    [1, "1.00"],
    [12.345, "12.3"],
    [999.4, "999"],
    [999.6, "1000"],
    [0.012345, "0.0123"],
    [-1.5, "−1.50"],
  ])("digits(%d)", (x, text) => expect(digits(x)).toBe(text));

  test.each([
    [1.234e9, "1.23 Gbit/s"],
    [999.6e6, "1.00 Gbit/s"],
    [999.4e6, "999 Mbit/s"],
    [0, "0 bit/s"],
    [0.25, "0.250 bit/s"],
  ])("bits(%d)", (x, text) => expect(bits(x)).toBe(text));

  test("prefixes below 1 are for units that have parts", () => {
    expect(si(0.0123, "s")).toBe("12.3 ms");
    expect(si(12.3e-6, "s")).toBe("12.3 µs");
    expect(bytes(96)).toBe("96.0 B");
    expect(bytes(1.0336e12)).toBe("1.03 TB");
  });

  test("milliseconds, ms/MB and percent", () => {
    expect(ms(0.0398)).toBe("39.8 ms");
    expect(ms(1.5)).toBe("1500 ms");
    expect(ms(1e-7)).toBe("0 ms");
    expect(msPerMB(8.512e-9)).toBe("8.51 ms/MB");
    expect(percent(0.25)).toBe("25.0 %");
    expect(percent(1)).toBe("100 %");
    expect(percent(0)).toBe("0 %");
  });

  test("what is not known", () => {
    for (const shown of [bits(null), ms(undefined), percent(NaN), msPerMB(null), count(null), digits(Infinity)]) {
      expect(shown).toBe(NONE);
    }
    expect(bits("7" as unknown as number)).toBe(NONE);
  });
});

test("counts, ranks and words", () => {
  expect(count(4096)).toBe("4,096");
  expect(several(1, "rank")).toBe("1 rank");
  expect(several(4096, "rank")).toBe("4,096 ranks");
  expect([1, 2].map((n) => several(n, "box", "boxes"))).toEqual(["1 box", "2 boxes"]);
  expect(ranges([5, 0, 1, 2, 9, 8])).toBe("0–2, 5, 8–9");
  expect(ranges([])).toBe("");
  expect(rankList([3])).toBe("rank 3");
  expect(capital("ranks")).toBe("Ranks");
});

test("ages and moments", () => {
  expect(age(12.4)).toBe("12 s");
  expect(age(200)).toBe("3 min 20 s");
  expect(age(7500)).toBe("2 h 5 min");
  expect(age(-3)).toBe("0 s");
  const noon = new Date(2026, 8, 21, 12, 0, 5).getTime() / 1e3;
  expect(moment(noon, noon + 60)).toBe("12:00:05");
  expect(moment(noon - 86400, noon)).toBe("2026-09-20 12:00:05");
});

test("quantiles interpolate", () => {
  expect(quantile([1, 2, 3, 4], 0.5)).toBe(2.5);
  expect(quantile([7], 0.25)).toBe(7);
});
