// Tabs and keys; the view is in the address, so that it can be linked to. A live page draws anew what has changed.

const tabs = {
  overview: ["Overview", () => overview()],
  curves: ["Curves", () => curvesView()],
  conversations: ["Conversations", conversationsView],
  recipe: ["Recipe", () => recipeView()],
  goal: [null, (query, row) => goalView(row ?? "")],
};
const panel = h("main", { id: "panel" });
const head = h("div", {});
const nav = h("nav", { "aria-label": "Views" },
  Object.entries(tabs).filter(([, [name]]) => name).map(([id, [name]]) => h("button", { "data-tab": id, onclick: () => { location.hash = `#${id}`; } }, name)));
const settings = h("div", { class: "settings" },
  h("button", { class: "icon", title: "Light, dark, or as the system (t)", "aria-label": "Theme", onclick: nextTheme }, "◐"),
  h("button", { class: "icon", title: "Keys (?)", "aria-label": "Keys", onclick: () => help.showModal() }, "?"));

const KEYS = [["1 to 4", "the views"], ["↓ ↑ or j k", "next, previous prompt"], ["→ ← or l h", "next, previous reply to it"], ["] [", "next, previous step"], ["c", "next colouring of the tokens"], ["o", "open or close all futures"], ["/", "search"], ["t", "light, dark, or as the system"], ["?", "this list"]];
const help = h("dialog", { "aria-label": "Keys", onclick: (event) => event.target === help && help.close() }, h("h2", {}, "Keys"), h("dl", { class: "pairs" }, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])), h("button", { class: "more", onclick: () => help.close() }, "Close"));

let current = { id: "", rest: [], query: new URLSearchParams() };

function draw() {
  charts.length = 0;
  tip.hidden = true;
  for (const button of nav.querySelectorAll("[data-tab]")) button.setAttribute("aria-current", String(button.dataset.tab === current.id));
  panel.replaceChildren(tabs[current.id][1](current.query, ...current.rest));
  redraw();
}

function open(id, query, rest) {
  const other = id !== current.id;
  current = { id, query, rest };
  draw();
  if (other && scrollY > head.offsetHeight) scrollTo(0, head.offsetHeight);
}

function decode(part) {
  try { return decodeURIComponent(part); } catch { return part; } // an address that somebody typed
}
function route() {
  const [place, search] = location.hash.slice(1).split("?");
  const [name, ...rest] = place.split("/").map(decode);
  const query = new URLSearchParams(search || "");
  // From one reply to another: the list stays where it is.
  if (name === "conversations" && current.id === name && rest.length === 3 && rest[0] === browse.run && openAddress(rest)) return;
  open(Object.hasOwn(tabs, name) ? name : "overview", query, rest);
}

function openAddress([, step, key]) {
  const index = indexOf(browse.run);
  for (let at = 0; at < index.count; at++) {
    if (String(index.step(at)) !== step || index.key(at) !== key) continue;
    lostNote.textContent = "";
    if (!promptList.groups.some((group) => group.replies.includes(at))) { browse.step = step; drawControls(); drawList(); }
    openReply(at);
    return true;
  }
  return false;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && typing) { event.target.blur(); return; }
  if (typing) return;
  const names = Object.keys(tabs);
  const acts = {
    "/": () => panel.querySelector(".search")?.focus(), t: nextTheme, "?": () => help.showModal(),
    1: () => { location.hash = names[0]; }, 2: () => { location.hash = names[1]; }, 3: () => { location.hash = names[2]; }, 4: () => { location.hash = names[3]; },
  };
  if (current.id === "conversations" && browse.at !== null) {
    const go = (groups, replies) => () => openReply(promptList.neighbour(groups, replies), false);
    Object.assign(acts, {
      ArrowDown: go(1, 0), j: go(1, 0), ArrowUp: go(-1, 0), k: go(-1, 0), ArrowRight: go(0, 1), l: go(0, 1), ArrowLeft: go(0, -1), h: go(0, -1),
      "]": () => moveStep(1), "[": () => moveStep(-1),
      c: () => { const known = Object.keys(COLOURS); recolour(known[(known.indexOf(browse.colour) + 1) % known.length]); },
      o: () => { const all = [...reading.querySelectorAll(".tree .future")], closed = all.some((one) => !one.open); all.forEach((one) => { one.open = closed; }); },
    });
  }
  if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
}

// What a live run has added: numbers are drawn anew, what somebody reads stays.
function changed(what) {
  head.replaceChildren(header());
  if (what === "page" && current.id !== "conversations" && !panel.contains(document.activeElement)) draw();
  if (what === "replies" && current.id === "conversations" && (indexOf(browse.run).count || !browse.run)) {
    if (panel.querySelector("#noreplies") || lostNote.textContent) draw();
    else {
      if (!controls.contains(document.activeElement)) drawControls();
      drawList();
    }
  }
  if (what === "replies" && current.id === "overview" && panel.querySelector(".finding") && !panel.querySelector(".fork")) draw();
}

async function start() {
  setTheme(remembered("upshot-theme") || "auto");
  const page = document.getElementById("page");
  try { await source.start(); } catch (error) {
    page.replaceChildren(h("p", { class: "empty" }, `The server does not answer (${error.message}).`));
    return;
  }
  document.title = `${data.title} · Upshot`;
  head.replaceChildren(header());
  const written = data.written.replace("T", " ").replace("+00:00", " UTC");
  page.replaceChildren(settings, head, nav, panel, h("footer", {}, LIVE ? `Upshot ${data.upshot}. Read from the run folders while they are written.` : `Written by Upshot ${data.upshot} on ${written}. Everything is in this one file.`), tip, help);
  addEventListener("hashchange", route);
  addEventListener("keydown", onKey);
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => { redraw(); promptList.draw(); }); });
  route();
  source.follow(changed);
}
start();
