// The header, the headline table, and what is missing or left out.

const STATES = { finished: "good", running: "busy", stopped: "bad", failed: "bad", killed: "bad" };

function statusPill(status) {
  const state = String(status.state);
  return h("span", { class: `pill ${Object.hasOwn(STATES, state) ? STATES[state] : ""}` }, h("i", { class: "dot" }), state);
}

function header() {
  const runs = logged();
  const first = data.runs[0];
  const seconds = (data.own ? first.seconds : null) ?? (data.runs.reduce((sum, run) => sum + (run.seconds || 0), 0) || null);
  const replies = runs.reduce((sum, run) => sum + Math.max(run.counts.replies, indexOf(run.name).count), 0);
  const futures = runs.reduce((sum, run) => sum + run.counts.futures, 0);
  const facts = [
    lasting(seconds),
    runs.length > 1 && `${runs.length} runs`,
    runs.length === 1 && stepsOf(runs[0]),
    replies > 0 && count(replies, "reply", "replies"),
    futures > 0 && count(futures, "future"),
  ].filter(Boolean);
  const status = data.own ? first.status : {};
  const left = status.state === "running" && isNumber(status.eta_seconds) && lasting(status.eta_seconds);
  const versions = Object.keys(first.versions).length ? first.versions : data.runs.find((run) => Object.keys(run.versions).length)?.versions || {};
  const extra = Object.entries(status).filter(([name, value]) => name !== "state" && value !== null && typeof value !== "object");
  const alarms = Array.isArray(status.alarms) ? status.alarms : [];
  return h("header", {},
    h("div", { class: "brand" }, "Upshot"),
    h("h1", {}, data.title, " ", status.state && statusPill(status), LIVE && h("span", { class: connection.lost ? "pill bad" : "pill" }, connection.lost ? "the server is gone" : "live")),
    h("p", { class: "facts" }, facts.map((fact) => h("span", {}, fact)), left && h("span", {}, `about ${left} left`)),
    data.own && [tagsOf(first), first.said.note && h("p", { class: "note first runnote" }, first.said.note)],
    alarms.map((alarm) => h("p", { class: "note first missing-text" }, plain(alarm))),
    (extra.length > 0 || Object.keys(versions).length > 0) && h("details", { class: "quiet" },
      h("summary", {}, versionLine(versions) || "Status"),
      h("dl", { class: "pairs" }, [...extra, ...Object.entries(versions)].map(([name, value]) => [h("dt", {}, name), h("dd", {}, isNumber(value) && value > 1e9 && value < 1e10 ? new Date(1000 * value).toLocaleString() : plain(value))]))));
}

function versionLine(versions) {
  const wanted = ["upshot", "python", "torch", "transformers", "device", "commit"];
  const known = wanted.filter((name) => typeof versions[name] === "string");
  const names = known.length ? known : Object.keys(versions).filter((name) => typeof versions[name] === "string").slice(0, 4);
  return names.map((name) => `${name} ${versions[name].slice(0, 24)}`).join(" · ");
}

function headlineTable(table) {
  const bounds = table.columns.map((_, column) => {
    const cells = table.rows.map((row) => row[column]).filter((cell) => cell && isNumber(cell.value));
    const all = cells.flatMap((cell) => [cell.low, cell.value, cell.high].filter(isNumber));
    return all.length ? { low: Math.min(0, ...all), high: Math.max(...all), digits: decimals(all) } : null;
  });
  return h("section", { class: "card" },
    h("h2", {}, table.title || "Results"),
    h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "headline" },
      h("thead", {}, h("tr", {}, table.columns.map((name, column) => h("th", { class: bounds[column] || table.rows.every((row) => looksNumeric(row[column])) ? "num" : "" }, plain(name))))),
      h("tbody", {}, table.rows.map((row) => h("tr", { class: row[0] === table.winner ? "winner" : "" }, row.map((cell, column) => tableCell(cell, bounds[column]))))))),
    table.note && h("p", { class: "note" }, plain(table.note)));
}

const looksNumeric = (cell) => isNumber(cell) || (typeof cell === "string" && /^[+−-]?[\d.,]+\s?%?$/.test(cell));

function tableCell(cell, bounds) {
  if (cell === null || cell === undefined) return h("td", { class: "num missing-text" }, "missing");
  if (typeof cell !== "object") return h("td", { class: looksNumeric(cell) ? "num" : "" }, isNumber(cell) ? format(cell) : cell);
  if (!isNumber(cell.value)) return h("td", { class: "num missing-text" }, cell.missing ? `missing: ${cell.missing}` : "missing");
  const interval = isNumber(cell.low) && isNumber(cell.high);
  return h("td", { class: "num" },
    h("b", {}, fixed(cell.value, bounds.digits)),
    interval && h("small", {}, `${fixed(cell.low, bounds.digits)} to ${fixed(cell.high, bounds.digits)}`),
    interval && whisker(cell, bounds));
}

function whisker(cell, { low, high }) {
  const place = (value) => 3 + (94 * (value - low)) / (high - low || 1);
  return svg("svg", { class: "whisker", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 100, y1: 4, y2: 4, class: "rail" }),
    svg("line", { x1: place(cell.low), x2: place(cell.high), y1: 4, y2: 4, class: "reach" }),
    svg("line", { x1: place(cell.value), x2: place(cell.value), y1: 0, y2: 8, class: "middle" }));
}

// Counts that the trainer logged at every step, over all replies; rollouts.jsonl may hold only some of them.
function trainedMissing(run) {
  const many = data.runs.length > 1;
  return Object.entries(run.missing_logged).map(([reason, total]) => h("tr", {}, many && h("td", { class: "in" }, run.name), h("td", { class: "what" }, reason), h("td", { class: "num" }, format(total))));
}

function missingCard() {
  const withCounts = data.runs.filter((run) => run.counts.replies > 0);
  const logged = data.runs.flatMap(trainedMissing);
  if (!withCounts.length && !logged.length) return null;
  const rows = withCounts.flatMap((run) => run.missing.map((entry) => ({ run, ...entry })));
  const many = data.runs.length > 1;
  const more = withCounts.filter((run) => run.more_reasons[0] > 0);
  return h("section", { class: "card" },
    h("h2", {}, "Missing, by reason"),
    logged.length > 0 && [
      h("p", { class: "note first" }, "In the whole run, as metrics.jsonl counts them:"),
      h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "missing" }, h("thead", {}, h("tr", {}, many && h("th", {}, "run"), h("th", {}, "reason"), h("th", { class: "num" }, "count"))), h("tbody", {}, logged)))],
    logged.length > 0 && rows.length > 0 && h("p", { class: "note" }, "In the replies that rollouts.jsonl contains:"),
    rows.length === 0
      ? withCounts.length > 0 && h("p", { class: "note" }, `${logged.length ? "In rollouts.jsonl, nothing" : "Nothing"} is missing: every score of ${count(withCounts.reduce((sum, run) => sum + run.counts.replies, 0), "logged reply", "logged replies")} has a value.`)
      : [h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "missing" },
          h("thead", {}, h("tr", {}, many && h("th", {}, "run"), h("th", {}, "what"), h("th", {}, "reason"), h("th", { class: "num" }, "count"), h("th", { class: "num" }, "share"), h("th", {}))),
          h("tbody", {}, rows.map((row) => h("tr", {},
            many && h("td", { class: "in" }, row.run.name), h("td", { class: "what" }, row.what), h("td", { class: "why" }, row.reason),
            h("td", { class: "num" }, row.count.toLocaleString("en-US"), h("small", {}, ` of ${row.of.toLocaleString("en-US")}`)),
            h("td", { class: "num" }, `${fixed((100 * row.count) / row.of, 1)} %`),
            h("td", { class: "sharecell" }, h("span", { class: "share" }, h("i", { style: `width:${(100 * row.count) / row.of}%` })))))))),
        h("p", { class: "note" }, "Missing is not zero: these scores are left out of the means and of the loss. Counted over all replies in rollouts.jsonl, not only those on this page.")],
    more.map((run) => h("p", { class: "note" }, `${run.name}: ${count(run.more_reasons[0], "rarer reason")} (${run.more_reasons[1]} in all) are not listed.`)));
}

function notesCard() {
  const notes = data.runs.flatMap((run) => run.notes);
  return notes.length > 0 && h("section", { class: "card" }, h("h2", {}, "Left out, or not readable"), h("ul", { class: "notes" }, notes.map((note) => h("li", {}, note))));
}

// What a demonstration found: one sentence, a reply of the winner with what came of it, the curve that tells it.
function findingCard(run) {
  const { finding, example, curve } = run.table || {};
  if (!finding) return null;
  const fork = h("div", { class: "forkplace" });
  if (Array.isArray(example)) {
    const [inner, step, key] = example;
    const name = runOf(`${run.name}/${inner}`) ? `${run.name}/${inner}` : inner; // opened from above, or as its own folder
    const index = indexOf(name);
    const at = index.columns.key?.findIndex((own, place) => own === key && index.step(place) === step) ?? -1;
    if (at >= 0) source.reply(name, at).then((reply) => { fork.replaceChildren(forkCard(reply, name)); redraw(); });
  }
  const lines = (curve?.lines || []).map((line, at) => ({ name: line.name, label: curve.title, colour: at, xs: line.x, ys: line.y, missing: 0 }));
  return h("section", { class: "card finding" }, h("p", { class: "lead" }, plain(finding)),
    h("div", { class: "beside" }, fork, lines.length > 0 && chartCard({ title: plain(curve.title), lines })));
}

function overview() {
  const tables = data.runs.filter((run) => run.table).flatMap((run) => [findingCard(run), headlineTable(run.table)]);
  const glance = glanceCharts();
  return h("div", {}, tables, runsCard(), glance && h("section", { class: "card" }, h("h2", {}, "At a glance"), glance), missingCard(), notesCard());
}
