// Where the data come from: the page's own file, or the server that it came from. Both give the same shapes.

let data = JSON.parse(document.getElementById("data").textContent);
const LIVE = data === null;
const connection = { lost: false };

// The replies of a run in columns: what they are listed and filtered by. A reply itself is asked for by its number.
class Replies {
  constructor() { this.clear(0); }

  clear(generation) {
    Object.assign(this, { generation, count: 0, strings: [], columns: byName(), slices: byName(), means: byName() });
  }

  add(chunk) {
    this.strings.push(...chunk.strings);
    const more = chunk.columns.step.length;
    for (const kind of ["columns", "slices", "means"]) {
      for (const name of new Set([...Object.keys(this[kind]), ...Object.keys(chunk[kind])])) {
        this[kind][name] ||= new Array(this.count).fill(null);
        const values = chunk[kind][name] || new Array(more).fill(null);
        for (const value of values) this[kind][name].push(value); // not spread: a chunk is longer than an argument list
      }
    }
    this.count += more;
    return this;
  }

  step(at) { return this.columns.step[at]; }
  row(at) { return this.strings[this.columns.row[at]]; }
  prompt(at) { return this.strings[this.columns.prompt[at]]; }
  key(at) { return this.columns.key[at]; }
  reward(at) { return this.columns.reward[at]; }
  reasons(at) { return (this.columns.missing[at] || []).map((number) => this.strings[number]); }
  isMissing(at) { return this.reward(at) === null && this.columns.missing[at] !== null; }
  slice(name, at) { const number = this.slices[name]?.[at]; return isNumber(number) ? this.strings[number] : null; }
  steps() { return [...new Set(this.columns.step)].sort((a, b) => a - b); }
}

const indexes = new Map();
function indexOf(name) {
  if (!indexes.has(name)) indexes.set(name, new Replies());
  return indexes.get(name);
}

const told = (reply) => JSON.stringify([reply.row, reply.key, ...[reply, ...(reply.futures || [])].map((part) => (part.messages || []).map((message) => [message.content, message.note]))]).toLowerCase();

const fileSource = {
  unpacked: new Map(),

  async start() {
    for (const run of data.runs) indexOf(run.name).add(run.index);
  },

  // A step's replies are packed together, and unpacked when the first of them is looked at.
  async ofStep(name, place) {
    const id = `${place} ${name}`;
    if (!this.unpacked.has(id)) this.unpacked.set(id, unpack(data.runs.find((run) => run.name === name).packed[place]));
    return this.unpacked.get(id);
  },

  async reply(name, at) {
    const steps = indexOf(name).columns.step;
    const order = [...new Set(steps)];
    return (await this.ofStep(name, order.indexOf(steps[at])))[at - steps.indexOf(steps[at])];
  },

  async find(name, words) {
    const found = [];
    const text = JSON.stringify(words.toLowerCase()).slice(1, -1);
    for (let at = 0; at < indexOf(name).count; at++) if (told(await this.reply(name, at)).includes(text)) found.push(at);
    return found;
  },

  follow() {},
};

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

async function get(path, query) {
  const answer = await fetch(`${path}?${new URLSearchParams(query || {})}`);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

const serverSource = {
  async start() {
    data = await get("page");
  },

  reply: (name, at) => get("reply", { run: name, at }),
  find: (name, words) => get("find", { run: name, words }),

  // The server says that there is more; one update at a time, always to the newest state.
  follow(changed) {
    let newest = null, busy = false;
    const work = async () => {
      if (busy) return;
      busy = true;
      while (newest) {
        const state = newest;
        newest = null;
        try { await this.update(state, changed); } catch { /* the next state is told again */ }
      }
      busy = false;
    };
    const events = new EventSource("events");
    events.onmessage = (event) => { connection.lost = false; newest = JSON.parse(event.data); work(); };
    events.onerror = () => { connection.lost = true; changed("connection"); };
  },

  async update(state, changed) {
    if (state.version !== data.version) {
      data = await get("page");
      changed("page");
    }
    for (const [name, [generation, count]] of Object.entries(state.replies)) {
      const index = indexOf(name);
      if (index.generation !== generation) index.clear(generation);
      const before = index.count;
      while (index.count < count) {
        const chunk = await get("replies", { run: name, start: index.count, strings: index.strings.length });
        if (chunk.generation !== generation || !chunk.columns.step.length) break;
        index.add(chunk);
        if (!before && index.count < count) changed("replies"); // something to read while the rest comes
      }
      if (index.count !== before) changed("replies");
    }
  },
};

const source = LIVE ? serverSource : fileSource;
