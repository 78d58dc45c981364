import { readFileSync } from "node:fs";
import { defineConfig } from "vitest/config";
import packaged from "./package.json" with { type: "json" };

// page.js has these packages in it, and their licenses ask for their text beside it.
const licenses = Object.keys(packaged.dependencies).map(
  (name) => `${name}\n\n${readFileSync(new URL(`node_modules/${name}/LICENSE`, import.meta.url), "utf8").trim()}`,
);

export default defineConfig({
  base: "./",
  define: { __VERSION__: JSON.stringify(packaged.version) },
  build: {
    target: "es2020",
    // Its files have fixed names, and Git keeps the folder.
    emptyOutDir: false,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        entryFileNames: "page.js",
        assetFileNames: "page[extname]",
        codeSplitting: false,
        postBanner: `/*!\n${licenses.join("\n\n")}\n*/`,
      },
    },
  },
  test: {
    include: ["test/**/*.test.ts"],
    setupFiles: ["test/setup.ts"],
    // Tests run beside builds that take all cores.
    testTimeout: 60_000,
    maxWorkers: 2,
  },
});
