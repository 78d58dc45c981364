// What jsdom lacks, for the tests that have it.
if (typeof document !== "undefined") {
  class Observer {
    observe(): void {}
    disconnect(): void {}
  }
  globalThis.ResizeObserver = Observer as unknown as typeof ResizeObserver;
  const light = { matches: false, addEventListener() {}, removeEventListener() {} };
  globalThis.matchMedia = (() => light) as unknown as typeof matchMedia;
  HTMLCanvasElement.prototype.getContext = () => null;
}
