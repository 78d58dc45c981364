// The colours of page.css, for canvases. They follow light and dark.
const known = new Map<string, string>();
const watchers = new Set<() => void>();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  known.clear();
  for (const redraw of watchers) redraw();
});

export function colour(name: string): string {
  let value = known.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    known.set(name, value);
  }
  return value;
}

/** Calls `redraw` when light becomes dark; the result ends that. */
export function onScheme(redraw: () => void): () => void {
  watchers.add(redraw);
  return () => watchers.delete(redraw);
}
