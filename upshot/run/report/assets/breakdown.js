// Bars for scores, rewards and credit, on the scale of the whole run. A missing score has no bar but its reason.

const runOf = (name) => data.runs.find((run) => run.name === name);

// From zero to the farthest that the run has; a share is drawn as one of 1.
function scaleOf(run, name) {
  const [low, high] = run?.scales?.[name] || [0, 0];
  const from = Math.min(0, low), to = Math.max(0, high);
  return from === to || (from === 0 && to <= 1 && name !== "reward") ? [from, Math.max(1, to)] : [from, to];
}

function bar(score, [low, high], tone) {
  const value = scoreValue(score);
  if (value === null) return h("div", { class: "barbox none" }, h("span", {}, whyMissing(score)));
  const place = (x) => (100 * (x - low)) / (high - low);
  const from = place(Math.min(0, value)), to = place(Math.max(0, value));
  return h("div", { class: "barbox" },
    h("i", { class: `fill ${tone ?? (value < 0 ? "minus" : "")}`, style: `left:${from}%;width:${to - from}%;${value === 0 ? "min-width:0" : ""}` }),
    low < 0 && h("i", { class: "zero", style: `left:${place(0)}%` }));
}

function detailOf(score) {
  const detail = score && typeof score === "object" ? score.detail : null;
  return detail && Object.keys(detail).length > 0 && h("details", { class: "quiet detail" }, h("summary", {}, "detail"), pairs(detail));
}

const pairs = (object) => h("dl", { class: "pairs" }, Object.entries(object).map(([name, value]) => [h("dt", {}, name), h("dd", {}, plain(value))]));

// options: second (other scores to be told beside), scale(name), tone(name).
function bars(scores, { second, scale, tone } = {}) {
  const names = Object.keys(scores || {});
  if (!names.length) return null;
  return h("div", { class: "bars" }, names.map((name) => {
    const value = scoreValue(scores[name]);
    return h("div", { class: "barrow" },
      h("span", { class: "barname", title: name }, name),
      bar(scores[name], scale(name), tone?.(name)),
      h("span", { class: value === null ? "barvalue missing-text" : "barvalue" }, value === null ? "missing" : format(value),
        second && second[name] !== undefined && scoreValue(second[name]) !== null && h("small", {}, `mean ${format(scoreValue(second[name]))}`)),
      detailOf(scores[name]));
  }));
}

// A raw score is green where more of it is rewarded, orange where it is penalised, grey where it does not count.
function toneOf(reward) {
  return (name) => {
    const term = scoreValue(reward?.terms?.[name]), raw = scoreValue(reward?.means?.[name]);
    if (reward?.terms && !Object.hasOwn(reward.terms, name)) return "unweighted";
    return term !== null && raw !== null && term * raw < 0 ? "minus" : "";
  };
}

// What the total is made of, in one sentence: what was achieved, how it was said, and every part beside the main one.
function sentenceOf(reward) {
  const parts = Object.entries(reward.parts || {}).filter(([name, score]) => name !== "main" && scoreValue(score) !== null);
  const said = [];
  if (isNumber(reward.extrinsic)) said.push(`what was achieved ${signed(reward.extrinsic)}`);
  if (isNumber(reward.intrinsic) && (reward.intrinsic !== 0 || !parts.length)) said.push(`how it was said ${signed(reward.intrinsic)}`);
  for (const [name, score] of parts) said.push(`${name} ${signed(scoreValue(score))}`);
  return said.length > 1 && said.join(", ");
}

// `group`: the rewards of all replies to the same prompt.
function rewardCard(reward, run, group = []) {
  if (!reward || !reward.total) return h("p", { class: "note" }, "No reward in this log.");
  const total = scoreValue(reward.total);
  const scale = () => scaleOf(run, "reward");
  const several = Object.keys(reward.parts || {}).length > 1;
  return h("div", { class: "reward" },
    h("div", { class: "total" },
      h("small", {}, "reward"),
      total === null ? h("b", { class: "missing-text" }, "missing") : h("b", {}, format(total)),
      total === null && h("span", { class: "missing-text" }, whyMissing(reward.total)),
      group.length > 1 && h("span", { class: "note groupmean" }, `group mean ${format(mean(group))} of ${group.length}`),
      sentenceOf(reward) && h("span", { class: "note" }, sentenceOf(reward))),
    several
      ? h("div", { class: "parts" }, h("small", {}, "its parts"), bars(reward.parts, { scale }), reward.terms && [h("small", {}, "the main part's terms"), bars(reward.terms, { second: reward.means, scale })])
      : bars(reward.terms || reward.parts, { second: reward.means, scale }));
}
