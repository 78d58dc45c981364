// The server, its version, and how the connection to it is.
import { html, nothing, type TemplateResult } from "lit-html";
import type { State } from "./contract";
import { age, capital, clock } from "./format";
import type { Connection } from "./poll";

const PARTS = [
  ["map", "Map"],
  ["jobs", "Jobs"],
  ["events", "Events"],
];

export function header(state: State | null, connection: Connection): TemplateResult {
  const { tone, text } = status(connection, state);
  return html`<div class="topbar">
    <h1>fanin</h1>
    <span class="server" title=${state?.server ?? ""}>${state?.server ?? ""}</span>
    ${state ? html`<span class="version">${state.version}</span>` : nothing}
    <nav aria-label="Parts of the page">
      ${(state ? PARTS : []).map(
        ([id, name]) =>
          html`<button type="button" @click=${() => document.getElementById(id)?.scrollIntoView()}>${name}</button>`,
      )}
    </nav>
    <span class="connection ${tone}"><span class="dot" aria-hidden="true"></span>${text}</span>
  </div>`;
}

function status(connection: Connection, state: State | null): { tone: string; text: string } {
  switch (connection.kind) {
    case "live":
      return { tone: "good", text: state ? `live, ${clock(state.now)}` : "live" };
    case "silent":
      return { tone: "bad", text: "no answer" };
    case "refused":
      return { tone: "bad", text: connection.status === 401 ? "token is missing" : "refused" };
    case "foreign":
      return { tone: "bad", text: "versions differ" };
    case "waiting":
      return { tone: "idle", text: "asks" };
  }
}

/** What stands above all else while the connection is not well. */
export function notice(connection: Connection, state: State | null, now: number): TemplateResult | typeof nothing {
  if (connection.kind === "silent") {
    return html`<p class="notice bad" role="alert">
      <b>The service has not answered since ${clock(connection.since)}.</b>
      <span aria-hidden="true">That is ${age(now - connection.since)} ago.</span>
      <span>${capital(connection.why)}. ${state ? "The page shows the last answer." : ""} The page goes on asking.</span>
    </p>`;
  }
  if (connection.kind === "refused") return html`<p class="notice bad" role="alert">${refusal(connection.status, connection.token)}</p>`;
  if (connection.kind === "foreign") {
    return html`<p class="notice bad" role="alert">
      <b>This page is of version ${__VERSION__}, the service of version ${connection.version}.</b>
      <span>The page does not understand the field <code>${connection.field}</code> of its answer. Reload the page.</span>
    </p>`;
  }
  if (state && state.version !== __VERSION__) {
    return html`<p class="notice">
      This page is of version ${__VERSION__}, the service of version ${state.version}. Reload the page to have both alike.
    </p>`;
  }
  return nothing;
}

function refusal(status: 401 | 403, token: boolean): TemplateResult {
  const how = html`Put it at the end of the page's address: <code>#token=TOKEN</code>`;
  if (token) return html`<b>The service refuses this token.</b> <span>Take the right one. ${how}</span>`;
  return status === 401
    ? html`<b>The service wants a token.</b> <span>${how}</span>`
    : html`<b>The service lets nobody in without the right token.</b> <span>${how}</span>`;
}
