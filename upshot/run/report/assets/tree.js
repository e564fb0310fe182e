// What came of a reply: its futures as a tree, fork by fork, and what each classmate made of its thought.

// A long text is folded, and of a very long one only the beginning is laid out, until it is asked for.
const LONG = 12000;
function says(text) {
  text = typeof text === "string" ? text : text === null || text === undefined ? "" : plain(text);
  if (text.length < 1200 && text.split("\n").length < 24) return h("div", { class: "says", dir: "auto" }, text);
  const box = h("div", { class: "says long", dir: "auto" }, text.slice(0, LONG));
  return [box, h("button", { class: "unfold", onclick: (event) => {
    const folded = box.classList.toggle("long");
    box.textContent = folded ? text.slice(0, LONG) : text;
    event.target.textContent = folded ? `Show all ${count(text.length, "character")}` : "Fold";
  } }, `Show all ${count(text.length, "character")}`)];
}

// options: advantage (of the branch that the turn is in), coloured (its tokens, where they are to be).
function bubble(message, { advantage, coloured } = {}) {
  const role = String(message.role || "?");
  const sampled = typeof message.trained === "boolean" && role === "assistant";
  const note = message.note && typeof message.note === "object" ? message.note : {};
  const { thought, ...others } = note;
  const trained = message.trained || isNumber(advantage);
  const own = thought !== undefined && h("details", { class: "thought", open: Boolean(message.trained) && !coloured }, h("summary", {}, role === "user" ? "the user's hidden thought" : message.trained ? "thought, not part of what it said" : "thought"), h("div", { dir: "auto" }, plain(thought)));
  return h("div", { class: `turn ${["user", "assistant", "system", "tool"].includes(role) ? role : "other"} ${trained ? "trained" : ""}` },
    h("div", { class: "who" }, h("span", {}, message.name ? `${role}, ${plain(message.name)}` : role),
      sampled && h("span", { class: trained ? "mark on" : "mark" }, trained ? "trained" : "not trained"),
      isNumber(advantage) && h("span", { class: advantage < 0 ? "minus-text" : "plus-text" }, `advantage ${signed(advantage)}`),
      isNumber(message.tokens) && h("span", {}, count(message.tokens, "token")),
      message.finish === "length" && h("span", { class: "missing-text" }, "cut at the length limit")),
    message.trained && own,
    coloured || says(message.content),
    (message.tool_calls || []).map((call) => h("div", { class: "call" }, `${plain(call.function?.name ?? "tool")} ${plain(call.function?.arguments ?? call)}`)),
    !message.trained && own,
    Object.keys(others).length > 0 && h("details", { class: "thought" }, h("summary", {}, "note"), pairs(others)));
}

// What the policy sampled in a stretch of a future, as a reply of its own: whoever colours a reply colours this, too.
const isSampled = (message) => message.role === "assistant" && isNumber(message.tokens);
function branchReply(future, branch, from, to) {
  const messages = future.messages || [], sampled = (some) => some.filter(isSampled).length;
  const first = sampled(messages.slice(0, from));
  const spans = (branch?.spans || []).map(([start, stop, advantage]) => ({ start, stop, advantage, parts: ["main"] }));
  return { tokens: (future.tokens || []).slice(first, first + sampled(messages.slice(from, to))), credit: spans, reward: { parts: { main: branch?.reward ?? null } }, branch: true };
}

// What each turn of a branch is trained with: the advantage of its own tokens; null where the loss leaves them out.
function turnAdvantages(messages, { tokens, credit }, advantage) {
  let turn = 0;
  const sampled = messages.filter(isSampled).length;
  return messages.map((message) => {
    if (!sampled) return message.role === "assistant" ? advantage ?? null : null; // a log that does not say what was sampled
    if (!isSampled(message)) return null;
    const own = tokens[turn], span = credit[turn++];
    if (own) return credit.find((one) => isNumber(one.advantage) && one.start < own.at + own.pieces.length && one.stop > own.at)?.advantage ?? null;
    return credit.length === sampled ? span.advantage : advantage ?? null; // a log without tokens: a span for each turn
  });
}

// Futures that took the same way at a fork share a node: {label, messages, reply, reward, advantage, future | null, children}.
function treeOf(futures, depth = 0, label = "") {
  const ways = new Map();
  futures.forEach((future, index) => {
    const way = future.path?.length > depth ? future.path[depth] : `own ${index}`;
    if (!ways.has(way)) ways.set(way, []);
    ways.get(way).push(future);
  });
  const nodes = [...ways.values()].map((some, index) => {
    const first = some[0], forks = first.forks || [], again = some.length > 1 && (first.path?.length ?? 0) > depth + 1;
    const from = depth === 0 ? 0 : forks[depth] - first.shared, to = again ? forks[depth + 1] - first.shared : undefined;
    const start = forks[depth] ?? first.shared;
    const branch = (first.branches || []).find((one) => one.start === start);
    const name = label ? `${label}.${index + 1}` : `${index + 1}`;
    const messages = (first.messages || []).slice(from, to), reply = branchReply(first, branch, from, to);
    return { label: name, messages, reply, reward: branch?.reward, advantage: branch?.advantage, advantages: turnAdvantages(messages, reply, branch?.advantage), future: again ? null : first, children: again ? treeOf(some, depth + 1, name) : [] };
  });
  const rewards = nodes.map((node) => node.reward).filter(isNumber);
  for (const node of nodes) node.reply.groupMean = rewards.length > 1 ? mean(rewards) : null;
  return nodes;
}

const scoreText = (scores) => Object.entries(scores || {}).map(([name, score]) => h("span", { class: scoreValue(score) === null ? "missing-text" : "" }, `${name} ${scoreValue(score) === null ? "missing" : format(scoreValue(score))}`));

// What a future's key adds to its reply's: a classmate's name, say; a bare number is told by the heading.
function ownKey(future, reply) {
  const key = plain(future.key ?? "");
  const own = reply.key && key.startsWith(reply.key) ? key.slice(reply.key.length) : key;
  return /^\/?(f|future\/?)?[\d./]+$/.test(own) ? "" : own.replace(/^\//, "");
}

// The turns of a branch; what the policy said in it is coloured as the reply is, where its tokens were kept.
function branchTurns(node, run) {
  const known = browse.colour === "logprob" || (browse.colour !== "none" && node.reply.credit.length > 0);
  const units = known ? unitsOf(node.reply) : [];
  let turn = 0;
  return node.messages.map((message, at) => {
    const own = isSampled(message) ? units[turn++] : null;
    return bubble(message, { advantage: node.advantages[at], coloured: own && colouredTurn(own, browse.colour, node.reply, run) });
  });
}

function branchNode(node, reply, run, open, alone) {
  const future = node.future || {};
  const turns = node.messages;
  const worth = isNumber(node.reward) ? node.reward : null;
  return h("details", { class: `future ${future.missing ? "gone" : ""}`, open },
    h("summary", {}, h("b", {}, alone ? "The reply itself" : node.children.length ? `Branch ${node.label}` : `Future ${node.label}`),
      !alone && h("span", {}, count(turns.length, "turn")),
      future.turn > 0 && h("span", {}, `after turn ${future.turn}`),
      node.future && ownKey(future, reply) && h("span", { class: "key-text" }, ownKey(future, reply)),
      future.ended && h("span", {}, `ended: ${plain(future.ended)}`),
      future.missing && h("span", { class: "missing-text" }, `missing: ${plain(future.missing)}`),
      worth !== null && h("span", { class: "worth" }, `reward ${format(worth)}`),
      isNumber(node.advantage) && h("span", { class: node.advantage < 0 ? "minus-text" : "plus-text" }, `advantage ${signed(node.advantage)}`),
      isNumber(node.advantage) && isNumber(node.reply.groupMean) && h("span", { class: "groupmean" }, `siblings' mean ${format(node.reply.groupMean)}`),
      h("span", { class: "scores" }, scoreText(future.scores))),
    h("div", { class: "turns" }, turns.length ? branchTurns(node, run) : !alone && h("p", { class: "note" }, "No turns after the reply.")),
    node.future && bars(future.scores, { scale: (name) => scaleOf(run, `score/${name}`), tone: toneOf(reply.reward) }),
    node.children.length > 0 && h("div", { class: "tree" }, node.children.map((child, index) => branchNode(child, reply, run, index === 0, false))));
}

function futuresTree(reply, run) {
  const futures = (reply.futures || []).filter((future) => !future.cut);
  if (!futures.length) return null;
  const nodes = treeOf(futures);
  const alone = futures.length === 1 && !(futures[0].messages || []).length && !futures[0].by; // nobody went on: the reply itself was scored
  return [h("h4", {}, futures.length > 1 ? `What came of it: ${futures.length} futures` : "What came of it"),
    h("div", { class: "tree" }, nodes.map((node, index) => branchNode(node, reply, run, index === 0, alone)))];
}

// The turns of a future from the reply on, each with what it is trained with.
function wholeFuture(future) {
  const starts = (future.forks || []).map((fork) => fork - future.shared), messages = future.messages || [];
  const bounds = [0, ...starts.slice(1), messages.length];
  return bounds.slice(1).flatMap((to, at) => {
    const branch = (future.branches || []).find((one) => one.start === (future.forks?.[at] ?? future.shared));
    const own = messages.slice(bounds[at], to);
    const advantages = turnAdvantages(own, branchReply(future, branch, bounds[at], to), branch?.advantage);
    return own.map((message, place) => bubble(message, { advantage: advantages[place] }));
  });
}

// The fork as a picture: the reply, and beside each other what came of it.
function forkCard(reply, name) {
  const futures = (reply.futures || []).filter((future) => !future.cut).slice(0, 3);
  const said = (reply.messages || []).filter((message) => message.role !== "system").slice(-2);
  return h("figure", { class: "fork" },
    h("div", { class: "turns" }, said.map((message) => bubble(message))),
    h("div", { class: "ways" }, futures.map((future, index) => h("div", { class: "way" },
      h("div", { class: "turns" }, wholeFuture(future)),
      h("p", { class: "scores" }, h("b", {}, `future ${index + 1}`), scoreText(future.scores))))),
    h("figcaption", {}, h("a", { href: address(name, reply.step ?? 0, reply.key) }, `reward ${format(scoreValue(reply.reward?.total))}: the mean of its futures`), " (a reply of the last step)"));
}

// Classmates: futures that went on from a thought, by classmate and cut.
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
const meanVerdict = (futures) => mean(futures.map(verdictOf).filter(isNumber));

function verdictMark(future) {
  const value = verdictOf(future);
  if (value === null) return h("span", { class: "verdict missing-text" }, `missing: ${plain(future.missing || whyMissing(future.scores?.classmate))}`);
  return h("span", { class: `verdict ${value >= 0.5 ? "plus-text" : "minus-text"}` }, value === 1 ? "right" : value === 0 ? "wrong" : format(value));
}

function firstWords(future) {
  const words = (future.messages || []).map((message) => plain(message.content ?? "")).join(" ").trim().slice(0, 400).replace(/\s+/g, " ");
  return words.length > 110 ? `${words.slice(0, 110)}…` : words;
}

function answerBranch(future, index, run) {
  const turns = future.messages || [];
  return h("details", { class: "answer" },
    h("summary", {}, h("span", { class: "number" }, index + 1), verdictMark(future), h("span", { class: "excerpt" }, firstWords(future) || (turns.length ? "(nothing)" : verdictOf(future) === null ? "" : "no answer sampled: the likelihood of the right one"))),
    turns.length > 0 && h("div", { class: "turns" }, turns.map((turn) => bubble(turn))),
    bars(future.scores, { scale: (name) => scaleOf(run, `score/${name}`) }));
}

function sawText(future) {
  const [from, to] = future.span || [];
  return isNumber(from) && isNumber(to) ? `saw tokens ${from} to ${to - 1} (${to - from}) of the thought` : "";
}

function classmatesCard(reply, run) {
  const found = byClassmate(reply);
  if (!found.size) return null;
  return h("div", { class: "classmates" }, h("h4", {}, `Classmates: what ${found.size > 1 ? `${found.size} other models` : "another model"} made of the thought`),
    [...found].map(([name, cuts]) => {
      const all = [...cuts.values()].flat();
      const average = meanVerdict(all), lost = all.filter((future) => verdictOf(future) === null).length;
      return h("section", { class: "classmate" },
        h("h5", {}, h("b", {}, name), h("span", { class: average === null ? "missing-text" : "" }, average === null ? "missing" : `mean ${format(average)}`), h("small", {}, count(all.length, "answer")), lost > 0 && average !== null && h("small", { class: "missing-text" }, `${lost} missing`), cuts.size === 1 && h("small", {}, sawText(all[0]))),
        [...cuts].map(([cut, futures]) => h("div", {},
          cuts.size > 1 && h("p", { class: "note" }, `cut ${cut}: ${sawText(futures[0])}; mean ${format(meanVerdict(futures))}`),
          futures.map((future, index) => answerBranch(future, index, run)))));
    }));
}
