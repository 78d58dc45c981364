// Serves dist and a recorded answer, so that the page can be looked at: node preview.mjs [PORT] [STATE.json]
// Times move with the clock, and the samples go round.
import { createServer } from "node:http";
import { readFileSync } from "node:fs";

const [port = "8080", file = new URL("fixtures/state.json", import.meta.url)] = process.argv.slice(2);
const recorded = readFileSync(file, "utf8");
const began = Date.now();
const types = { html: "text/html; charset=utf-8", js: "text/javascript", css: "text/css" };
const policy =
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:";

function state(since) {
  const answer = JSON.parse(recorded);
  const turns = Math.floor((Date.now() - began) / 1e3);
  const shift = Math.floor(Date.now() / 1e3) - answer.now;
  answer.now += shift;
  for (const event of answer.events) event.at += shift;
  for (const job of answer.jobs) for (const sum of job.sums) sum.ended += shift;
  const { history } = answer;
  const times = history.times.map((t) => t + shift);
  const fresh = times.map((_, i) => i).filter((i) => times[i] > since);
  history.times = fresh.map((i) => times[i]);
  for (const series of [...Object.values(history.services), ...Object.values(history.jobs)]) {
    for (const [key, values] of Object.entries(series)) {
      series[key] = fresh.map((i) => values[(i + turns) % values.length]);
    }
  }
  return JSON.stringify(answer);
}

createServer((request, reply) => {
  const url = new URL(request.url, "http://localhost");
  const name = url.pathname === "/" ? "index.html" : url.pathname.slice(1);
  const headers = { "Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff" };
  if (name === "page/state") {
    reply.writeHead(200, { ...headers, "Content-Type": "application/json" });
    reply.end(state(Number(url.searchParams.get("since")) || 0));
  } else if (["index.html", "page.js", "page.css"].includes(name)) {
    reply.writeHead(200, { ...headers, "Content-Type": types[name.split(".").pop()] });
    reply.end(readFileSync(new URL(`dist/${name}`, import.meta.url)));
  } else {
    reply.writeHead(404, headers).end();
  }
}).listen(Number(port), "127.0.0.1", () => console.log(`http://127.0.0.1:${port}/`));
