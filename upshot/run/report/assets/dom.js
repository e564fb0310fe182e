// Elements, numbers and colours. All text goes through text nodes: nothing from a transcript is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// An object for names that come from logs: `constructor` and its like are names as any other.
const byName = () => Object.create(null);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function format(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace("-", "−").replace("e-", "e−");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.01 ? 3 : 5;
  const text = Number(value.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: digits });
  return text.replace("-", "−");
}
// The same number of decimals for numbers that are read one below the other.
function decimals(values) {
  const present = values.filter(isNumber);
  const size = Math.max(...present.map(Math.abs), 0);
  const most = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  return Math.max(0, ...present.map((value) => Math.min(most, (String(Number(value.toFixed(most))).split(".")[1] || "").length)));
}
const fixed = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
const signed = (value) => (isNumber(value) && value > 0 ? "+" : "") + format(value);
const count = (number, noun, plural) => `${number.toLocaleString("en-US")} ${number === 1 ? noun : plural || noun + "s"}`;

function lasting(seconds) {
  if (!isNumber(seconds)) return null;
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 ? Number(seconds.toFixed(1)) : whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

// Six hues that stay apart for colour-blind readers, then dashes.
const hue = (index) => `var(--line-${index % 6})`;
const dash = (index) => ["", "6 3", "2 3", "8 3 2 3"][Math.floor(index / 6) % 4];

const scoreValue = (score) => (isNumber(score) ? score : score && isNumber(score.value) ? score.value : null);
const whyMissing = (score) =>
  scoreValue(score) !== null ? null : (score && score.missing) || "no value and no reason in the log";
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));

// Saves a text as a file of the reader's.
function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

const THEMES = { auto: "light dark", light: "light", dark: "dark" };
function remembered(name) {
  try { return localStorage.getItem(name); } catch { return null; } // a file, or a browser that keeps nothing
}
function setTheme(name) {
  document.documentElement.style.colorScheme = THEMES[name] || THEMES.auto;
  document.documentElement.dataset.theme = THEMES[name] ? name : "auto";
  try { localStorage.setItem("upshot-theme", name); } catch { /* it holds for this visit */ }
}
const nextTheme = () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
};
