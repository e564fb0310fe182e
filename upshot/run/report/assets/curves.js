// Which curves belong into which chart: runs and phases share one, seeds of one experiment are one line with a band.

const FIRST = ["eval", "reward", "metric", "score", "by", "classmate", "task", "question", "rollout", "train", "loss", "policy"];
const LAST = ["missing", "time"];
function groupRank(name) {
  const first = FIRST.indexOf(name), last = LAST.indexOf(name);
  return first >= 0 ? first : last >= 0 ? 1000 + last : 100;
}

// Every experiment's phases with a label each: the run's name, the phase, or both, whichever tells them apart.
function labelled() {
  const pairs = new Map();
  for (const run of data.runs) for (const curve of run.curves.curves) {
    const id = JSON.stringify([run.experiment, curve.phase]);
    if (!pairs.has(id)) pairs.set(id, { experiment: run.experiment, phase: curve.phase, runs: new Set() });
    pairs.get(id).runs.add(run);
  }
  const all = [...pairs.values()];
  const used = new Set(all.map((pair) => pair.experiment));
  for (const pair of all) {
    const alone = all.filter((other) => other.experiment === pair.experiment).length === 1;
    const name = pair.runs.size > 1 ? `${pair.experiment} (${pair.runs.size} seeds)` : pair.experiment;
    const seeds = pair.runs.size > 1 ? ` (${pair.runs.size} seeds)` : "";
    pair.name = used.size === 1 && pair.phase ? (alone && seeds ? name : `${pair.phase}${seeds}`) : alone || !pair.phase ? name : `${name} · ${pair.phase}`;
  }
  return all;
}

// The mean of several seeds at every step that any of them logged, between the lowest and the highest.
function banded(members) {
  const xs = [...new Set(members.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const at = xs.map((x) => members.map((line) => interpolated(line, x)).filter(isNumber));
  return {
    xs, ys: at.map(mean), low: at.map((values) => (values.length ? Math.min(...values) : null)), high: at.map((values) => (values.length ? Math.max(...values) : null)),
    missing: members.reduce((sum, line) => sum + line.missing, 0), seeds: members.length,
  };
}

// Thinned curves have other steps each: between two of them a straight line is what the eye would see.
function interpolated({ xs, ys }, x) {
  let low = 0, high = xs.length - 1;
  if (x < xs[low] || x > xs[high]) return null;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle - 1;
  }
  if (xs[low] === x || low + 1 >= xs.length) return ys[low];
  if (ys[low] === null || ys[low + 1] === null) return null;
  return ys[low] + ((ys[low + 1] - ys[low]) * (x - xs[low])) / (xs[low + 1] - xs[low]);
}

// A curve over the chosen axis; points of which that is not known are left out.
function along(curves, { x, y }) {
  const xs = view.axis === "step" ? curves.steps[x] : curves[view.axis][x];
  const known = xs.map(isNumber);
  return known.every(Boolean) ? { xs, ys: y } : { xs: xs.filter((_, at) => known[at]), ys: y.filter((_, at) => known[at]) };
}

const hasAxis = (axis) => axis === "step" || data.runs.some((run) => run.curves[axis].some((column) => column.some(isNumber)));

function allLines() {
  return labelled().flatMap((label, at) => {
    const byKey = new Map();
    for (const run of label.runs) for (const curve of run.curves.curves) {
      if (curve.phase !== label.phase) continue;
      if (!byKey.has(curve.key)) byKey.set(curve.key, []);
      byKey.get(curve.key).push({ ...along(run.curves, curve), missing: curve.missing });
    }
    return [...byKey].map(([key, members]) => ({ ...(members.length > 1 ? banded(members) : members[0]), key, label: label.name, at })).filter((line) => line.xs.length);
  });
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
    if (!of.has(title)) of.set(title, { title, lines: [], axis: view.axis });
    of.get(title).lines.push({ ...line, name, colour });
  };
  const slices = new Map(); // "difficulty/reward" → lines of its values
  for (const line of allLines()) {
    const slice = sliceOf(line.key);
    if (slice) {
      const id = JSON.stringify([slice.field, slice.metric]);
      if (!slices.has(id)) slices.set(id, []);
      slices.get(id).push({ line, ...slice });
    } else {
      const at = line.key.indexOf("/");
      put(at > 0 ? line.key.slice(0, at) : "other", at > 0 ? line.key.slice(at + 1) : line.key, line, line.label, line.at);
    }
  }
  for (const members of slices.values()) {
    const compare = new Set(members.map((member) => member.line.label)).size > 1;
    const values = [...new Set(members.map((member) => member.value))];
    for (const { line, field, value, metric } of members) {
      // Several runs: a chart per value with the runs in it. One run: one chart with the values in it.
      if (compare) put(`by ${field}`, `${metric}, ${field} = ${value}`, line, line.label, line.at);
      else put(`by ${field}`, metric, line, value, values.indexOf(value));
    }
  }
  return [...groups].map(([name, of]) => ({ name, charts: [...of.values()] }))
    .sort((a, b) => groupRank(a.name.split(" ")[0]) - groupRank(b.name.split(" ")[0]) || a.name.localeCompare(b.name));
}

const fullTitle = (group, chart) => (group.name === "other" || chart.title.includes(" = ") ? chart.title : group.name.startsWith("by ") ? `${chart.title} ${group.name}` : `${group.name}/${chart.title}`);

// A chart that says nothing is folded away: one whose lines never move, or that another one draws already.
function foldCharts(groups) {
  const drawn = new Map(), folded = [];
  const kept = groups.map((group) => ({ ...group, charts: group.charts.filter((chart) => {
    const name = fullTitle(group, chart);
    const flat = chart.lines.every((line) => line.xs.length > 1 && line.ys.every((y) => y !== null && y === line.ys[0]));
    const shape = JSON.stringify(chart.lines.map((line) => [line.name, line.xs, line.ys]));
    const same = drawn.get(shape);
    if (flat) folded.push([name, [...new Set(chart.lines.map((line) => format(line.ys[0])))].join(", ")]);
    else if (same) folded.push([name, `the same curve as ${same}`]);
    else drawn.set(shape, name);
    return !flat && !same;
  }) }));
  return { groups: kept.filter((group) => group.charts.length), folded };
}

function legend() {
  const labels = labelled();
  if (labels.length < 2) return null;
  return h("div", { class: "legend", role: "group", "aria-label": "Runs" }, labels.map((label, at) => h("button", { class: "key", "aria-pressed": String(!view.hidden.has(label.name)), onclick: (event) => {
    const off = view.hidden.delete(label.name) ? false : Boolean(view.hidden.add(label.name));
    event.currentTarget.setAttribute("aria-pressed", String(!off));
    redraw();
  } }, h("i", { class: "swatch", style: `background:${hue(at)}` }), label.name)));
}

const seen = { curves: "", closed: new Set(["time"]) }; // what the reader chose, kept when a live run draws anew

function curvesView() {
  const { groups, folded } = foldCharts(chartGroups());
  if (!groups.length && !folded.length) return h("p", { class: "empty" }, "There is no metrics.jsonl in this folder, or no row in it yet.");
  const slider = h("input", { type: "range", min: 0.5, max: 0.98, step: 0.01, value: view.smooth || 0.85, "aria-label": "Smoothing", disabled: !view.smooth });
  const toggle = h("input", { type: "checkbox" });
  toggle.checked = view.smooth > 0;
  const smooth = () => { slider.disabled = !toggle.checked; view.smooth = toggle.checked ? Number(slider.value) : 0; redraw(); };
  toggle.addEventListener("change", smooth);
  slider.addEventListener("input", smooth);
  const fold = (name) => (event) => { if (event.target.open) { seen.closed.delete(name); redraw(); } else seen.closed.add(name); };
  const sections = groups.map((group) => h("details", { class: `group span-${Math.min(4, group.charts.length)}`, open: !seen.closed.has(group.name), ontoggle: fold(group.name) }, h("summary", {}, group.name, h("small", {}, count(group.charts.length, "chart"))), h("div", { class: "grid" }, group.charts.map(chartCard))));
  const narrow = () => {
    for (const section of sections) {
      let any = false;
      for (const card of section.querySelectorAll(".chart")) { const on = `${section.firstChild.textContent} ${card.dataset.title}`.toLowerCase().includes(seen.curves); card.hidden = !on; any = any || on; }
      section.hidden = !any;
    }
  };
  const axes = Object.keys(AXES).filter(hasAxis);
  const over = axes.length > 1 && h("label", { class: "check" }, "Over", h("select", { class: "axis", "aria-label": "Horizontal axis", onchange: (event) => { view.axis = event.target.value; draw(); } }, axes.map((axis) => h("option", { value: axis, selected: axis === view.axis }, AXES[axis].name))));
  const find = h("input", { type: "search", class: "search", placeholder: "Find a metric", "aria-label": "Find a metric", value: seen.curves, oninput: (event) => { seen.curves = event.target.value.toLowerCase(); narrow(); } });
  narrow();
  return h("div", {}, h("div", { class: "bar" }, legend(), h("span", { class: "spring" }), over, h("label", { class: "check" }, toggle, "Smooth"), slider, find), h("div", { class: "groups" }, sections),
    folded.length > 0 && h("details", { class: "quiet folded" }, h("summary", {}, `${count(folded.length, "metric")} that never moved, or say the same again`), h("dl", { class: "pairs" }, folded.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))));
}

// The few charts that say how it went, for the first tab: rewards and evaluation, or else whatever comes first.
function glanceCharts() {
  const { groups } = foldCharts(chartGroups().filter((group) => !["time", "missing"].includes(group.name)));
  const telling = (chart) => (/^(mean|total|score|accuracy|reward)\b/.test(chart.title) ? 0 : /std|min|max|missing|flat/.test(chart.title) ? 2 : 1);
  const split = groups.some((group) => group.name === "by part"); // then the parts say more than the reward's spread
  const few = (group) => [...group.charts].sort((a, b) => telling(a) - telling(b)).slice(0, split ? 1 : group.name === "eval" || group.name.startsWith("by ") ? 2 : 1);
  const chosen = groups.flatMap((group) => few(group).map((chart) => ({ ...chart, title: fullTitle(group, chart) }))).slice(0, 4);
  return chosen.length > 0 && h("div", {}, legend(), h("div", { class: "grid four" }, chosen.map(chartCard)));
}
