// The part of a time line that is drawn, and how it zooms and pans.

/** The times that a canvas shows, in seconds. */
export interface View {
  from: number;
  to: number;
}

/**
 * Zooms by `factor` (below 1: in) about the time at `at` (0 to 1 of the view), within the bounds,
 * to no less than `least` seconds.
 */
export function zoomed(view: View, factor: number, at: number, bounds: View, least = 1e-4): View {
  const full = bounds.to - bounds.from;
  const span = view.to - view.from;
  const wanted = Math.min(full, Math.max(span * factor, Math.min(full, least)));
  const from = view.from + (span - wanted) * at;
  return within({ from, to: from + wanted }, bounds);
}

export function panned(view: View, seconds: number, bounds: View): View {
  return within({ from: view.from + seconds, to: view.to + seconds }, bounds);
}

function within(view: View, bounds: View): View {
  const span = Math.min(view.to - view.from, bounds.to - bounds.from);
  const from = Math.min(Math.max(view.from, bounds.from), bounds.to - span);
  return { from, to: from + span };
}

/** Round steps of 1, 2 or 5 that give at most `most` ticks. */
export function tick(span: number, most: number): number {
  const least = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(least));
  for (const m of [1, 2, 5]) if (m * power >= least) return m * power;
  return 10 * power;
}
