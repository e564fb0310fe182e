// Which replies are listed: filters, sorting, prompt groups; and the list itself, of which only what is seen is drawn.

const ROW = 96; // pixels of a prompt group in the list
const browse = { run: "", step: "latest", sort: "logged", missing: "", find: "", slices: byName(), colour: "advantage", at: null, found: null, beside: null };

// `reward<0.5 accuracy>=0.9 asks "a word"`: comparisons of the reward or a metric's mean, and words that were said.
function parseFind(text) {
  const tests = [];
  const words = text.replace(/(^|\s)([\w/@.-]+)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)(?=\s|$)/g, (_, before, name, sign, number) => { tests.push({ name, sign, value: Number(number) }); return before; }).trim().replace(/\s+/g, " ");
  return { tests, words };
}

const COMPARE = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => Math.abs(a - b) < 1e-9 };
function passes(index, at, { name, sign, value }) {
  const own = name === "reward" ? index.reward(at) : index.means[name]?.[at];
  return isNumber(own) && COMPARE[sign](own, value);
}

function latestStep(index) {
  let last = -Infinity;
  for (const step of index.columns.step || []) last = Math.max(last, step);
  return last;
}

function wantedReplies(index) {
  const step = browse.step === "latest" ? latestStep(index) : browse.step === "all" ? null : Number(browse.step);
  const { tests, words } = parseFind(browse.find);
  const said = words ? browse.found : null;
  const reason = index.strings.indexOf(browse.missing.slice(1));
  const out = [];
  for (let at = 0; at < index.count; at++) {
    if (step !== null && index.step(at) !== step) continue;
    if (browse.missing && index.columns.missing[at] === null) continue;
    if (browse.missing.length > 1 && !index.columns.missing[at].includes(reason)) continue;
    if (said && !said.has(at)) continue;
    if (!tests.every((test) => passes(index, at, test))) continue;
    if (!Object.entries(browse.slices).every(([field, value]) => value === "" || index.slice(field, at) === value)) continue;
    out.push(at);
  }
  return out;
}

function promptGroups(index) {
  const groups = new Map();
  for (const at of wantedReplies(index)) {
    const id = `${index.step(at)}|${index.columns.group[at]}|${index.columns.row[at]}`;
    if (!groups.has(id)) groups.set(id, { step: index.step(at), row: index.row(at), prompt: index.prompt(at), replies: [] });
    groups.get(id).replies.push(at);
  }
  return sortGroups([...groups.values()], index);
}

function sortGroups(groups, index) {
  for (const group of groups) {
    const values = group.replies.map((at) => index.reward(at)).filter(isNumber);
    group.mean = mean(values);
    group.spread = values.length ? Math.max(...values) - Math.min(...values) : null;
  }
  const by = { high: (group) => -(group.mean ?? -Infinity), low: (group) => group.mean ?? Infinity, spread: (group) => -(group.spread ?? -Infinity) }[browse.sort];
  if (!by) return groups;
  for (const group of groups) if (browse.sort !== "spread") group.replies.sort((a, b) => (browse.sort === "high" ? -1 : 1) * ((index.reward(a) ?? -Infinity) - (index.reward(b) ?? -Infinity)));
  return groups.sort((a, b) => by(a) - by(b) || 0);
}

const address = (name, step, key, query = "") => `#${["conversations", name, step, key].map((part) => encodeURIComponent(String(part).toWellFormed())).join("/")}${query}`;

function chip(run, index, at, open) {
  const value = index.reward(at), missing = index.isMissing(at);
  const [low, high] = run.scales?.total || [0, 1];
  const good = value === null ? 0 : (value - low) / (high - low || 1);
  const text = value === null ? (missing ? "missing" : "read") : Math.abs(value) < 100 ? fixed(value, high - low < 0.5 ? 3 : 2) : format(value);
  return h("a", {
    class: `chip ${missing ? "none" : ""} ${open ? "open" : ""}`, style: value === null ? null : `--share:${good.toFixed(3)}`, "data-reply": at,
    href: address(run.name, index.step(at), index.key(at)), "aria-label": `reply, reward ${missing ? "missing" : format(value)}`, title: index.key(at), "aria-current": open ? "true" : null,
  }, text, index.columns.missing[at] !== null && value !== null && h("sup", { title: "something in it is missing" }, "!"));
}

// A list of thousands of prompt groups, each as high as the others, of which those in sight are in the page.
class PromptList {
  constructor(open) {
    this.groups = [];
    this.open = open;
    this.rows = h("div", { class: "rows" });
    this.box = h("div", { class: "list", tabindex: 0, role: "region", "aria-label": "Prompts and their replies", onscroll: () => this.draw() }, this.rows);
    this.note = h("p", { class: "note first" });
  }

  show(run, index, groups) {
    Object.assign(this, { run, index, groups });
    const replies = groups.reduce((sum, group) => sum + group.replies.length, 0);
    this.note.textContent = groups.length ? `${count(groups.length, "prompt group")}, ${count(replies, "reply", "replies")}` : "Nothing fits these filters.";
    this.rows.style.height = `${groups.length * ROW}px`;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 2);
    const last = Math.min(this.groups.length, Math.ceil((this.box.scrollTop + (this.box.clientHeight || 900)) / ROW) + 2);
    this.rows.replaceChildren(...this.groups.slice(first, last).map((group, offset) => this.row(group, first + offset)));
  }

  row(group, place) {
    const mine = group.replies.includes(browse.at);
    const kept = group.replies.slice(0, 6);
    if (mine && !kept.includes(browse.at)) kept[5] = browse.at;
    return h("section", { class: `promptgroup ${mine ? "open" : ""}`, style: `top:${place * ROW}px`, onclick: (event) => event.target.closest("a") || this.open(group.replies[0]) },
      h("div", { class: "grouphead" }, h("span", {}, browse.step === "all" ? `step ${format(group.step)} · ` : "", group.row), isNumber(group.mean) && h("span", {}, `mean ${format(group.mean)}`)),
      h("p", {}, group.prompt || "(no user message)"),
      h("div", { class: "chips" }, kept.map((at) => chip(this.run, this.index, at, at === browse.at)), group.replies.length > kept.length && h("small", {}, `+${group.replies.length - kept.length}`)));
  }

  // The reply so many groups or replies away from the open one.
  neighbour(groups, replies) {
    const place = this.groups.findIndex((group) => group.replies.includes(browse.at));
    if (place < 0) return this.groups[0]?.replies[0];
    if (groups) return this.groups[place + groups]?.replies[0];
    const own = this.groups[place].replies;
    return own[own.indexOf(browse.at) + replies];
  }

  reveal() {
    const place = this.groups.findIndex((group) => group.replies.includes(browse.at));
    if (place >= 0 && (place * ROW < this.box.scrollTop || (place + 1) * ROW > this.box.scrollTop + this.box.clientHeight)) this.box.scrollTop = Math.max(0, place * ROW - ROW);
    this.draw();
  }
}
