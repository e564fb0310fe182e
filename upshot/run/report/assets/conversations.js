// Choose a step, a prompt group, a reply; read it beside its goal, with credit on its text and the tree of its futures.

const reading = h("article", { class: "reading" }), controls = h("div", { class: "controls" }), lostNote = h("p", { class: "note missing-text", role: "status" });
const promptList = new PromptList((at) => openReply(at));

const usableRuns = () => data.runs.filter((run) => indexOf(run.name).count > 0);
const currentRun = () => runOf(browse.run);

function drawList() {
  const run = currentRun();
  if (run) promptList.show(run, indexOf(run.name), promptGroups(indexOf(run.name)));
}

// After a filter has changed: the list, and the first reply of it where the open one fell out.
async function refresh() {
  const { words } = parseFind(browse.find);
  browse.found = words ? new Set(await source.find(browse.run, words)) : null;
  promptList.box.scrollTop = 0;
  drawList();
  const groups = promptList.groups;
  if (groups.length && !groups.some((group) => group.replies.includes(browse.at))) openReply(groups[0].replies[0]);
  else if (browse.at !== null) remember();
}

function choice(name, options, value, change) {
  return h("label", {}, h("span", {}, name), h("select", { onchange: (event) => { change(event.target.value); refresh(); } }, options.map(([id, text]) => h("option", { value: id, selected: String(id) === String(value) }, text))));
}

function moveStep(by) {
  const options = stepOptions().map(([id]) => id);
  const at = options.indexOf(browse.step) + by;
  if (at >= 0 && at < options.length) { browse.step = options[at]; drawControls(); refresh(); }
}
const stepOptions = () => [["all", "all"], ...indexOf(browse.run).steps().map((step) => [String(step), format(step)]), ["latest", "latest"]];

function drawControls() {
  const index = indexOf(browse.run), runs = usableRuns();
  const reasons = new Set((index.columns.missing || []).flatMap((own) => own || []));
  const fields = Object.entries(index.slices).map(([field, column]) => [field, [...new Set(column)].filter(isNumber).map((number) => index.strings[number]).sort()]);
  let wait = 0;
  controls.replaceChildren(
    runs.length > 1 ? choice("Run", runs.map((run) => [run.name, run.name]), browse.run, (value) => { Object.assign(browse, { run: value, step: "latest", slices: byName(), at: null }); drawControls(); }) : "",
    h("div", { class: "stepper" }, choice("Step", stepOptions(), browse.step, (value) => { browse.step = value; }),
      h("button", { class: "icon", "aria-label": "Previous step", onclick: () => moveStep(-1) }, "‹"), h("button", { class: "icon", "aria-label": "Next step", onclick: () => moveStep(1) }, "›")),
    choice("Sort", [["logged", "as logged"], ["high", "reward, high first"], ["low", "reward, low first"], ["spread", "widest spread"]], browse.sort, (value) => { browse.sort = value; }),
    ...fields.map(([field, values]) => choice(field, [["", "any"], ...values.map((value) => [value, value])], browse.slices[field] ?? "", (value) => { browse.slices[field] = value; })),
    choice("Missing", [["", "any reply"], ["!", "anything missing"], ...[...reasons].map((number) => [`!${index.strings[number]}`, index.strings[number]])], browse.missing, (value) => { browse.missing = value; }),
    h("label", { class: "find" }, h("span", {}, "Search"), h("input", { type: "search", class: "search", placeholder: `words, reward<0.5${Object.keys(index.means)[0] ? `, ${Object.keys(index.means)[0]}>0` : ""}`, value: browse.find, oninput: (event) => {
      clearTimeout(wait);
      wait = setTimeout(() => { browse.find = event.target.value; if (browse.find && browse.step === "latest") browse.step = "all"; refresh(); }, 200);
    } })));
}

function conversation(reply, run) {
  const messages = reply.messages || [];
  const units = browse.colour === "none" ? [] : unitsOf(reply);
  let turn = 0;
  const drawn = messages.map((message) => {
    const own = message.trained ? units[turn++] : null;
    return bubble(message, { coloured: own && colouredTurn(own, browse.colour, reply, run) });
  });
  const first = messages.findIndex((message) => message.trained);
  const from = first < 0 ? messages.length : first;
  const early = Math.max(0, from - 3);
  const isFolded = (at) => at < early || (at < from && messages[at].role === "system");
  const folded = drawn.filter((_, at) => isFolded(at));
  return h("div", { class: "turns" },
    folded.length > 0 && h("details", { class: "quiet" }, h("summary", {}, early ? count(folded.length, "earlier message") : "system prompt"), h("div", { class: "turns" }, folded)),
    drawn.filter((_, at) => !isFolded(at)));
}

// What the policy did not see: the row's hidden goal, and the reference that it is compared with.
function wanted(reply) {
  const given = (value) => value !== null && value !== undefined && value !== "" && JSON.stringify(value) !== "{}" && JSON.stringify(value) !== "[]";
  const known = [["the hidden goal", reply.goal], ["the reference", reply.reference]].filter(([, value]) => given(value));
  const same = known.length === 2 && plain(known[0][1]) === plain(known[1][1]);
  return known.length > 0 && h("aside", { class: "wanted", "aria-label": "What the policy did not see" }, (same ? [["the hidden goal and reference", reply.goal]] : known).map(([name, value]) => h("div", {}, h("small", {}, name), says(plain(value)))));
}

let shownReply = null;
async function openReply(at, jump = true) {
  if (at === undefined || at === null) return;
  browse.at = at;
  promptList.reveal();
  remember();
  const run = currentRun();
  const reply = await source.reply(run.name, at);
  if (browse.at !== at) return; // somebody went on meanwhile
  shownReply = reply;
  promptList.reveal(); // once more: a list that was just made had no height yet
  drawReply();
  if (jump && matchMedia("(max-width: 899px)").matches) reading.scrollIntoView({ behavior: "smooth", block: "start" });
}

// The same reply in other colours; what the reader has opened below it stays open.
function recolour(mode) {
  browse.colour = mode;
  const futures = () => [...reading.querySelectorAll(".future")], open = futures().map((future) => future.open);
  drawReply();
  futures().forEach((future, at) => { future.open = open[at]; });
  remember();
}

function drawReply() {
  const reply = shownReply, run = currentRun(), index = indexOf(run.name), at = browse.at;
  const same = [];
  for (let other = 0; other < index.count; other++) if (index.step(other) === index.step(at) && index.columns.row[other] === index.columns.row[at] && index.columns.group[other] === index.columns.group[at]) same.push(other);
  const slices = Object.entries(reply.groups || {});
  const rewards = same.map((other) => index.reward(other)).filter(isNumber);
  reply.groupMean = rewards.length > 1 ? mean(rewards) : null;
  reading.replaceChildren(
    h("div", { class: "readhead" },
      h("h3", {}, `Step ${format(index.step(at))} · ${index.row(at)}`, same.length > 1 ? ` · reply ${same.indexOf(at) + 1} of ${same.length}` : ""),
      h("div", { class: "tags" }, slices.map(([field, value]) => h("span", {}, `${field}: ${plain(value)}`)), h("a", { href: `#goal/${encodeURIComponent(index.row(at))}` }, "the same goal across steps and runs"), keepButton(index, at)),
      same.length > 1 ? h("div", { class: "chips" }, same.map((other) => chip(run, index, other, other === at))) : ""),
    reply.reward ? rewardCard(reply.reward, run, rewards) : "",
    colourControl(reply, browse.colour, recolour) || "",
    besideCard(reply, at) || "",
    h("div", { class: wanted(reply) ? "beside" : "" }, h("div", {}, h("h4", {}, "Conversation"), conversation(reply, run), reply.ended ? h("p", { class: "note" }, `ended: ${plain(reply.ended)}`) : ""), wanted(reply) || ""),
    creditTable(reply.credit) || "",
    ...(futuresTree(reply, run) || []),
    classmatesCard(reply, run) || "");
}

// The address names run, step and key of the reply, and whatever filters are not as they come.
function remember() {
  const index = indexOf(browse.run);
  const query = new URLSearchParams();
  if (browse.step === "all") query.set("step", "all");
  if (browse.sort !== "logged") query.set("sort", browse.sort);
  if (browse.missing) query.set("missing", browse.missing);
  if (browse.find) query.set("find", browse.find);
  if (browse.colour !== "advantage") query.set("colour", browse.colour);
  if (browse.beside) query.set("beside", browse.beside.map((part) => encodeURIComponent(part.toWellFormed())).join("/"));
  for (const [field, value] of Object.entries(browse.slices)) if (value) query.set(`is-${field}`, value);
  const text = query.toString();
  history.replaceState(null, "", address(browse.run, index.step(browse.at), index.key(browse.at), text && `?${text}`));
}

function recall(query) {
  if (query.has("sort")) browse.sort = query.get("sort");
  if (query.has("missing")) browse.missing = query.get("missing");
  if (query.has("find")) browse.find = query.get("find");
  if (query.has("beside")) browse.beside = query.get("beside").split("/").map(decode);
  if (Object.hasOwn(COLOURS, query.get("colour"))) browse.colour = query.get("colour");
  for (const [name, value] of query) if (name.startsWith("is-")) browse.slices[name.slice(3)] = value;
}

function conversationsView(query, name, step, key) {
  recall(query);
  const runs = usableRuns();
  if (!runs.length) return h("p", { class: "empty", id: "noreplies" }, "There is no rollouts.jsonl in this folder, or no reply in it yet.");
  const named = runs.find((run) => run.name === name);
  // The last run with conversations is what the recipe led to: start there.
  browse.run = named ? name : browse.run && name === undefined && runOf(browse.run) ? browse.run : runs.at(-1).name;
  const index = indexOf(browse.run);
  let at = -1;
  if (named) for (let place = 0; place < index.count && at < 0; place++) if (String(index.step(place)) === step && (key === undefined || index.key(place) === key)) at = place;
  const lost = name !== undefined && at < 0;
  if (at >= 0 && browse.step !== "all") browse.step = query.get("step") === "all" ? "all" : step === String(latestStep(index)) && browse.step === "latest" ? "latest" : step;
  else if (query.get("step") === "all") browse.step = "all";
  lostNote.textContent = lost ? `The reply that this address names (${[name, step, key].filter((part) => part !== undefined).join(", ")}) is not on this page.` : "";
  if (at >= 0) browse.at = at;
  drawControls();
  drawList();
  if (at >= 0) openReply(at, false);
  else if (browse.at !== null && !lost && browse.at < index.count) openReply(browse.at, false);
  else openReply(promptList.groups[0]?.replies[0] ?? 0, false);
  if (browse.find) refresh();
  const kept = currentRun().notes.filter((note) => note.includes("rollouts.jsonl"));
  return h("div", {}, lostNote, kept.map((note) => h("p", { class: "note" }, note)), h("div", { class: "browser" }, h("div", { class: "side" }, controls, promptList.note, promptList.box), reading));
}
