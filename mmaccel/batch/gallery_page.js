"use strict";
// Only the cards in sight are in the page; texts are set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const grid = at("grid"), room = at("room"), dialog = at("details");
const WIDTH = data.sides.length > 1 ? 330 : 212, HEIGHT = 258, GAP = 10, EDGE = 14;
let found = data.items.map((_, k) => k);
let columns = 1, current = 0;
const cards = new Map();

for (const name of data.policies) at("policy").add(new Option(name, name));
at("pairs").hidden = data.sides.length < 2;
if (data.failed.length) {
  at("failures").hidden = false;
  at("failures").firstElementChild.textContent = data.failed.length + " failed";
  for (const text of data.failed) at("failures").lastElementChild.append(element("li", "", text));
}

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function picture(side, alt) {
  const image = element("img");
  image.loading = "lazy";
  image.decoding = "async";
  image.src = side.src;
  image.alt = alt;
  return image;
}

function filter() {
  const words = at("prompt").value.toLowerCase().split(/\s+/).filter(Boolean);
  const seed = at("seed").value.trim(), policy = at("policy").value, unlike = at("unlike").checked;
  found = [];
  data.items.forEach((item, k) => {
    const prompt = item.prompt.toLowerCase();
    if (!words.every((word) => prompt.includes(word))) return;
    if (seed && !item.seed.startsWith(seed)) return;
    if (policy && !item.sides.some((side) => side && side.policy === policy)) return;
    if (unlike && !item.differs) return;
    found.push(k);
  });
  current = 0;
  grid.scrollTop = 0;
  clear();
  layout();
  at("count").value = found.length + " of " + data.items.length;
}

function clear() {
  for (const card of cards.values()) card.remove();
  cards.clear();
}

function layout() {
  const before = columns;
  columns = Math.max(1, Math.floor((grid.clientWidth - 2 * EDGE + GAP) / (WIDTH + GAP)));
  if (columns !== before) clear();
  room.style.height = 2 * EDGE + Math.ceil(found.length / columns) * (HEIGHT + GAP) + "px";
  draw();
}

function draw() {
  const line = HEIGHT + GAP;
  const first = Math.max(0, Math.floor(grid.scrollTop / line) - 2) * columns;
  const last = Math.min(found.length, (Math.ceil((grid.scrollTop + grid.clientHeight) / line) + 2) * columns);
  for (const [place, card] of cards)
    if (place < first || place >= last) { card.remove(); cards.delete(place); }
  for (let place = first; place < last; place++) if (!cards.has(place)) add(place);
}

function add(place) {
  const item = data.items[found[place]], card = element("button", "card");
  card.type = "button";
  card.dataset.place = place;
  card.tabIndex = place === current ? 0 : -1;
  card.style.cssText = `left:${EDGE + (place % columns) * (WIDTH + GAP)}px;top:${EDGE + Math.floor(place / columns) * (HEIGHT + GAP)}px;width:${WIDTH}px;height:${HEIGHT}px`;
  const images = element("div", "images");
  for (const side of item.sides) if (side) images.append(picture(side, item.prompt));
  card.append(images, element("div", "text", item.prompt), element("div", "small", item.name + ", seed " + item.seed));
  cards.set(place, card);
  room.append(card);
}

function go(place) {
  if (!found.length) return;
  const old = cards.get(current);
  if (old) old.tabIndex = -1;
  current = Math.min(found.length - 1, Math.max(0, place));
  const top = EDGE + Math.floor(current / columns) * (HEIGHT + GAP);
  if (top < grid.scrollTop + EDGE) grid.scrollTop = top - EDGE;
  const bottom = top + HEIGHT + EDGE;
  if (bottom > grid.scrollTop + grid.clientHeight) grid.scrollTop = bottom - grid.clientHeight;
  draw();
  const card = cards.get(current);
  card.tabIndex = 0;
  card.focus({ preventScroll: true });
}

function show(place) {
  const item = data.items[found[place]];
  at("caption").textContent = item.prompt;
  at("shown").replaceChildren();
  at("facts").replaceChildren();
  const names = new Set();
  item.sides.forEach((side, k) => {
    if (!side) return;
    const figure = element("figure"), link = element("a", "", side.file);
    link.href = side.src;
    link.target = "_blank";
    const caption = element("figcaption", "", data.sides.length > 1 ? data.sides[k] + ": " : "");
    caption.append(link);
    figure.append(picture(side, item.prompt), caption);
    at("shown").append(figure);
    Object.keys(side.facts).forEach((name) => names.add(name));
  });
  for (const name of names) {
    const row = element("tr");
    row.append(element("th", "", name.replaceAll("_", " ")));
    for (const side of item.sides) {
      const value = side ? side.facts[name] : undefined;
      row.append(element("td", "", value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value)));
    }
    at("facts").append(row);
  }
  if (!dialog.open) dialog.showModal();
}

grid.addEventListener("scroll", draw, { passive: true });
new ResizeObserver(layout).observe(grid);
for (const name of ["prompt", "seed"]) at(name).addEventListener("input", filter);
for (const name of ["policy", "unlike"]) at(name).addEventListener("change", filter);
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("filters").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.target.type !== "search") return;
  event.preventDefault();
  go(0);
});
at("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => go(current));
room.addEventListener("click", (event) => {
  const card = event.target.closest(".card");
  if (card) { go(+card.dataset.place); show(current); }
});
dialog.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  go(current + step);
  show(current);
});
room.addEventListener("keydown", (event) => {
  const page = Math.max(1, Math.floor(grid.clientHeight / (HEIGHT + GAP))) * columns;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  go(current + step);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || dialog.open || event.target.matches("input, select")) return;
  event.preventDefault();
  at("prompt").focus();
});
filter();
