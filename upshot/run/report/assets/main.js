// Tabs, remembered in the address, so that a view can be linked to.

const tabs = { overview: ["Overview", overview], curves: ["Curves", curvesView], conversations: ["Conversations", conversationsView], recipe: ["Recipe", recipes] };
const panel = h("main", { id: "panel" });
const nav = h("nav", { "aria-label": "Views" }, Object.entries(tabs).map(([id, [name]]) => h("button", { "data-tab": id, onclick: () => open(id) }, name)));

function open(id, ...rest) {
  charts.length = 0;
  tip.hidden = true;
  view.smooth = 0;
  history.replaceState(null, "", `#${id}`);
  for (const button of nav.children) button.setAttribute("aria-current", String(button.dataset.tab === id));
  panel.replaceChildren(tabs[id][1](...rest));
  redraw();
  const top = nav.previousElementSibling ? nav.previousElementSibling.offsetTop + nav.previousElementSibling.offsetHeight : 0;
  if (scrollY > top) scrollTo(0, top);
}

const page = document.getElementById("page");
page.replaceChildren(header(), nav, panel, h("footer", {}, `Written by Upshot ${data.upshot} on ${data.written.replace("T", " ").replace("+00:00", " UTC")}. Everything is in this one file.`), tip);
function decode(part) {
  try { return decodeURIComponent(part); } catch { return part; } // an address that somebody typed
}
function route() {
  const [name, ...rest] = location.hash.slice(1).split("/").map(decode);
  open(tabs[name] ? name : "overview", ...rest);
}
addEventListener("hashchange", route);
let pending = 0;
addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(redraw); });
route();
