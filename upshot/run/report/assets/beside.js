// Two conversations side by side: a reply is kept, whatever is opened then stands beside it, and words that differ are marked.

const MOST_CELLS = 4e6; // of the table that a comparison of words fills; longer texts are marked as a whole

// The words of two texts as [word, is it in both] each: their longest common sequence of words and blanks.
function diffWords(left, right) {
  const [a, b] = [left, right].map((text) => text.split(/(\s+)/));
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const inA = a.map((_, at) => at < start || at >= a.length - end), inB = b.map((_, at) => at < start || at >= b.length - end);
  const rows = a.length - start - end, columns = b.length - start - end;
  if (rows * columns <= MOST_CELLS) {
    const width = columns + 1, length = new Uint16Array((rows + 1) * width); // of what the rests have in common
    for (let i = rows - 1; i >= 0; i--) for (let j = columns - 1; j >= 0; j--) {
      length[i * width + j] = a[start + i] === b[start + j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
    }
    for (let i = 0, j = 0; i < rows && j < columns;) {
      if (a[start + i] === b[start + j]) { inA[start + i++] = true; inB[start + j++] = true; }
      else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
      else j++;
    }
  }
  return [a.map((word, at) => [word, inA[at]]), b.map((word, at) => [word, inB[at]])];
}

function markedText(words, tag) {
  const runs = [];
  for (const [word, both] of words) {
    if (runs.length && runs.at(-1).both === both) runs.at(-1).text += word;
    else runs.push({ both, text: word });
  }
  return h("div", { class: "says", dir: "auto" }, runs.map(({ both, text }) => (both || !text.trim() ? text : h(tag, {}, text))));
}

const contentOf = (message) => (typeof message.content === "string" ? message.content : message.content ? plain(message.content) : "");

function pairedTurns(left, right) {
  const [a, b] = [left, right].map((reply) => reply.messages || []);
  return Array.from({ length: Math.max(a.length, b.length) }, (_, at) => {
    if (!a[at] || !b[at]) return [a[at] ? bubble(a[at]) : h("div", {}), b[at] ? bubble(b[at]) : h("div", {})];
    const [own, other] = diffWords(contentOf(a[at]), contentOf(b[at]));
    return [bubble(a[at], { coloured: markedText(own, "del") }), bubble(b[at], { coloured: markedText(other, "ins") })];
  }).flat();
}

function scoresBeside(left, right) {
  const all = [left, right].map((reply) => new Map([["reward", reply.reward?.total], ...Object.entries(reply.reward?.means || {})]));
  const names = [...new Set(all.flatMap((scores) => [...scores.keys()]))];
  return h("table", { class: "versus-scores" }, h("thead", {}, h("tr", {}, ["", "left", "right", "difference"].map((name) => h("th", { class: name ? "num" : "" }, name)))),
    h("tbody", {}, names.map((name) => {
      const [a, b] = all.map((scores) => scoreValue(scores.get(name)));
      const cell = (value) => h("td", { class: value === null ? "num missing-text" : "num" }, value === null ? "missing" : format(value));
      return h("tr", {}, h("td", {}, name), cell(a), cell(b), h("td", { class: "num" }, a === null || b === null ? "" : signed(b - a)));
    })));
}

// browse.beside: [run, step, key] of the reply that was kept.
const isBeside = (index, at) => browse.beside?.[0] === browse.run && browse.beside[1] === String(index.step(at)) && browse.beside[2] === index.key(at);

function keepButton(index, at) {
  if (browse.beside && isBeside(index, at)) return h("button", { class: "more compare", onclick: () => keep(null) }, "Open another reply to see it beside this one · cancel");
  return h("button", { class: "more compare", onclick: () => keep(browse.beside ? null : [browse.run, String(index.step(at)), index.key(at)]) }, browse.beside ? "Stop comparing" : "Compare with another reply");
}

function keep(reply) {
  browse.beside = reply;
  drawReply();
  remember();
}

function besideCard(reply, place) {
  if (!browse.beside || isBeside(indexOf(browse.run), place)) return null;
  const [name, step, key] = browse.beside, index = indexOf(name), box = h("div", { class: "versus" });
  const at = index.columns.key?.findIndex((own, other) => own === key && String(index.step(other)) === step) ?? -1;
  if (at < 0) return h("p", { class: "note missing-text" }, `The reply to compare with (${name}, ${step}, ${key}) is not on this page.`);
  source.reply(name, at).then((kept) => {
    const titles = [[name, index, at], [browse.run, indexOf(browse.run), place]].map(([run, own, number]) => h("a", { href: address(run, own.step(number), own.key(number)) }, `${run} · step ${format(own.step(number))} · ${own.row(number)}`));
    box.replaceChildren(...titles, ...pairedTurns(kept, reply), h("div", { class: "scroll whole", tabindex: 0 }, scoresBeside(kept, reply)));
  });
  return h("section", {}, h("h4", {}, "Side by side"), box);
}
