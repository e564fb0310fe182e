// What each classmate made of a reply's thought: its answers and their verdicts, grouped by classmate and cut.

function byClassmate(reply) {
  const found = new Map();
  for (const future of reply.futures || []) {
    if (!future.cut) continue;
    const name = plain(future.by || "classmate");
    if (!found.has(name)) found.set(name, new Map());
    const cuts = found.get(name);
    if (!cuts.has(future.cut)) cuts.set(future.cut, []);
    cuts.get(future.cut).push(future);
  }
  return found;
}

const verdictOf = (future) => scoreValue(future.scores?.classmate);
function meanVerdict(futures) {
  const values = futures.map(verdictOf).filter(isNumber);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

function verdictMark(future) {
  const value = verdictOf(future);
  if (value === null) return h("span", { class: "verdict missing-text" }, `missing: ${plain(future.missing || whyMissing(future.scores?.classmate))}`);
  return h("span", { class: `verdict ${value >= 0.5 ? "plus-text" : "minus-text"}` }, value === 1 ? "right" : value === 0 ? "wrong" : format(value));
}

function firstWords(future) {
  const said = (future.messages || []).map(textOf).join(" ").trim().replace(/\s+/g, " ");
  return said.length > 110 ? `${said.slice(0, 110)}…` : said;
}

function answerBranch(future, index) {
  const turns = future.messages || [];
  return h("details", { class: "answer" },
    h("summary", {}, h("span", { class: "number" }, index + 1), verdictMark(future), h("span", { class: "excerpt" }, firstWords(future) || (turns.length ? "(nothing)" : verdictOf(future) === null ? "" : "no answer sampled: the likelihood of the right one"))),
    turns.length > 0 && h("div", { class: "turns" }, turns.map(bubble)),
    bars(future.scores, { scales: scalesOf(data.runs[browse.run]) }));
}

function seen(future) {
  const [from, to] = future.span || [];
  return isNumber(from) && isNumber(to) ? `saw tokens ${from} to ${to - 1} (${to - from}) of the thought` : "";
}

function classmatesCard(reply) {
  const found = byClassmate(reply);
  if (!found.size) return null;
  return h("div", { class: "classmates" }, h("h4", {}, `Classmates: what ${found.size > 1 ? `${found.size} other models` : "another model"} made of the thought`),
    [...found].map(([name, cuts]) => {
      const all = [...cuts.values()].flat();
      const mean = meanVerdict(all), lost = all.filter((future) => verdictOf(future) === null).length;
      return h("section", { class: "classmate" },
        h("h5", {}, h("b", {}, name), h("span", { class: mean === null ? "missing-text" : "" }, mean === null ? "missing" : `mean ${format(mean)}`), h("small", {}, count(all.length, "answer")), lost > 0 && mean !== null && h("small", { class: "missing-text" }, `${lost} missing`), cuts.size === 1 && h("small", {}, seen(all[0]))),
        [...cuts].map(([cut, futures]) => h("div", {},
          cuts.size > 1 && h("p", { class: "note" }, `cut ${cut}: ${seen(futures[0])}; mean ${format(meanVerdict(futures))}`),
          futures.map(answerBranch))));
    }));
}
