// Asks the service once a second, and says how the connection is.
import { misses, versionOf } from "./check";
import type { State } from "./contract";

export type Connection =
  | { kind: "waiting" }
  | { kind: "live" }
  /** No answer since then (seconds by this browser's clock). */
  | { kind: "silent"; since: number; why: string }
  | { kind: "refused"; status: 401 | 403; token: boolean }
  | { kind: "foreign"; version: string; field: string };

const PAUSE = 1000;
const PAUSE_AFTER_FAILURE = 2000;
const PATIENCE = 10_000;

/** The token in the page's address: `#token=TOKEN`. */
export function tokenOf(hash: string): string | null {
  const found = /(?:^#|&)token=([^&]*)/.exec(hash);
  if (!found) return null;
  try {
    return decodeURIComponent(found[1]) || null;
  } catch {
    return found[1];
  }
}

export class Poller {
  private timer: ReturnType<typeof setTimeout> | undefined;
  private asking: AbortController | undefined;
  private answered = Date.now() / 1e3;

  constructor(
    private readonly since: () => number,
    private readonly onState: (state: State) => void,
    private readonly onConnection: (connection: Connection) => void,
  ) {
    document.addEventListener("visibilitychange", () => this.start());
    addEventListener("hashchange", () => this.start());
  }

  /** Asks at once, or pauses while the tab is hidden. */
  start(): void {
    clearTimeout(this.timer);
    this.asking?.abort();
    this.asking = undefined;
    if (document.visibilityState !== "hidden") void this.ask();
  }

  private async ask(): Promise<void> {
    const asking = new AbortController();
    this.asking = asking;
    let late = false;
    const timeout = setTimeout(() => {
      late = true;
      asking.abort();
    }, PATIENCE);
    let connection: Connection;
    let state: State | null = null;
    try {
      [connection, state] = await this.answer(asking.signal);
    } catch (error) {
      const why = late ? `no answer within ${PATIENCE / 1e3} s` : reason(error);
      connection = { kind: "silent", since: this.answered, why };
    }
    clearTimeout(timeout);
    if (this.asking !== asking) return;
    if (connection.kind !== "silent") this.answered = Date.now() / 1e3;
    this.timer = setTimeout(() => void this.ask(), connection.kind === "live" ? PAUSE : PAUSE_AFTER_FAILURE);
    if (state) this.onState(state);
    this.onConnection(connection);
  }

  private async answer(signal: AbortSignal): Promise<[Connection, State | null]> {
    const token = tokenOf(location.hash);
    if (token && /[^\x21-\x7e]/.test(token)) return [{ kind: "refused", status: 403, token: true }, null];
    const headers: { [name: string]: string } = { Accept: "application/json" };
    if (token) headers.Authorization = `Bearer ${token}`;
    const reply = await fetch(`page/state?since=${this.since()}`, { headers, signal, cache: "no-store" });
    if (reply.status === 401 || reply.status === 403) {
      return [{ kind: "refused", status: reply.status, token: token !== null }, null];
    }
    if (!reply.ok) throw new Error(`HTTP status ${reply.status}`);
    const state: unknown = await reply.json();
    const field = misses(state);
    if (field !== null) return [{ kind: "foreign", version: versionOf(state), field }, null];
    return [{ kind: "live" }, state as State];
  }
}

function reason(error: unknown): string {
  if (error instanceof SyntaxError) return "the answer is not JSON";
  if (error instanceof TypeError) return "the connection fails";
  return error instanceof Error ? error.message : String(error);
}
