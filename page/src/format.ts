// Numbers for people: SI, three significant digits.

/** For a figure that is not known. */
export const NONE = "–";

const PREFIXES = ["p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E"];
const ZEROTH = 4;

const known = (x: number | null | undefined): x is number => typeof x === "number" && Number.isFinite(x);

/** Three significant digits, without a prefix: "0.123", "12.3", "1230". */
export function digits(x: number | null | undefined): string {
  if (!known(x)) return NONE;
  if (x === 0) return "0";
  const rounded = Number(x.toPrecision(3));
  const decimals = 2 - Math.floor(Math.log10(Math.abs(rounded)));
  return rounded.toFixed(Math.max(0, Math.min(decimals, 12))).replace("-", "−");
}

/** "1.23 Gbit/s". Units of which no part can be had, like packets, have no prefix below 1. */
export function si(x: number | null | undefined, unit: string, entire = false): string {
  if (!known(x)) return NONE;
  const rounded = x === 0 ? 0 : Number(x.toPrecision(3));
  let step = rounded === 0 ? 0 : Math.floor(Math.log10(Math.abs(rounded)) / 3);
  step = Math.max(entire ? 0 : -ZEROTH, Math.min(step, PREFIXES.length - 1 - ZEROTH));
  return `${digits(rounded / 10 ** (3 * step))} ${PREFIXES[step + ZEROTH]}${unit}`.trimEnd();
}

export const bits = (x: number | null | undefined): string => si(x, "bit/s", true);
export const bytes = (x: number | null | undefined): string => si(x, "B", true);
export const bytesPerSecond = (x: number | null | undefined): string => si(x, "B/s", true);

/** Milliseconds below a second, whatever the size, so that columns compare. */
export function ms(seconds: number | null | undefined): string {
  if (!known(seconds)) return NONE;
  const value = seconds * 1e3;
  return Math.abs(value) < 0.0005 ? "0 ms" : `${digits(value)} ms`;
}

/** Seconds a byte as ms a megabyte. */
export function msPerMB(secondsPerByte: number | null | undefined): string {
  return known(secondsPerByte) ? `${digits(secondsPerByte * 1e9)} ms/MB` : NONE;
}

export function percent(x: number | null | undefined): string {
  if (!known(x)) return NONE;
  return `${Math.abs(x) < 5e-6 ? "0" : digits(x * 100)} %`;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(x: number | null | undefined): string {
  return known(x) ? whole.format(x) : NONE;
}

/** "1 rank", "2 ranks", "2 boxes". */
export function several(n: number, thing: string, plural = `${thing}s`): string {
  return `${count(n)} ${n === 1 ? thing : plural}`;
}

/** How long something lasts: "12 s", "3 min 20 s", "2 h 5 min". */
export function age(seconds: number): string {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

const two = (n: number): string => String(n).padStart(2, "0");

/** Local time of day: "14:03:05". */
export function clock(seconds: number, fraction = 0): string {
  const d = new Date(seconds * 1e3);
  const part = fraction ? `.${String(d.getMilliseconds()).padStart(3, "0").slice(0, fraction)}` : "";
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}${part}`;
}

/** The time of day, with the date unless it is the day of `now`. */
export function moment(seconds: number, now: number): string {
  const d = new Date(seconds * 1e3);
  if (d.toDateString() === new Date(now * 1e3).toDateString()) return clock(seconds);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${clock(seconds)}`;
}

/** "0–2, 5". */
export function ranges(numbers: readonly number[]): string {
  const sorted = [...numbers].sort((a, b) => a - b);
  const parts: string[] = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] <= sorted[j] + 1) j++;
    parts.push(sorted[i] === sorted[j] ? `${sorted[i]}` : `${sorted[i]}–${sorted[j]}`);
    i = j + 1;
  }
  return parts.join(", ");
}

/** "rank 3", "ranks 0–3". */
export function rankList(numbers: readonly number[]): string {
  return `${numbers.length === 1 ? "rank" : "ranks"} ${ranges(numbers)}`;
}

/** The first letter of a sentence. */
export const capital = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);

export function median(values: readonly number[]): number {
  return quantile([...values].sort((a, b) => a - b), 0.5);
}

/** Of sorted values, with linear interpolation. */
export function quantile(sorted: readonly number[], q: number): number {
  if (!sorted.length) return NaN;
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low);
}

/** How long something took in virtual time: "12.3 µs", "4.5 ms", "1,230 s". */
export function duration(seconds: number | null | undefined): string {
  return known(seconds) && Math.abs(seconds) >= 999.5 ? `${count(seconds)} s` : si(seconds, "s");
}

export const gbps = (x: number | null | undefined): string => bits(known(x) ? x * 1e9 : null);
