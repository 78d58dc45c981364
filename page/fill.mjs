// Puts a report's data into the built page, as fanin does: node fill.mjs REPORT.json OUT.html
import { readFileSync, writeFileSync } from "node:fs";

const [from, to] = process.argv.slice(2);
const page = readFileSync(new URL("dist/report.html", import.meta.url), "utf8");
const data = JSON.stringify(JSON.parse(readFileSync(from, "utf8"))).replaceAll("<", "\\u003c");
writeFileSync(to, page.replace("__DATA__", () => data));
