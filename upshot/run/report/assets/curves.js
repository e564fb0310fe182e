// Small multiples of every metric. Lines of several runs or phases share a chart; a missing point is a gap and a mark.

const charts = []; // everything drawn, so that resizing, smoothing and the legend can draw it again
const view = { smooth: 0, hidden: new Set(), find: "" };

// One label for each (run, phase): the run's name, the phase, or both, whichever tells them apart.
const labels = (() => {
  const pairs = data.runs.flatMap((run, index) => [...new Set(run.curves.curves.map((curve) => curve.phase))].map((phase) => ({ index, phase, run })));
  const runsUsed = new Set(pairs.map((pair) => pair.index));
  return pairs.map((pair, at) => {
    const alone = pairs.filter((other) => other.index === pair.index).length === 1;
    const name = runsUsed.size === 1 ? pair.phase || pair.run.name : alone || !pair.phase ? pair.run.name : `${pair.run.name} · ${pair.phase}`;
    return { ...pair, at, name };
  });
})();

const lines = data.runs.flatMap((run, index) => run.curves.curves.map((curve) => ({
  label: labels.find((label) => label.index === index && label.phase === curve.phase),
  key: curve.key, xs: run.curves.steps[curve.x], ys: curve.y, n: curve.n, missing: curve.missing,
})));

const FIRST = ["eval", "reward", "metric", "score", "by", "classmate", "task", "question", "rollout", "train", "loss", "policy"];
const LAST = ["missing", "time"];
function groupRank(name) {
  const first = FIRST.indexOf(name), last = LAST.indexOf(name);
  return first >= 0 ? first : last >= 0 ? 1000 + last : 100;
}

// Curves that are values of one thing and belong into one chart: groups of rows, parts of the reward, classmates.
function sliceOf(key) {
  const [, field, value, metric] = key.match(/^by\/([^=/]+)=([^/]*)\/(.+)$/) || [];
  if (field) return { field, value, metric };
  const [, part, lost] = key.match(/^part\/(.+?)(\/missing)?$/) || [];
  if (part) return { field: "part", value: part, metric: lost ? "missing" : "reward" };
  const [, name, what] = key.match(/^classmate\/(.+)\/([^/]+)$/) || [];
  return name ? { field: "classmate", value: name, metric: what } : null;
}

// [{name, charts: [{title, lines: [{...line, name, colour}]}]}]
function chartGroups() {
  const groups = new Map();
  const put = (group, title, line, name, colour) => {
    if (!groups.has(group)) groups.set(group, new Map());
    const of = groups.get(group);
    if (!of.has(title)) of.set(title, { title, lines: [] });
    of.get(title).lines.push({ ...line, name, colour });
  };
  const slices = new Map(); // "difficulty/reward" → lines of its values
  for (const line of lines) {
    const slice = sliceOf(line.key);
    if (slice) {
      const { field, value, metric } = slice;
      const id = `${field}\u0000${metric}`;
      if (!slices.has(id)) slices.set(id, []);
      slices.get(id).push({ line, field, value, metric });
    } else {
      const at = line.key.indexOf("/");
      put(at > 0 ? line.key.slice(0, at) : "other", at > 0 ? line.key.slice(at + 1) : line.key, line, line.label.name, line.label.at);
    }
  }
  for (const members of slices.values()) {
    const compare = new Set(members.map((member) => member.line.label)).size > 1;
    const values = [...new Set(members.map((member) => member.value))];
    for (const { line, field, value, metric } of members) {
      // Several runs: a chart per value with the runs in it. One run: one chart with the values in it.
      if (compare) put(`by ${field}`, `${metric}, ${field} = ${value}`, line, line.label.name, line.label.at);
      else put(`by ${field}`, metric, line, value, values.indexOf(value));
    }
  }
  return [...groups].map(([name, of]) => ({ name, charts: [...of.values()] }))
    .sort((a, b) => groupRank(a.name.split(" ")[0]) - groupRank(b.name.split(" ")[0]) || a.name.localeCompare(b.name));
}

function smoothed(ys, weight) {
  let sum = 0, norm = 0;
  return ys.map((y) => {
    if (y === null) return null;
    sum = sum * weight + y * (1 - weight);
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}

function ticks(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((multiple) => multiple * power >= rough) * power;
  const out = [];
  for (let value = Math.ceil(low / unit) * unit; value <= high + unit * 1e-6; value += unit) out.push(Math.abs(value) < unit * 1e-6 ? 0 : value);
  return out;
}

function path(xs, ys, px, py) {
  let text = "", open = false;
  const dots = [];
  for (let index = 0; index < xs.length; index++) {
    if (ys[index] === null) { open = false; continue; }
    const alone = !open && (index + 1 >= xs.length || ys[index + 1] === null);
    text += `${open ? "L" : "M"}${px(xs[index]).toFixed(1)} ${py(ys[index]).toFixed(1)}`;
    if (alone) dots.push([px(xs[index]), py(ys[index])]);
    open = true;
  }
  return { text, dots };
}

function bounds(shown) {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const line of shown) {
    for (const x of line.xs) { left = Math.min(left, x); right = Math.max(right, x); }
    for (const y of line.ys) if (y !== null) { low = Math.min(low, y); high = Math.max(high, y); }
  }
  if (low === Infinity) [low, high] = [0, 1];
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  if (left === Infinity) [left, right] = [0, 1];
  if (left === right) { left -= 0.5; right += 0.5; }
  const pad = (high - low) * 0.06;
  return { left, right, low: low - pad, high: high + pad };
}

function drawChart(chart) {
  const width = chart.box.clientWidth;
  if (!width) return;
  const height = chart.wide ? 320 : 150;
  const shown = chart.lines.filter((line) => !view.hidden.has(line.label.at));
  const b = bounds(shown);
  const yTicks = ticks(b.low, b.high, chart.wide ? 7 : 4);
  const margin = { left: 12 + 6.2 * Math.max(...yTicks.map((tick) => format(tick).length), 2), right: 10, top: 8, bottom: 20 };
  const px = (x) => margin.left + ((width - margin.left - margin.right) * (x - b.left)) / (b.right - b.left);
  const py = (y) => margin.top + ((height - margin.top - margin.bottom) * (b.high - y)) / (b.high - b.low);
  const floor = height - margin.bottom;
  const xTicks = ticks(b.left, b.right, Math.max(3, Math.floor(width / 70))).filter((tick) => Number.isInteger(tick));
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title} over steps` });
  for (const tick of yTicks) root.append(svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: py(tick), y2: py(tick) }), svg("text", { x: margin.left - 6, y: py(tick) + 3.5, "text-anchor": "end" }, format(tick)));
  for (const tick of xTicks) root.append(svg("text", { x: Math.min(px(tick), width - 2), y: height - 5, "text-anchor": px(tick) > width - 22 ? "end" : "middle" }, format(tick)));
  for (const line of shown) drawLine(root, line, px, py, floor, line.xs.length > width / 2);
  const cross = svg("line", { class: "cross", y1: margin.top, y2: floor, x1: -9, x2: -9 });
  root.append(cross);
  chart.box.replaceChildren(root);
  chart.px = px; chart.py = py; chart.shown = shown; chart.cross = cross; chart.root = root;
}

function drawLine(root, line, px, py, floor, dense) {
  const style = { stroke: hue(line.colour), "stroke-dasharray": dash(line.colour), class: dense && view.smooth === 0 ? "curve dense" : "curve" };
  const raw = path(line.xs, line.ys, px, py);
  if (view.smooth > 0) {
    root.append(svg("path", { ...style, d: raw.text, class: "curve raw" }));
    root.append(svg("path", { ...style, d: path(line.xs, smoothed(line.ys, view.smooth), px, py).text }));
  } else root.append(svg("path", { ...style, d: raw.text }));
  for (const [x, y] of raw.dots) root.append(svg("circle", { cx: x, cy: y, r: 2.6, fill: hue(line.colour) }));
  line.ys.forEach((y, index) => {
    if (y === null) root.append(svg("path", { class: "gap", stroke: hue(line.colour), d: `M${px(line.xs[index]) - 2.5} ${floor - 5}l5 5m0 -5l-5 5` }));
  });
}

const tip = h("div", { class: "tip", hidden: true, role: "status" });

function hover(chart, event) {
  if (!chart.px || !chart.shown.length) return;
  const box = chart.root.getBoundingClientRect();
  const at = event.clientX - box.left;
  let best = null;
  for (const line of chart.shown) for (const x of line.xs) {
    const far = Math.abs(chart.px(x) - at);
    if (best === null || far < best.far) best = { far, x };
  }
  if (best === null) return;
  chart.cross.setAttribute("x1", chart.px(best.x));
  chart.cross.setAttribute("x2", chart.px(best.x));
  chart.root.querySelectorAll(".spot").forEach((spot) => spot.remove());
  const rows = chart.shown.map((line) => {
    const index = line.xs.indexOf(best.x);
    if (index < 0) return null;
    const y = line.ys[index];
    if (y !== null) chart.root.append(svg("circle", { class: "spot", cx: chart.px(best.x), cy: chart.py(y), r: 3.4, fill: hue(line.colour) }));
    const soft = view.smooth > 0 && y !== null ? smoothed(line.ys, view.smooth)[index] : null;
    return h("div", {}, h("i", { class: "swatch", style: `background:${hue(line.colour)}` }), h("span", {}, line.name), h("b", {}, y === null ? "missing" : format(y)), soft !== null && h("small", {}, `smoothed ${format(soft)}`));
  });
  tip.replaceChildren(h("div", { class: "tipstep" }, `step ${format(best.x)}`), ...rows.filter(Boolean));
  tip.hidden = false;
  const wide = tip.offsetWidth, x = box.left + chart.px(best.x) + 14;
  tip.style.left = `${Math.max(6, x + wide > innerWidth - 6 ? box.left + chart.px(best.x) - wide - 14 : x)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 6))}px`;
}

function leave(chart) {
  tip.hidden = true;
  if (chart.cross) { chart.cross.setAttribute("x1", -9); chart.cross.setAttribute("x2", -9); }
  chart.root?.querySelectorAll(".spot").forEach((spot) => spot.remove());
}

function chartCard(spec) {
  const chart = { ...spec, box: h("div", { class: "plot" }), wide: false };
  const missing = spec.lines.reduce((sum, line) => sum + line.missing, 0);
  const own = spec.lines.some((line) => line.name !== line.label.name); // values of a slice: the page's legend does not name them
  const grow = h("button", { class: "icon", title: "Larger or smaller", "aria-label": `Enlarge ${spec.title}`, onclick: () => { chart.wide = !chart.wide; chart.card.classList.toggle("wide", chart.wide); chart.card.closest(".group")?.classList.toggle("full", Boolean(chart.card.parentNode.querySelector(".wide"))); redraw(); } }, "⤢");
  chart.card = h("figure", { class: "chart", "data-title": spec.title.toLowerCase() },
    h("figcaption", {}, h("span", { title: spec.title }, spec.title), missing > 0 && h("em", { class: "missing-text" }, `${missing} missing`), grow),
    chart.box,
    own && h("div", { class: "legend small" }, spec.lines.map((line) => h("span", {}, h("i", { class: "swatch", style: `background:${hue(line.colour)}` }), line.name))));
  chart.box.addEventListener("pointermove", (event) => hover(chart, event));
  chart.box.addEventListener("pointerdown", (event) => hover(chart, event));
  chart.box.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave(chart)); // a finger leaves as it lifts
  charts.push(chart);
  return chart.card;
}

document.addEventListener("pointerdown", (event) => charts.forEach((chart) => chart.box.contains(event.target) || leave(chart)), true);
addEventListener("scroll", () => charts.forEach(leave), { passive: true });

const redraw = () => charts.forEach(drawChart);

function legend() {
  if (labels.length < 2) return null;
  return h("div", { class: "legend", role: "group", "aria-label": "Runs" }, labels.map((label) => h("button", { class: "key", "aria-pressed": "true", onclick: (event) => {
    const off = view.hidden.delete(label.at) ? false : Boolean(view.hidden.add(label.at));
    document.querySelectorAll(`[data-label="${label.at}"]`).forEach((key) => key.setAttribute("aria-pressed", String(!off)));
    event.currentTarget.blur();
    redraw();
  }, "data-label": label.at }, h("i", { class: "swatch", style: `background:${hue(label.at)}` }), label.name)));
}

function curvesView() {
  const groups = chartGroups();
  if (!groups.length) return h("p", { class: "empty" }, "There is no metrics.jsonl in this folder, or no row in it yet.");
  const slider = h("input", { type: "range", min: 0.5, max: 0.98, step: 0.01, value: 0.85, "aria-label": "Smoothing", disabled: true });
  const toggle = h("input", { type: "checkbox" });
  const smooth = () => { slider.disabled = !toggle.checked; view.smooth = toggle.checked ? Number(slider.value) : 0; redraw(); };
  toggle.addEventListener("change", smooth);
  slider.addEventListener("input", smooth);
  const sections = groups.map((group) => h("details", { class: `group span-${Math.min(4, group.charts.length)}`, open: group.name !== "time", ontoggle: redraw }, h("summary", {}, group.name, h("small", {}, count(group.charts.length, "chart"))), h("div", { class: "grid" }, group.charts.map(chartCard))));
  const find = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: (event) => {
    const text = event.target.value.toLowerCase();
    for (const section of sections) {
      let any = false;
      for (const card of section.querySelectorAll(".chart")) { const on = `${section.firstChild.textContent} ${card.dataset.title}`.toLowerCase().includes(text); card.hidden = !on; any = any || on; }
      section.hidden = !any;
    }
  } });
  return h("div", {}, h("div", { class: "bar" }, legend(), h("span", { class: "spring" }), h("label", { class: "check" }, toggle, "Smooth"), slider, find), h("div", { class: "groups" }, sections));
}

// The few charts that say how it went, for the first tab: rewards and evaluation, or else whatever comes first.
function glanceCharts() {
  const groups = chartGroups().filter((group) => !["time", "missing"].includes(group.name));
  const telling = (chart) => (/^(mean|total|score|accuracy|reward)\b/.test(chart.title) ? 0 : /std|min|max|missing|flat/.test(chart.title) ? 2 : 1);
  const split = groups.some((group) => group.name === "by part"); // then the parts say more than the reward's spread
  const few = (group) => [...group.charts].sort((a, b) => telling(a) - telling(b)).slice(0, split ? 1 : ["reward", "eval"].includes(group.name) || group.name.startsWith("by ") ? 2 : 1);
  const named = (group) => (chart) => (group.name === "other" || chart.title.includes(" = ") ? chart : { ...chart, title: group.name.startsWith("by ") ? `${chart.title} ${group.name}` : `${group.name}/${chart.title}` });
  const chosen = groups.flatMap((group) => few(group).map(named(group))).slice(0, 4);
  return chosen.length > 0 && h("div", {}, legend(), h("div", { class: "grid four" }, chosen.map(chartCard)));
}
