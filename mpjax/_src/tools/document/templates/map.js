"use strict";
// The map: boxes of scopes are made when they are opened, so that thousands of operations load fast.
// All texts are set as text, never as HTML: a scope may be called anything.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const made = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};
const UNITS = {
  bytes: (x) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (Math.abs(x) < 1024) return `${+x.toPrecision(3)} ${unit}`;
      x /= 1024;
    }
    return `${+x.toPrecision(4)} GiB`;
  },
  share: (x) => (x < 10 ? `${+(100 * x).toPrecision(3)}%` : `${+x.toPrecision(3)} times`),
  number: (x) => `${+x.toPrecision(3)}`,
};
const things = at("tree").dataset.things;
const counted = (n) => `${n} ${n === 1 ? things.replace(/s$/, "") : things}`;

// ---- operations, and the boxes they lie in ------------------------------------------------------

const operations = data.rows.map(([label, scope, number, flags, places, amounts, facts], index) => {
  const told = [];
  for (let i = 0; i < facts.length; i += 2) told.push([data.texts[facts[i]], data.texts[facts[i + 1]]]);
  const o = { index, label: data.texts[label], scope: data.texts[scope], number, places, amounts, told };
  o.backward = (flags & 1) === 1;
  o.large = (flags & 2) === 2;
  const words = [o.label, o.scope, o.backward ? "backward" : "forward", ...told.map((f) => f[1])];
  o.found = words.join("\n").toLowerCase();
  return o;
});
const byNumber = new Map(operations.map((o) => [o.number, o]));

const box = (name, parent) => ({ name, parent, boxes: new Map(), items: [], all: [], built: false });
const root = box("", null);
for (const o of operations) {
  let b = root;
  for (const name of o.scope.split("/")) {
    if (!b.boxes.has(name)) {
      const inner = box(name, b);
      b.boxes.set(name, inner);
      b.items.push(inner);
    }
    b = b.boxes.get(name);
  }
  b.items.push(o);
  o.box = b;
  for (let up = b; up; up = up.parent) up.all.push(o);
}
// Boxes whose operations are the same, one by one, are alike: the first of them shows all of them.
const shape = (b) =>
  (b.shape = b.items.map((x) => (x.items ? `(${shape(x)})` : x.label + x.places[0] + x.backward)).join());
shape(root);
const alike = (b) => {
  const known = new Map();
  for (const inner of b.boxes.values()) {
    if (inner.all.length > 3 && known.has(inner.shape)) inner.like = known.get(inner.shape);
    else known.set(inner.shape, inner.name);
    alike(inner);
  }
};
alike(root);

// ---- drawing ------------------------------------------------------------------------------------

const tree = at("tree");
let color = 0;
let hits = null;
let chosen = null;
const nothing = at("detail").firstElementChild;

const amountOf = () => data.scales.slice(0, color).filter((s) => s.amount).length;

function paintTile(o) {
  if (!o.tile) return;
  const [, style] = data.scales[color].keys[o.places[color]];
  const miss = hits && !hits.has(o) ? " miss" : "";
  o.tile.className = `tile ${style}${o.large ? " large" : ""}${miss}`;
}

function paintBox(b) {
  if (!b.head) return;
  const scale = data.scales[color];
  const counts = new Map();
  for (const o of b.all) counts.set(o.places[color], (counts.get(o.places[color]) || 0) + 1);
  b.strip.replaceChildren(
    ...[...counts.keys()].sort((x, y) => x - y).map((place) => {
      const part = made("span", scale.keys[place][1]);
      part.style.flexGrow = counts.get(place);
      return part;
    })
  );
  const told = [counted(b.all.length)];
  if (scale.amount) {
    const i = amountOf();
    const values = b.all.map((o) => o.amounts[i]).filter((x) => x !== null);
    const value = scale.most ? Math.max(0, ...values) : values.reduce((x, y) => x + y, 0);
    told.push(`${scale.most ? "at most " : ""}${UNITS[scale.unit](value)}`);
  }
  const found = hits ? b.all.filter((o) => hits.has(o)).length : 0;
  if (hits && found) told.push(found === 1 ? "1 hit" : `${found} hits`);
  if (b.like) told.push(`like ${b.like}`);
  b.sum.textContent = told.join(" \u00b7 ");
  b.head.classList.toggle("miss", hits !== null && !found);
}

function repaint(b = root) {
  paintBox(b);
  for (const x of b.items) {
    if (x.items) {
      if (x.head) repaint(x);
    } else paintTile(x);
  }
}

function item(e, level, label) {
  e.setAttribute("role", "treeitem");
  e.setAttribute("aria-level", level);
  e.setAttribute("aria-label", label);
  e.tabIndex = -1;
  return e;
}

function drawTile(o, level) {
  const name = o.number === null ? o.label : `${o.label}, row ${o.number}`;
  o.tile = item(made("span", "tile", o.label), level, name);
  o.tile.setAttribute("aria-selected", "false");
  o.tile.of = o;
  paintTile(o);
  return o.tile;
}

function drawBox(b, level) {
  b.element = item(made("div", "box"), level, `${b.name || "no scope"}, ${counted(b.all.length)}`);
  b.element.setAttribute("aria-expanded", "false");
  b.element.of = b;
  b.level = level;
  b.head = made("div", "head");
  b.sum = made("span", "sum");
  b.strip = made("span", "strip");
  b.head.append(made("span", "name", b.name || "(no scope)"), b.sum, b.strip);
  b.element.append(b.head);
  paintBox(b);
  return b.element;
}

function fill(b, into, level) {
  let line = null;
  let pass = false;
  for (const x of b.items) {
    if (x.items) {
      into.append(drawBox(x, level));
      line = null;
      continue;
    }
    if (!line || x.backward !== pass) {
      pass = x.backward;
      line = into.appendChild(made("div", "tiles"));
      if (pass) line.append(made("span", "pass", "backward:"));
    }
    line.append(drawTile(x, level));
  }
}

function expand(b, yes) {
  if (!b.element) return;
  if (yes && !b.inside) {
    b.inside = made("div", "inside");
    b.inside.setAttribute("role", "group");
    fill(b, b.inside, b.level + 1);
    b.element.append(b.inside);
  }
  if (b.inside) b.inside.hidden = !yes;
  b.element.setAttribute("aria-expanded", String(yes));
}
const isOpen = (b) => b.element.getAttribute("aria-expanded") === "true";

function expandAll(b, yes) {
  for (const inner of b.boxes.values()) {
    if (yes) expand(inner, true);
    expandAll(inner, yes);
    if (!yes) expand(inner, false);
  }
}

// ---- choosing and finding -----------------------------------------------------------------------

function reveal(o) {
  const way = [];
  for (let b = o.box; b !== root; b = b.parent) way.unshift(b);
  for (const b of way) expand(b, true);
}

function choose(o) {
  reveal(o);
  if (chosen) chosen.tile.setAttribute("aria-selected", "false");
  chosen = o;
  o.tile.setAttribute("aria-selected", "true");
  const list = made("dl");
  for (const [title, text] of o.told) {
    const told = made("dd");
    const row = /^#(\d+)$/.exec(text);
    if (row && byNumber.has(Number(row[1]))) {
      const link = told.appendChild(made("button", "", `row ${row[1]}`));
      link.type = "button";
      link.onclick = () => go(byNumber.get(Number(row[1])));
    } else if (title === "code") told.append(made("code", "", text));
    else told.textContent = text;
    list.append(made("dt", "", title), told);
  }
  const number = o.number === null ? "" : ` (row ${o.number})`;
  const away = made("button", "away", "Close");
  away.type = "button";
  away.onclick = forget;
  at("detail").replaceChildren(away, made("h3", "", o.label + number), list);
}

function forget() {
  if (chosen) {
    chosen.tile.setAttribute("aria-selected", "false");
    focusOn(chosen.tile);
  }
  chosen = null;
  at("detail").replaceChildren(nothing);
}

function go(o) {
  choose(o);
  focusOn(o.tile, false);
  o.tile.scrollIntoView({ block: "center" });
}

// Each word must be somewhere in what is told of an operation; "#12" is the operation of that number.
function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (o) =>
    words.every((w) => (/^#\d+$/.test(w) ? o.number === Number(w.slice(1)) : o.found.includes(w)));
  hits = words.length ? new Set(operations.filter(matches)) : null;
  const count = hits ? `${hits.size} of ${counted(operations.length)}` : counted(operations.length);
  at("hits").textContent = count;
  repaint();
}

function next() {
  const list = hits ? [...hits] : operations;
  if (list.length) go(list[(list.indexOf(chosen) + 1) % list.length]);
}

// ---- mouse and keys -----------------------------------------------------------------------------

let stop = null; // the one item of the tree that Tab reaches
function focusOn(e, really = true) {
  if (stop) stop.tabIndex = -1;
  stop = e;
  e.tabIndex = 0;
  if (really) e.focus();
}
const shown = () => [...tree.querySelectorAll("[role=treeitem]")].filter((e) => e.checkVisibility());
const itemOf = (e) => e.closest("[role=treeitem]");

tree.addEventListener("click", (event) => {
  const e = itemOf(event.target);
  if (!e) return;
  focusOn(e);
  if (!e.of.items) choose(e.of);
  else if (event.target.closest(".head")) expand(e.of, !isOpen(e.of));
});
const KEYS = {
  ArrowDown: (all, i) => all[i + 1],
  ArrowUp: (all, i) => all[i - 1],
  Home: (all) => all[0],
  End: (all) => all[all.length - 1],
  ArrowRight: (all, i, x) => {
    if (!x.items || isOpen(x)) return all[i + 1];
    expand(x, true);
  },
  ArrowLeft: (all, i, x) => {
    if (x.items && isOpen(x)) return expand(x, false);
    return (x.items ? x.parent : x.box).element;
  },
  Enter: (all, i, x) => (x.items ? expand(x, !isOpen(x)) : choose(x)),
};
KEYS[" "] = KEYS.Enter;
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") forget();
});
tree.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const all = shown();
  const e = itemOf(event.target);
  const target = KEYS[event.key](all, all.indexOf(e), e.of);
  if (target) focusOn(target);
});
at("search").addEventListener("input", (event) => search(event.target.value));
at("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") next();
});
at("next").onclick = next;
at("open").onclick = () => expandAll(root, true);
at("close").onclick = () => expandAll(root, false);
for (const radio of document.getElementsByName("color")) {
  radio.onchange = () => {
    at(`legend${color}`).hidden = true;
    color = Number(radio.value);
    at(`legend${color}`).hidden = false;
    repaint();
  };
}

// ---- the start: as much is open as can be seen at once ------------------------------------------

const ROOM = 160;
fill(root, tree, 1);
let room = ROOM - root.items.length;
for (let layer = [...root.boxes.values()]; layer.length; ) {
  const inner = [];
  for (const b of layer) {
    if (b.like || b.items.length > room) continue;
    room -= b.items.length;
    expand(b, true);
    inner.push(...b.boxes.values());
  }
  layer = inner;
}
at("controls").hidden = false;
if (operations.length === 1) choose(operations[0]);
const first = tree.querySelector("[role=treeitem]");
if (first) focusOn(first, false);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
