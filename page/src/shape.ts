// Tests of an answer's shape. Each names the first place that does not fit.

/** Null where the value fits; otherwise the path from the value to what does not, "" for the value itself. */
export type Test = (value: unknown) => string | null;

/** Paths are put together only once something is wrong: reports have millions of numbers. */
function below(place: string, path: string): string {
  return path === "" || path.startsWith("[") ? place + path : `${place}.${path}`;
}

const is = (type: "string" | "number" | "boolean"): Test => (value) => (typeof value === type ? null : "");
export const text = is("string");
export const number = is("number");
export const boolean = is("boolean");

export const orNull = (test: Test): Test => (value) => (value === null ? null : test(value));

export const list = (test: Test): Test => (value) => {
  if (!Array.isArray(value)) return "";
  for (let i = 0; i < value.length; i++) {
    const wrong = test(value[i]);
    if (wrong !== null) return below(`[${i}]`, wrong);
  }
  return null;
};

/** At least so many numbers. */
export const tuple = (length: number): Test => (value) => {
  if (!Array.isArray(value) || value.length < length) return "";
  for (let i = 0; i < length; i++) if (typeof value[i] !== "number") return "";
  return null;
};

export const map = (test: Test): Test => (value) => {
  if (typeof value !== "object" || value === null || Array.isArray(value)) return "";
  for (const [key, inner] of Object.entries(value)) {
    const wrong = test(inner);
    if (wrong !== null) return below(`["${key.slice(0, 40)}"]`, wrong);
  }
  return null;
};

export const object = (fields: { [name: string]: Test }): Test => {
  const tests = Object.entries(fields);
  return (value) => {
    if (typeof value !== "object" || value === null || Array.isArray(value)) return "";
    for (const [name, test] of tests) {
      const wrong = test((value as { [name: string]: unknown })[name]);
      if (wrong !== null) return below(name, wrong);
    }
    return null;
  };
};
