// Runs beside each other: what each came to and the keys that differ, the recipe's diff, one goal across steps and runs.

const when = (run) => (isNumber(run.started) && run.started > 0 ? new Date(1000 * run.started).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "");
const logged = () => data.runs.filter((run) => run.curves.rows > 0 || run.counts.replies > 0); // a demo's own folder is no run

// Every phase counts its steps anew, so they are told one by one.
function stepsOf(run) {
  const phases = Object.entries(run?.curves.steps_by_phase || {}).filter(([, last]) => isNumber(last));
  return phases.map(([phase, last]) => `${phase ? `${phase}: ` : ""}step ${format(last)}`).join(", ");
}

const tagsOf = (run) => run.said.tags.length > 0 && h("div", { class: "tags" }, run.said.tags.map((tag) => h("span", {}, tag)));

function runsCard() {
  const runs = logged();
  if (runs.length < 2) return null;
  const keys = differing(runs);
  const few = keys.slice(0, 5);
  const best = {}; // by metric: only what is measured alike is compared
  for (const { result } of runs) if (result) best[result.key] = (result.key.includes("loss/") ? Math.min : Math.max)(best[result.key] ?? result.best, result.best);
  return h("section", { class: "card" }, h("h2", {}, "Runs"),
    h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, ["run", "state", "result", "last", "best", ...few, "started", "took", "steps"].map((name) => h("th", { class: few.includes(name) ? "setting" : "" }, name)))),
      h("tbody", {}, runs.map((run) => h("tr", {},
        h("td", {}, h("b", {}, run.name), run.title !== run.name && h("small", {}, run.title), tagsOf(run), run.said.note && h("small", { class: "runnote" }, run.said.note)),
        h("td", {}, run.status.state ? statusPill(run.status) : "", run.status.reason ? h("small", {}, plain(run.status.reason).slice(0, 120)) : ""),
        h("td", {}, run.result?.key || ""), h("td", { class: "num" }, run.result ? format(run.result.last) : ""),
        h("td", { class: "num" }, run.result && h("b", { class: best[run.result.key] === run.result.best ? "plus-text" : "" }, format(run.result.best))),
        few.map((key) => h("td", { class: "setting" }, data.differences[key][data.runs.indexOf(run)].slice(0, 60))),
        h("td", {}, when(run)), h("td", {}, lasting(run.seconds) || ""), h("td", {}, stepsOf(run))))))),
    keys.length > few.length && h("p", { class: "note" }, `${count(keys.length - few.length, "more key")} differ: see Recipe.`));
}

// The keys in which these runs differ, those of a few words first.
function differing(runs) {
  const at = runs.map((run) => data.runs.indexOf(run));
  const long = (key) => Math.max(...at.map((index) => data.differences[key][index].length));
  return Object.keys(data.differences).filter((key) => new Set(at.map((index) => data.differences[key][index])).size > 1).sort((a, b) => (long(a) > 24) - (long(b) > 24));
}

function recipeText(text) {
  return h("pre", { class: "recipe", tabindex: 0 }, text.split("\n").map((line) => {
    const [, key, rest] = line.match(/^(\s*(?:- )?[\w./-]+:)(.*)$/) || [null, "", line];
    const at = rest.search(/(^|\s)#/);
    const value = at < 0 ? rest : rest.slice(0, at);
    return [h("b", {}, key), value, at >= 0 && h("em", {}, rest.slice(at)), "\n"];
  }));
}

function recipeView() {
  const runs = data.runs.filter((run) => run.recipe !== null);
  if (!runs.length) return h("p", { class: "empty" }, "There is no recipe.yaml in this folder.");
  const compared = logged().filter((run) => run.recipe !== null);
  const keys = compared.length > 1 ? differing(compared) : [];
  return h("div", {},
    compared.length > 1 && h("section", { class: "card" }, h("h2", {}, "Where the recipes differ"),
      keys.length ? h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "diff" }, h("thead", {}, h("tr", {}, h("th", {}, "key"), compared.map((run) => h("th", {}, run.name)))),
        h("tbody", {}, keys.map((key) => h("tr", {}, h("th", {}, key), compared.map((run) => h("td", {}, data.differences[key][data.runs.indexOf(run)]))))))) : h("p", { class: "note first" }, "Nowhere.")),
    runs.map((run) => (runs.length > 1
      ? h("details", { class: "card" }, h("summary", {}, `The whole recipe of ${run.name}`), recipeText(run.recipe))
      : h("section", { class: "card" }, h("h2", {}, "Resolved recipe"), recipeText(run.recipe)))));
}

const evenly = (list, most) => (list.length <= most ? list : Array.from({ length: most }, (_, at) => list[Math.round((at * (list.length - 1)) / (most - 1))]));

// One goal across steps and runs: a row a run, a column a step; of each the first reply, and the rewards of all.
function goalView(row) {
  const shown = logged().map((run) => {
    const index = indexOf(run.name), number = index.strings.indexOf(row), steps = new Map();
    index.columns.row?.forEach((of, at) => {
      if (of !== number) return;
      if (!steps.has(index.step(at))) steps.set(index.step(at), []);
      steps.get(index.step(at)).push(at);
    });
    return { run, index, steps };
  }).filter(({ steps }) => steps.size);
  if (!shown.length) return h("p", { class: "empty" }, `No reply to “${row}” here.`);
  const all = [...new Set(shown.flatMap(({ steps }) => [...steps.keys()]))].sort((a, b) => a - b);
  const some = evenly(all, 8);
  return h("section", { class: "card" }, h("h2", {}, "The same goal across steps and runs"),
    h("p", { class: "note first" }, row, all.length > some.length && ` · ${some.length} of ${all.length} steps`),
    h("div", { class: "scroll", tabindex: 0 }, h("table", { class: "goal" },
      h("thead", {}, h("tr", {}, h("th", {}, "run"), some.map((step) => h("th", {}, `step ${format(step)}`)))),
      h("tbody", {}, shown.map(({ run, index, steps }) => h("tr", {}, h("th", {}, run.name), some.map((step) => goalCell(run, index, steps.get(step)))))))));
}

function goalCell(run, index, replies) {
  if (!replies) return h("td", { class: "note" }, "not played");
  const words = h("p", { class: "excerpt" }, "…");
  source.reply(run.name, replies[0]).then((reply) => {
    const last = (reply.messages || []).filter((message) => message.trained).at(-1) ?? (reply.messages || []).at(-1);
    words.textContent = plain(last?.content ?? "").slice(0, 240);
  });
  return h("td", {}, words, h("div", { class: "chips" }, replies.slice(0, 8).map((at) => chip(run, index, at, false))));
}
