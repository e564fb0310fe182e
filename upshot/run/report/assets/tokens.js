// Credit on the text: the policy's own tokens, coloured by what they earned or how likely they were.

const COLOURS = { none: "none", advantage: "advantage", credit: "credit", logprob: "log-probability", part: "part" };
const MANY_TOKENS = 6000; // drawn at once
const UNLIKELY = 5; // nats: as dark as it gets

const earns = (span) => (span?.parts || []).map(plain).join(" + ") || "nothing";

// What a span earns before it is compared: the sum of its parts; null where one of them is missing.
function creditOf(span, reward) {
  const values = (span?.parts || []).map((part) => scoreValue(reward?.parts?.[part]));
  return values.length && values.every(isNumber) ? values.reduce((a, b) => a + b, 0) : null;
}

// Every policy turn as units of text: its tokens, or, in logs that kept no tokens, its credited spans.
function unitsOf(reply) {
  const spans = Array.isArray(reply.credit) ? reply.credit : [];
  const spanAt = (place) => spans.find((span) => span.start <= place && place < span.stop);
  if (reply.tokens?.length) {
    return reply.tokens.map((turn) => turn.pieces.map((text, at) => ({ text, id: turn.ids?.[at], place: turn.at + at, logprob: turn.logprobs[at], span: spanAt(turn.at + at) })));
  }
  return spans.length && spans.every((span) => typeof span.text === "string") ? [spans.map((span) => ({ text: span.text, place: span.start, span }))] : [];
}

function colourOf(unit, mode, reply, run) {
  const tinted = (value, most) => (!isNumber(value) ? ["none", 0] : [value < 0 ? "minus" : "plus", value === 0 ? 0 : 0.15 + 0.85 * Math.min(1, Math.abs(value) / (most || 1))]);
  if (mode === "advantage") return tinted(unit.span?.advantage ?? null, Math.max(...(run?.scales?.advantage || [1]).map(Math.abs)));
  if (mode === "credit") return tinted(creditOf(unit.span, reply.reward), Math.max(...scaleOf(run, "reward").map(Math.abs)));
  if (mode === "logprob") return isNumber(unit.logprob) ? ["rare", Math.min(1, -unit.logprob / UNLIKELY)] : ["none", 0];
  const sets = [...new Set((reply.credit || []).map(earns))];
  return [`part-${unit.span ? sets.indexOf(earns(unit.span)) % 6 : "none"}`, unit.span ? 0.8 : 0];
}

function unitText(unit, reply) {
  const credit = creditOf(unit.span, reply.reward);
  return [
    reply.tokens?.length ? `token ${unit.place}${isNumber(unit.id) ? ` (id ${unit.id})` : ""}` : null,
    isNumber(unit.logprob) && `log-probability ${format(unit.logprob)} (${format(100 * Math.exp(unit.logprob))} %)`,
    unit.span ? `earns ${earns(unit.span)}${credit === null ? "" : ` = ${format(credit)}`}` : "earns nothing",
    unit.span && (isNumber(unit.span.advantage) ? `advantage ${signed(unit.span.advantage)}${isNumber(reply.groupMean) ? ` (${reply.branch ? "siblings' mean" : "group mean"} ${format(reply.groupMean)})` : ""}` : reply.branch ? "left out of the loss: no sibling that earned more or less" : "left out of the loss: something it earns is missing"),
  ].filter(Boolean).join(" · ");
}

// One turn's tokens; a click or a tap tells of one.
function colouredTurn(units, mode, reply, run) {
  const about = h("p", { class: "note first tokeninfo", role: "status" }, "Point at a token for its numbers.");
  const draw = (some) => some.map((unit) => {
    const [tone, strength] = colourOf(unit, mode, reply, run);
    const extra = (unit.span?.parts || []).some((part) => part !== "main");
    return fill(h("span", { class: `tint ${tone} ${extra ? "extra" : ""}`, style: `--strength:${strength.toFixed(3)}` }), {}, [unit.text || "·"]);
  });
  const text = h("div", { class: "says passage" }, draw(units.slice(0, MANY_TOKENS)));
  const tell = (event) => {
    const at = [...text.children].indexOf(event.target);
    if (at >= 0) about.textContent = unitText(units[at], reply);
  };
  text.addEventListener("pointerover", tell);
  text.addEventListener("click", tell);
  const rest = units.length - MANY_TOKENS;
  return [text, rest > 0 && h("button", { class: "unfold", onclick: (event) => { event.target.remove(); text.append(...draw(units.slice(MANY_TOKENS))); } }, `Show ${count(rest, "more token")}`), about];
}

function colourNote(mode, reply) {
  if (mode === "advantage") return "Green tokens earned more than those of the group's other replies, orange ones less, the stronger the more; underlined ones earn more parts than the main one.";
  if (mode === "credit") return "The reward that reaches each token: green above zero, orange below.";
  if (mode === "logprob") return "The darker, the less likely the token was when it was sampled.";
  return [...new Set((reply.credit || []).map(earns))].map((name, at) => h("span", { class: `tint part-${at % 6}`, style: "--strength:.8" }, name));
}

function colourControl(reply, mode, choose) {
  const units = unitsOf(reply);
  if (!units.length) return null;
  const known = Object.entries(COLOURS).filter(([id]) => (id === "logprob" ? reply.tokens?.length : id === "none" || (reply.credit || []).length));
  return h("div", { class: "colours" },
    h("div", { class: "switch", role: "group", "aria-label": "Colour tokens by" }, h("span", {}, "Colour tokens by"), known.map(([id, name]) => h("button", { "data-colour": id, "aria-pressed": String(id === mode), onclick: () => choose(id) }, name))),
    mode !== "none" && h("p", { class: "note first" }, colourNote(mode, reply)));
}

function creditTable(credit) {
  if (!Array.isArray(credit) || credit.length < 2) return null;
  return h("details", { class: "quiet credit" }, h("summary", {}, `Credit, span by span (${credit.length})`),
    h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "tokens"), h("th", {}, "earns"), h("th", { class: "num" }, "advantage"))),
      h("tbody", {}, credit.map((span) => h("tr", {},
        h("td", {}, `${span.start} to ${span.stop - 1}`, h("small", {}, count(span.stop - span.start, "token"))),
        h("td", {}, earns(span)),
        h("td", { class: "num" }, isNumber(span.advantage) ? h("b", { class: span.advantage < 0 ? "minus-text" : span.advantage > 0 ? "plus-text" : "" }, signed(span.advantage)) : h("span", { class: "missing-text" }, "missing: left out of the loss"))))))));
}
