// Choose a step, a prompt group, a reply; read it with its tree of futures.

const PAGE = 60; // prompt groups listed at once
const browse = { run: 0, step: "all", sort: "logged", missing: false, find: "", slices: {}, shown: PAGE, reply: null };
const textOf = (message) => data.texts[message.text] ?? "";

data.runs.forEach((run) => run.replies.forEach((reply, index) => { reply.at = index; }));

const rewardOf = (reply) => scoreValue(reply.reward?.total);
function hasMissing(reply) {
  const scores = (object) => Object.values(object || {}).some((score) => scoreValue(score) === null);
  return Boolean(reply.reward?.total && rewardOf(reply) === null) || scores(reply.reward?.terms) || scores(reply.reward?.parts) || (reply.futures || []).some((future) => future.missing || scores(future.scores));
}
function words(reply) {
  if (reply.words === undefined) {
    const all = [...(reply.messages || []), ...(reply.futures || []).flatMap((future) => future.messages || [])];
    reply.words = [reply.row, reply.key, ...all.map((message) => `${textOf(message)} ${JSON.stringify(message.note || "")}`)].join("\n").toLowerCase();
  }
  return reply.words;
}

function promptGroups() {
  const wanted = data.runs[browse.run].replies.filter((reply) =>
    (browse.step === "all" || String(reply.step ?? 0) === browse.step) &&
    (!browse.missing || hasMissing(reply)) &&
    Object.entries(browse.slices).every(([field, value]) => value === "" || String(reply.groups?.[field]) === value) &&
    (!browse.find || words(reply).includes(browse.find)));
  const groups = new Map();
  for (const reply of wanted) {
    const id = `${reply.step}|${reply.phase ?? ""}|${reply.group ?? ""}|${reply.row ?? ""}`;
    if (!groups.has(id)) groups.set(id, { step: reply.step ?? 0, group: reply.group, row: reply.row, replies: [] });
    groups.get(id).replies.push(reply);
  }
  return sortGroups([...groups.values()]);
}

function sortGroups(groups) {
  for (const group of groups) {
    const values = group.replies.map(rewardOf).filter(isNumber);
    group.mean = values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    group.spread = values.length ? Math.max(...values) - Math.min(...values) : null;
  }
  const by = { high: (group) => -(group.mean ?? -Infinity), low: (group) => group.mean ?? Infinity, spread: (group) => -(group.spread ?? -Infinity) }[browse.sort];
  if (!by) return groups;
  for (const group of groups) if (browse.sort !== "spread") group.replies.sort((a, b) => (browse.sort === "high" ? -1 : 1) * ((rewardOf(a) ?? -Infinity) - (rewardOf(b) ?? -Infinity)));
  return groups.sort((a, b) => by(a) - by(b) || 0);
}

function range(run) {
  if (!run.range) {
    const values = run.replies.map(rewardOf).filter(isNumber);
    run.range = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  }
  return run.range;
}

function chip(reply, open) {
  const value = rewardOf(reply);
  const [low, high] = range(data.runs[browse.run]);
  const good = value === null ? 0 : (value - low) / (high - low || 1);
  const unscored = !reply.reward;
  return h("button", {
    class: `chip ${value === null && !unscored ? "none" : ""} ${open ? "open" : ""}`, style: value === null ? null : `--share:${good.toFixed(3)}`, "data-reply": reply.at,
    "aria-label": `reply, reward ${value === null ? "missing" : format(value)}`, title: reply.key || null, onclick: () => show(reply, true),
  }, unscored ? "read" : value === null ? "missing" : Math.abs(value) < 100 ? fixed(value, high - low < 0.5 ? 3 : 2) : format(value), hasMissing(reply) && value !== null && h("sup", { title: "something in it is missing" }, "!"));
}

function promptLine(reply) {
  const asked = [...(reply.messages || [])].filter((message) => message.role === "user");
  const text = asked.length ? textOf(asked[0]) : "";
  return text.length > 160 ? `${text.slice(0, 160)}…` : text || "(no user message)";
}

const list = h("div", { class: "list" }), reading = h("article", { class: "reading" }), controls = h("div", { class: "controls" });

function drawList() {
  const groups = promptGroups();
  const replies = groups.reduce((sum, group) => sum + group.replies.length, 0);
  list.replaceChildren(
    h("p", { class: "note" }, `${count(groups.length, "prompt group")}, ${count(replies, "reply", "replies")}`),
    ...groups.slice(0, browse.shown).map((group) => h("section", { class: "promptgroup" },
      h("div", { class: "grouphead" }, h("span", {}, browse.step === "all" ? `step ${format(group.step)} · ` : "", group.row ?? `group ${group.group}`),
        isNumber(group.mean) && h("span", {}, `mean ${format(group.mean)}`)),
      h("p", {}, promptLine(group.replies[0])),
      h("div", { class: "chips" }, group.replies.map((reply) => chip(reply, reply === browse.reply))))),
    groups.length > browse.shown ? h("button", { class: "more", onclick: () => { browse.shown += PAGE; drawList(); } }, `Show ${Math.min(PAGE, groups.length - browse.shown)} more`) : "",
    groups.length === 0 ? h("p", { class: "empty" }, "Nothing fits these filters.") : "");
  return groups;
}

function refresh() {
  browse.shown = PAGE;
  const groups = drawList();
  const kept = groups.some((group) => group.replies.includes(browse.reply));
  if (!kept && groups.length) show(groups[0].replies[0], false);
  if (!groups.length) reading.replaceChildren();
}

function choice(name, options, value, change) {
  return h("label", {}, h("span", {}, name), h("select", { onchange: (event) => { change(event.target.value); refresh(); } }, options.map(([id, text]) => h("option", { value: id, selected: String(id) === String(value) }, text))));
}

function stepControl(run) {
  const steps = [...new Set(run.replies.map((reply) => reply.step ?? 0))].sort((a, b) => a - b);
  const options = [["all", "all"], ...steps.map((step) => [String(step), format(step)])];
  const move = (by) => {
    const at = options.findIndex(([id]) => id === browse.step) + by;
    if (at >= 0 && at < options.length) { browse.step = options[at][0]; drawControls(); refresh(); }
  };
  return h("div", { class: "stepper" }, choice("Step", options, browse.step, (value) => { browse.step = value; }),
    h("button", { class: "icon", "aria-label": "Previous step", onclick: () => move(-1) }, "‹"), h("button", { class: "icon", "aria-label": "Next step", onclick: () => move(1) }, "›"));
}

function drawControls() {
  const run = data.runs[browse.run];
  const usable = data.runs.map((other, index) => [index, other.name]).filter(([index]) => data.runs[index].replies.length);
  const fields = {};
  for (const reply of run.replies) for (const [field, value] of Object.entries(reply.groups || {})) (fields[field] ||= new Set()).add(String(value));
  const check = h("input", { type: "checkbox", onchange: (event) => { browse.missing = event.target.checked; refresh(); } });
  check.checked = browse.missing;
  let wait = 0;
  controls.replaceChildren(
    usable.length > 1 ? choice("Run", usable, browse.run, (value) => { browse.run = Number(value); browse.step = lastStep(); browse.slices = {}; browse.reply = null; drawControls(); }) : "",
    stepControl(run),
    choice("Sort", [["logged", "as logged"], ["high", "reward, high first"], ["low", "reward, low first"], ["spread", "widest spread"]], browse.sort, (value) => { browse.sort = value; }),
    ...Object.entries(fields).map(([field, values]) => choice(field, [["", "any"], ...[...values].sort().map((value) => [value, value])], browse.slices[field] ?? "", (value) => { browse.slices[field] = value; })),
    h("label", { class: "find" }, h("span", {}, "Search"), h("input", { type: "search", placeholder: "any words", value: browse.find, oninput: (event) => {
      clearTimeout(wait);
      wait = setTimeout(() => { browse.find = event.target.value.toLowerCase(); refresh(); }, 150);
    } })),
    h("label", { class: "check" }, check, "only with missing"));
}

const lastStep = () => String(Math.max(...data.runs[browse.run].replies.map((reply) => reply.step ?? 0)));

// A long text is folded until it is asked for, so that the tree below it stays in reach.
function says(text) {
  if (text.length < 1200 && text.split("\n").length < 24) return h("div", { class: "says" }, text);
  const box = h("div", { class: "says long" }, text);
  return [box, h("button", { class: "unfold", onclick: (event) => { event.target.textContent = box.classList.toggle("long") ? `Show all ${count(text.length, "character")}` : "Fold"; } }, `Show all ${count(text.length, "character")}`)];
}

// What a future's key adds to its reply's: a classmate's name, say; a bare number is told by the heading.
function ownKey(future, reply) {
  const key = plain(future.key ?? "");
  const own = reply.key && key.startsWith(reply.key) ? key.slice(reply.key.length) : key;
  return /^\/?(f|future\/?)?\d+$/.test(own) ? "" : own.replace(/^\//, "");
}

function bubble(message) {
  const role = String(message.role || "?");
  const sampled = typeof message.trained === "boolean" && role === "assistant";
  const note = message.note && typeof message.note === "object" ? message.note : {};
  const { thought, ...others } = note;
  const own = thought !== undefined && h("details", { class: "thought", open: Boolean(message.trained) }, h("summary", {}, role === "user" ? "the user's hidden thought" : message.trained ? "thought, not part of what it said" : "thought"), h("div", {}, plain(thought)));
  return h("div", { class: `turn ${["user", "assistant", "system", "tool"].includes(role) ? role : "other"} ${message.trained ? "trained" : ""}` },
    h("div", { class: "who" }, h("span", {}, message.name ? `${role}, ${plain(message.name)}` : role),
      sampled && h("span", { class: message.trained ? "mark on" : "mark" }, message.trained ? "trained" : "not trained"),
      isNumber(message.tokens) && h("span", {}, count(message.tokens, "token")),
      message.finish === "length" && h("span", { class: "missing-text" }, "cut at the length limit")),
    message.trained && own,
    says(textOf(message)),
    (message.tool_calls || []).map((call) => h("div", { class: "call" }, `${plain(call.function?.name ?? "tool")} ${plain(call.function?.arguments ?? call)}`)),
    !message.trained && own,
    Object.keys(others).length > 0 && h("details", { class: "thought" }, h("summary", {}, "note"), pairs(others)));
}

function futureBranch(future, index, reply) {
  const total = (reply.futures || []).filter((other) => !other.cut).length;
  const alone = total === 1 && !(future.messages || []).length && !future.by; // nobody went on: the reply itself was scored
  const turns = future.messages || [];
  const scored = Object.entries(future.scores || {});
  return h("details", { class: `future ${future.missing ? "gone" : ""}`, open: index === 0 },
    h("summary", {}, h("b", {}, alone ? "The reply itself" : total > 1 ? `Future ${index + 1}` : "Future"), !alone && h("span", {}, count(turns.length, "turn")), ownKey(future, reply) && h("span", { class: "key-text" }, ownKey(future, reply)),
      future.ended && h("span", {}, `ended: ${plain(future.ended)}`),
      future.missing && h("span", { class: "missing-text" }, `missing: ${plain(future.missing)}`),
      branchesText(future) && h("span", {}, branchesText(future)),
      h("span", { class: "scores" }, scored.map(([name, score]) => h("span", { class: scoreValue(score) === null ? "missing-text" : "" }, `${name} ${scoreValue(score) === null ? "missing" : format(scoreValue(score))}`)))),
    h("div", { class: "turns" }, turns.length ? turns.map(bubble) : !alone && h("p", { class: "note" }, "No turns after the reply.")),
    bars(future.scores, { scales: scalesOf(data.runs[browse.run]) }));
}

// Credited along the tree: the advantage of the policy's turns in this future, fork by fork, beside its siblings'.
function branchesText(future) {
  const own = (future.branches || []).map((branch) => (isNumber(branch.advantage) ? signed(branch.advantage) : "–"));
  return own.length ? `${own.length > 1 ? "advantages" : "advantage"} ${own.join(", ")}` : "";
}

function conversation(messages) {
  const first = messages.findIndex((message) => message.trained);
  const from = first < 0 ? messages.length : first;
  const early = messages.slice(0, Math.max(0, from - 3)), rest = messages.slice(early.length);
  const system = rest.filter((message, index) => message.role === "system" && index < from);
  const spoken = rest.filter((message) => !system.includes(message));
  const folded = [...early, ...system];
  return h("div", { class: "turns" },
    folded.length > 0 && h("details", { class: "quiet" }, h("summary", {}, early.length ? `${count(folded.length, "earlier message")}` : "system prompt"), h("div", { class: "turns" }, folded.map(bubble))),
    spoken.map(bubble));
}

// What the policy did not see: the row's hidden goal, and the reference that it is compared with.
function wanted(reply) {
  const known = [["the hidden goal", reply.goal], ["the reference", reply.reference]].filter(([, text]) => isNumber(text));
  const same = known.length === 2 && known[0][1] === known[1][1];
  return known.length > 0 && h("div", { class: "wanted" }, (same ? [["the hidden goal and reference", reply.goal]] : known).map(([name, text]) => h("div", {}, h("small", {}, name), says(data.texts[text] ?? ""))));
}

function show(reply, jump) {
  browse.reply = reply;
  document.querySelectorAll(".list .chip").forEach((button) => button.classList.toggle("open", button.dataset.reply === String(reply.at)));
  const same = data.runs[browse.run].replies.filter((other) => other.step === reply.step && other.group === reply.group && other.row === reply.row && other.phase === reply.phase);
  const futures = (reply.futures || []).filter((future) => !future.cut);
  const slices = Object.entries(reply.groups || {});
  reading.replaceChildren(
    h("div", { class: "readhead" },
      h("h3", {}, `Step ${format(reply.step ?? 0)} · ${reply.row ?? `group ${reply.group}`}`, same.length > 1 ? ` · reply ${same.indexOf(reply) + 1} of ${same.length}` : ""),
      slices.length > 0 ? h("div", { class: "tags" }, slices.map(([field, value]) => h("span", {}, `${field}: ${plain(value)}`))) : "",
      same.length > 1 ? h("div", { class: "chips" }, same.map((other) => chip(other, other === reply))) : ""),
    reply.reward ? rewardCard(reply.reward) : "",
    wanted(reply) || "",
    h("h4", {}, "Conversation"),
    conversation(reply.messages || []),
    reply.ended ? h("p", { class: "note" }, `ended: ${plain(reply.ended)}`) : "",
    futures.length ? h("h4", {}, futures.length > 1 ? `What came of it: ${futures.length} futures` : "What came of it") : "",
    futures.length ? h("div", { class: "tree" }, futures.map((future, index) => futureBranch(future, index, reply))) : "",
    classmatesCard(reply) || "",
    creditCard(reply.credit) || "");
  history.replaceState(null, "", address(data.runs[browse.run], reply));
  if (jump && matchMedia("(max-width: 899px)").matches) reading.scrollIntoView({ behavior: "smooth", block: "start" });
}

// Run, step and key name a reply on every page that holds it; its place on this page does not.
const address = (run, reply) => ["#conversations", run.name, reply.step ?? 0, reply.key ?? reply.at].map((part, at) => (at ? encodeURIComponent(part) : part)).join("/");

function conversationsView(name, step, key) {
  const usable = data.runs.findIndex((other) => other.replies.length);
  if (usable < 0) return h("p", { class: "empty" }, "There is no rollouts.jsonl in this folder, or no reply in it yet.");
  // The last run with conversations is what the recipe led to: start there.
  const latest = data.runs.length - 1 - [...data.runs].reverse().findIndex((other) => other.replies.length);
  const run = data.runs.findIndex((other) => other.name === name);
  browse.run = data.runs[run]?.replies.length ? run : latest;
  const ofStep = run < 0 ? [] : data.runs[run].replies.filter((reply) => String(reply.step ?? 0) === step);
  const asked = ofStep.find((reply) => String(reply.key ?? reply.at) === key) || ofStep[0];
  const lost = name !== undefined && (!asked || (key !== undefined && String(asked.key ?? asked.at) !== key));
  browse.step = asked ? String(asked.step ?? 0) : lastStep();
  browse.reply = asked || null;
  drawControls();
  const groups = drawList();
  show(asked || groups[0].replies[0], false);
  const kept = data.runs[browse.run].notes.filter((note) => note.includes("rollouts.jsonl"));
  return h("div", {}, lost && h("p", { class: "note missing-text" }, `The reply that this address names (${[name, step, key].filter((part) => part !== undefined).join(", ")}) is not on this page.`), kept.map((note) => h("p", { class: "note" }, note)), h("div", { class: "browser" }, h("div", { class: "side" }, controls, list), reading));
}
