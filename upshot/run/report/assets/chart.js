// One chart: lines over steps with bands over seeds, gaps where a point is missing, values under the pointer, SVG, CSV.

const charts = []; // everything drawn, so that resizing, smoothing and the legend can draw it again
const view = { smooth: 0, hidden: new Set(), axis: "step" };
// 90 → 1:30, 3700 → 1:01:40: short enough to stand below an axis.
function clock(seconds) {
  const whole = Math.round(seconds), two = (number) => String(number).padStart(2, "0");
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes}:${two(whole % 60)}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${two(whole % 60)}`;
}
// What curves are drawn over; a run's time and tokens are summed up over its phases, steps begin anew in each.
const AXES = {
  step: { name: "step", tell: (x) => `step ${format(x)}`, tick: (x) => (Number.isInteger(x) ? format(x) : null) },
  time: { name: "time", tell: (x) => `after ${lasting(x)}`, tick: clock },
  tokens: { name: "tokens trained", tell: (x) => `after ${format(x)} tokens`, tick: (x) => (x >= 1e6 ? `${format(x / 1e6)} M` : x >= 1e3 ? `${format(x / 1e3)} k` : format(x)) },
};

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
    for (const ys of [line.ys, line.low || [], line.high || []]) for (const y of ys) if (y !== null) { low = Math.min(low, y); high = Math.max(high, y); }
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
  const height = chart.wide ? 320 : 150, axis = chart.axis || "step";
  const shown = chart.lines.filter((line) => !view.hidden.has(line.label));
  const b = bounds(shown);
  const yTicks = ticks(b.low, b.high, chart.wide ? 7 : 4);
  const margin = { left: 12 + 6.2 * Math.max(...yTicks.map((tick) => format(tick).length), 2), right: 10, top: 8, bottom: 20 };
  const px = (x) => margin.left + ((width - margin.left - margin.right) * (x - b.left)) / (b.right - b.left);
  const py = (y) => margin.top + ((height - margin.top - margin.bottom) * (b.high - y)) / (b.high - b.low);
  const floor = height - margin.bottom;
  const xTicks = ticks(b.left, b.right, Math.max(4, Math.floor(width / 70))).filter((tick) => AXES[axis].tick(tick) !== null);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title} over ${AXES[axis].name}` });
  for (const tick of yTicks) root.append(svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: py(tick), y2: py(tick) }), svg("text", { x: margin.left - 6, y: py(tick) + 3.5, "text-anchor": "end" }, format(tick)));
  for (const tick of xTicks) root.append(svg("text", { x: Math.min(px(tick), width - 2), y: height - 5, "text-anchor": px(tick) > width - 22 ? "end" : "middle" }, AXES[axis].tick(tick)));
  for (const line of shown) drawLine(root, line, px, py, floor, line.xs.length > width / 2);
  const cross = svg("line", { class: "cross", y1: margin.top, y2: floor, x1: -9, x2: -9 });
  root.append(cross);
  chart.box.replaceChildren(root);
  Object.assign(chart, { px, py, shown, cross, root });
}

function drawLine(root, line, px, py, floor, dense) {
  const style = { stroke: hue(line.colour), "stroke-dasharray": dash(line.colour), class: dense && view.smooth === 0 ? "curve dense" : "curve" };
  if (line.low) {
    const there = line.xs.map((x, index) => [x, line.low[index], line.high[index]]).filter(([, low]) => low !== null);
    const points = [...there.map(([x, , high]) => [x, high]), ...there.reverse().map(([x, low]) => [x, low])];
    root.append(svg("polygon", { class: "band", fill: hue(line.colour), points: points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ") }));
  }
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
    const band = line.low && y !== null ? `${format(line.low[index])} to ${format(line.high[index])}, ${line.seeds} seeds` : null;
    return h("div", {}, h("i", { class: "swatch", style: `background:${hue(line.colour)}` }), h("span", {}, line.name), h("b", {}, y === null ? "missing" : format(y)), soft !== null && h("small", {}, `smoothed ${format(soft)}`), band && h("small", {}, band));
  });
  tip.replaceChildren(h("div", { class: "tipstep" }, AXES[chart.axis || "step"].tell(best.x)), ...rows.filter(Boolean));
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

const fileName = (title) => title.replace(/[^\w.-]+/g, "-");

// A line a step and curve: what the chart shows, for a spreadsheet.
function toCsv(chart) {
  const quoted = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
  const band = chart.lines.some((line) => line.low);
  const rows = chart.lines.flatMap((line) => line.xs.map((x, at) => [quoted(line.name), x, line.ys[at] ?? "", ...(band ? [line.low?.[at] ?? "", line.high?.[at] ?? ""] : [])].join(",")));
  return `${["curve", chart.axis || "step", "value", ...(band ? ["low", "high"] : [])].join(",")}\n${rows.join("\n")}\n`;
}

// The drawing on its own: what the page's style sheet gave it is written into it.
function toSvg(chart) {
  const copy = chart.root.cloneNode(true);
  const wanted = ["stroke", "stroke-width", "stroke-dasharray", "fill", "opacity", "font-size", "font-family"];
  const from = [...chart.root.querySelectorAll("*")], to = [...copy.querySelectorAll("*")];
  from.forEach((node, at) => {
    const style = getComputedStyle(node);
    for (const name of wanted) to[at].setAttribute(name, style.getPropertyValue(name));
    to[at].removeAttribute("class");
  });
  copy.setAttribute("xmlns", SVG);
  const legend = chart.lines.map((line, at) => svg("text", { x: 60, y: 18 + 13 * at, "font-size": 11, "font-family": "sans-serif", fill: getComputedStyle(from.find((node) => node.getAttribute("stroke") === hue(line.colour)) || from[0]).stroke }, line.name));
  if (legend.length > 1) copy.append(...legend);
  return new XMLSerializer().serializeToString(copy);
}

function chartCard(spec) {
  const chart = { ...spec, box: h("div", { class: "plot" }), wide: false };
  const missing = spec.lines.reduce((sum, line) => sum + line.missing, 0);
  const own = spec.lines.some((line) => line.name !== line.label); // values of a slice: the page's legend does not name them
  const button = (sign, name, act) => h("button", { class: "icon", title: name, "aria-label": `${name}: ${spec.title}`, onclick: act }, sign);
  chart.card = h("figure", { class: "chart", "data-title": spec.title.toLowerCase() },
    h("figcaption", {}, h("span", { title: spec.title }, spec.title), missing > 0 && h("em", { class: "missing-text" }, `${missing} missing`),
      h("div", { class: "tools" }, button("svg", "Save as SVG", () => save(`${fileName(spec.title)}.svg`, "image/svg+xml", toSvg(chart))),
      button("csv", "Save as CSV", () => save(`${fileName(spec.title)}.csv`, "text/csv", toCsv(chart))),
      button("⤢", "Larger or smaller", () => { chart.wide = !chart.wide; chart.card.classList.toggle("wide", chart.wide); chart.card.closest(".group")?.classList.toggle("full", Boolean(chart.card.parentNode.querySelector(".wide"))); redraw(); }))),
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
