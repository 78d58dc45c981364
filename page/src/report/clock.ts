// The slider over time: the whole run, or an interval. Runs side by side share it.
import { html, nothing, type TemplateResult } from "lit-html";
import { duration } from "../format";
import type { When } from "./readings";

const STEP_MS = 500;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Clock {
  /** The end of the chosen interval, or null for the whole run. */
  private time: number | null = null;
  private timer: ReturnType<typeof setInterval> | null = null;

  constructor(private readonly changed: () => void) {}

  /** The interval of a run that has the chosen time. A run that was over then shows its last one. */
  when(ends: readonly number[]): When {
    if (this.time === null || !ends.length) return null;
    const at = ends.findIndex((end) => end >= this.time! * (1 - 1e-9));
    return at < 0 ? ends.length - 1 : at;
  }

  choose(ends: readonly number[], when: When): void {
    this.time = when === null ? null : ends[when];
    this.changed();
  }

  private stop(): void {
    if (this.timer) clearInterval(this.timer);
    this.timer = null;
  }

  private play(ends: readonly number[]): void {
    if (this.timer) {
      this.stop();
      return this.changed();
    }
    const next = (): void => {
      const when = this.when(ends);
      if (when === ends.length - 1) this.stop();
      this.choose(ends, when === null ? 0 : Math.min(ends.length - 1, when + 1));
    };
    if (this.when(ends) === ends.length - 1) this.time = null;
    this.timer = setInterval(next, STEP_MS);
    next();
  }

  template(ends: readonly number[]): TemplateResult {
    const when = this.when(ends);
    const text = timeText(ends, when);
    return html`<div class="clock" role="group" aria-label="Time that the map shows">
      <button type="button" aria-pressed=${when === null} @click=${() => {
        this.stop();
        this.choose(ends, null);
      }}>Whole run</button>
      ${calm.matches
        ? nothing
        : html`<button type="button" class="play" @click=${() => this.play(ends)}>${this.timer ? "Pause" : "Play"}</button>`}
      <input
        type="range"
        min="0"
        max=${ends.length}
        step="1"
        aria-label="Interval"
        aria-valuetext=${text}
        .value=${String(when === null ? 0 : when + 1)}
        @input=${(e: Event) => {
          this.stop();
          const at = Number((e.target as HTMLInputElement).value);
          this.choose(ends, at === 0 ? null : at - 1);
        }}
      />
      <output>${text}</output>
    </div>`;
  }
}

export function timeText(ends: readonly number[], when: When): string {
  if (when === null) return "whole run";
  return `${duration(when ? ends[when - 1] : 0)} to ${duration(ends[when])}`;
}
