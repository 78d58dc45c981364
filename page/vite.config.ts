import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";
import packaged from "./package.json" with { type: "json" };

const read = (path: string): string => readFileSync(new URL(path, import.meta.url), "utf8");

// The scripts have these packages in them, and their licenses ask for their text beside it.
const licenses = Object.keys(packaged.dependencies).map(
  (name) => `${name}\n\n${read(`node_modules/${name}/LICENSE`).trim()}`,
);

/** The mark that fanin replaces by the data of a report. */
const DATA = "__DATA__";

/** Makes one file of script, style and src/report/report.html. The policy allows these two by their hashes. */
const oneFile: Plugin = {
  name: "one-file",
  generateBundle(_options, bundle) {
    let script = "";
    let style = "";
    for (const [name, file] of Object.entries(bundle)) {
      if (file.type === "chunk") script += file.code;
      else style += String(file.source);
      delete bundle[name];
    }
    script = `\n${script.trim()}\n`;
    style = `\n${style.trim()}\n`;
    if (/<\/script|<!--/i.test(script)) this.error("the script would end its element too early");
    if (/<\/style/i.test(style)) this.error("the style would end its element too early");
    const hash = (text: string): string => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;
    const policy = [
      "default-src 'none'",
      `script-src ${hash(script)}`,
      `style-src ${hash(style)}`,
      "img-src data: blob:",
      "base-uri 'none'",
      "form-action 'none'",
    ].join("; ");
    const parts: { [mark: string]: string } = { "%POLICY%": policy, "%STYLE%": style, "%SCRIPT%": script };
    const page = read("src/report/report.html").replace(/%[A-Z]{5,}%/g, (mark) => parts[mark]);
    if (page.split(DATA).length !== 2) this.error(`${DATA} has to be in the file once`);
    this.emitFile({ type: "asset", fileName: "report.html", source: page });
  },
};

export default defineConfig(({ mode }) => ({
  base: "./",
  define: { __VERSION__: JSON.stringify(packaged.version) },
  plugins: mode === "report" ? [oneFile] : [],
  build: {
    target: "es2020",
    // Its files have fixed names, and Git keeps the folder.
    emptyOutDir: false,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      input: mode === "report" ? "src/report/main.ts" : "index.html",
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
}));
