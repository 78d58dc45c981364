// The state of a run's sections between draws: boxes that were opened, links that were chosen, zooms.
import type { Clock } from "./clock";
import type { Run } from "./contract";
import { Jobs } from "./jobs";
import { Network, type Shown } from "./network";
import { places } from "./places";

export class RunView {
  readonly network: Network | null;
  readonly jobs: Jobs;

  constructor(
    readonly run: Run,
    clock: Clock,
    shown: Shown,
    changed: () => void,
  ) {
    this.network = run.recording?.nodes.length ? new Network(run, places(run), clock, shown, changed) : null;
    this.jobs = new Jobs(run, changed);
  }
}
