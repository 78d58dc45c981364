// @vitest-environment jsdom
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { State } from "../src/contract";
import { type Connection, Poller, tokenOf } from "../src/poll";
import { recorded } from "./answers";

let connections: Connection[];
let states: State[];
let asked: { url: string; headers: { [name: string]: string } }[];
let answer: () => Promise<unknown>;
/** Pollers of earlier tests still hear events; each asks with a number of its own. */
let since = 40;
const reply = (body: unknown, status = 200): unknown => ({ ok: status < 300, status, json: async () => body });

beforeEach(() => {
  vi.useFakeTimers();
  connections = [];
  states = [];
  asked = [];
  since += 1;
  history.replaceState(null, "", "#");
  vi.stubGlobal("fetch", (url: string, init: { headers: { [name: string]: string } }) => {
    if (url === `page/state?since=${since}`) asked.push({ url, headers: init.headers });
    return answer();
  });
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

const start = (): Poller => {
  const own = since;
  const poller = new Poller(() => own, (s) => own === since && states.push(s), (c) => own === since && connections.push(c));
  poller.start();
  return poller;
};
const last = (): Connection => connections[connections.length - 1];

test("the token is what the address says", () => {
  expect(tokenOf("#token=a%2Fb+c")).toBe("a/b+c");
  expect(tokenOf("#x=1&token=t")).toBe("t");
  expect(tokenOf("#token=")).toBeNull();
  expect(tokenOf("")).toBeNull();
});

test("asks each second for what is new, with the token", async () => {
  answer = async () => reply(recorded());
  history.replaceState(null, "", "#token=secret");
  start();
  await vi.advanceTimersByTimeAsync(2500);
  expect(asked).toHaveLength(3);
  expect(asked[0].headers.Authorization).toBe("Bearer secret");
  expect(states).toHaveLength(3);
  expect(last()).toEqual({ kind: "live" });
});

test("tells since when nobody answers, and recovers", async () => {
  vi.setSystemTime(100_000);
  answer = async () => reply(recorded());
  start();
  await vi.advanceTimersByTimeAsync(500);
  answer = async () => {
    throw new TypeError("failed to fetch");
  };
  await vi.advanceTimersByTimeAsync(5000);
  expect(last()).toEqual({ kind: "silent", since: 100, why: "the connection fails" });
  answer = async () => reply(recorded());
  await vi.advanceTimersByTimeAsync(2000);
  expect(last()).toEqual({ kind: "live" });
});

test("an answer that does not come counts as none", async () => {
  answer = () => new Promise(() => {});
  vi.stubGlobal("fetch", (_url: string, { signal }: { signal: AbortSignal }) =>
    new Promise((_done, fail) => signal.addEventListener("abort", () => fail(new Error("aborted")))),
  );
  start();
  await vi.advanceTimersByTimeAsync(11_000);
  expect(last()).toMatchObject({ kind: "silent", why: "no answer within 10 s" });
});

test("tells refusals, other versions and errors apart", async () => {
  answer = async () => reply(null, 401);
  const poller = start();
  await vi.advanceTimersByTimeAsync(0);
  expect(last()).toEqual({ kind: "refused", status: 401, token: false });
  answer = async () => reply({ version: "2.0" });
  poller.start();
  await vi.advanceTimersByTimeAsync(0);
  expect(last()).toEqual({ kind: "foreign", version: "2.0", field: "now" });
  answer = async () => reply(null, 503);
  poller.start();
  await vi.advanceTimersByTimeAsync(0);
  expect(last()).toMatchObject({ kind: "silent", why: "HTTP status 503" });
  expect(states).toHaveLength(0);
});

test("pauses while the tab is hidden", async () => {
  answer = async () => reply(recorded());
  start();
  await vi.advanceTimersByTimeAsync(0);
  const seen = vi.spyOn(document, "visibilityState", "get").mockReturnValue("hidden");
  document.dispatchEvent(new Event("visibilitychange"));
  await vi.advanceTimersByTimeAsync(10_000);
  expect(asked).toHaveLength(1);
  seen.mockReturnValue("visible");
  document.dispatchEvent(new Event("visibilitychange"));
  await vi.advanceTimersByTimeAsync(0);
  expect(asked).toHaveLength(2);
});
