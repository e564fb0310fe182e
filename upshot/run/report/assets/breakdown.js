// Bars for scores, rewards and credit. A missing score has no bar but its reason.

function scale(scores) {
  const values = scores.map(scoreValue).filter(isNumber);
  const low = Math.min(0, ...values), high = Math.max(0, ...values);
  return low === high ? [0, 1] : [low, high];
}

function bar(score, [low, high]) {
  const value = scoreValue(score);
  if (value === null) return h("div", { class: "barbox none" }, h("span", {}, whyMissing(score)));
  const place = (x) => (100 * (x - low)) / (high - low);
  const from = place(Math.min(0, value)), to = place(Math.max(0, value));
  return h("div", { class: "barbox" },
    h("i", { class: value < 0 ? "fill minus" : "fill", style: `left:${from}%;width:${to - from}%;${value === 0 ? "min-width:0" : ""}` }),
    low < 0 && h("i", { class: "zero", style: `left:${place(0)}%` }));
}

function detailOf(score) {
  const detail = score && typeof score === "object" ? score.detail : null;
  return detail && Object.keys(detail).length > 0 && h("details", { class: "quiet detail" }, h("summary", {}, "detail"), pairs(detail));
}

const pairs = (object) => h("dl", { class: "pairs" }, Object.entries(object).map(([name, value]) => [h("dt", {}, name), h("dd", {}, plain(value))]));

// Raw scores have different units, so each metric has its own scale: that of all its scores in the run.
function scalesOf(run) {
  if (!run.scales) {
    const all = {};
    for (const reply of run.replies) for (const future of reply.futures || []) for (const [name, score] of Object.entries(future.scores || {})) (all[name] ||= []).push(score);
    run.scales = Object.fromEntries(Object.entries(all).map(([name, scores]) => {
      const [low, high] = scale(scores);
      return [name, low === 0 && high <= 1 ? [0, 1] : [low, high]];
    }));
  }
  return run.scales;
}

// Terms and parts are shares of one reward: one scale for all of them, in all replies of the run.
function rewardScale(run) {
  if (!run.rewardScale) run.rewardScale = scale(run.replies.flatMap((reply) => [...Object.values(reply.reward?.terms || {}), ...Object.values(reply.reward?.parts || {})]));
  return run.rewardScale;
}

function bars(scores, { second, scales, span } = {}) {
  const names = Object.keys(scores || {});
  if (!names.length) return null;
  return h("div", { class: "bars" }, names.map((name) => {
    const value = scoreValue(scores[name]);
    return h("div", { class: "barrow" },
      h("span", { class: "barname", title: name }, name),
      bar(scores[name], scales?.[name] || span || scale(names.map((other) => scores[other]))),
      h("span", { class: value === null ? "barvalue missing-text" : "barvalue" }, value === null ? "missing" : format(value),
        second && second[name] !== undefined && scoreValue(second[name]) !== null && h("small", {}, `mean ${format(scoreValue(second[name]))}`)),
      detailOf(scores[name]));
  }));
}

function rewardCard(reward) {
  if (!reward || !reward.total) return h("p", { class: "note" }, "No reward in this log.");
  const total = scoreValue(reward.total);
  const span = rewardScale(data.runs[browse.run]);
  return h("div", { class: "reward" },
    h("div", { class: "total" },
      h("small", {}, "reward"),
      total === null ? h("b", { class: "missing-text" }, "missing") : h("b", {}, format(total)),
      total === null && h("span", { class: "missing-text" }, whyMissing(reward.total)),
      isNumber(reward.extrinsic) && isNumber(reward.intrinsic) && h("span", { class: "note" }, `what was achieved ${signed(reward.extrinsic)}, how it was said ${signed(reward.intrinsic)}`)),
    Object.keys(reward.parts || {}).length > 1
      ? h("div", { class: "parts" }, h("small", {}, "its parts"), bars(reward.parts, { span }), reward.terms && [h("small", {}, "the main part's terms"), bars(reward.terms, { second: reward.means, span })])
      : bars(reward.terms || reward.parts, { second: reward.means, span }));
}

const strength = (span, most) => (isNumber(span.advantage) ? 0.2 + (0.8 * Math.abs(span.advantage)) / most : 1);
const side = (span) => (!isNumber(span.advantage) ? "none" : span.advantage < 0 ? "minus" : "plus");
const earns = (span) => (span.parts || []).map(plain).join(" + ") || "nothing";

// The reply's own tokens as text, tinted by what they earned; tokens that earn more than the main part are underlined.
function passage(credit, most) {
  if (!credit.every((span) => isNumber(span.text))) return null;
  const text = h("div", { class: "passage" }, credit.map((span) => h("span", {
    class: `tint ${side(span)} ${(span.parts || []).some((part) => part !== "main") ? "extra" : ""}`, style: `--strength:${span.advantage === 0 ? 0 : strength(span, most).toFixed(3)}`,
    title: `${earns(span)}: ${isNumber(span.advantage) ? signed(span.advantage) : "left out of the loss"}`,
  }, data.texts[span.text] ?? "")));
  return [text, h("p", { class: "note first" }, "Green tokens earned more than those of the group's other replies, orange ones less, the stronger the more; underlined ones earn more parts than the main one.")];
}

function creditCard(credit) {
  if (!Array.isArray(credit) || !credit.length) return null;
  const most = Math.max(...credit.map((span) => Math.abs(span.advantage || 0)), 1e-9);
  return h("div", { class: "credit" }, h("h4", {}, "Credit"),
    passage(credit, most),
    h("div", { class: "strip", "aria-hidden": "true" }, credit.map((span) => h("i", { class: side(span), style: `flex-grow:${Math.max(1, span.stop - span.start)};--strength:${strength(span, most)}` }))),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "tokens"), h("th", {}, "earns"), h("th", { class: "num" }, "advantage"))),
      h("tbody", {}, credit.map((span) => h("tr", {},
        h("td", {}, `${span.start} to ${span.stop - 1}`, h("small", {}, count(span.stop - span.start, "token"))),
        h("td", {}, earns(span)),
        h("td", { class: "num" }, isNumber(span.advantage) ? h("b", { class: span.advantage < 0 ? "minus-text" : span.advantage > 0 ? "plus-text" : "" }, signed(span.advantage)) : h("span", { class: "missing-text" }, "missing: left out of the loss"))))))));
}
