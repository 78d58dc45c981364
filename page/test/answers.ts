import state from "../fixtures/state.json";
import type { Job, State, Sum } from "../src/contract";

const text = JSON.stringify(state);

/** A fresh copy of the recorded answer. */
export const recorded = (): State => JSON.parse(text) as State;

export const job = (): Job => recorded().jobs[0];

export function sum(ended: number, ranks: [number, number, number][], number = 1): Sum {
  return { number, ended, bytes: 1000, collective: "all_reduce", dtype: "float32", ranks };
}
