// The only functions that write data into the document: as text, or as attributes with fixed names.

export function byId(id) {
  return document.getElementById(id);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function show(node, isShown) {
  node.hidden = !isShown;
}

// Returns a copy of the content of a <template>.
export function copyOf(templateId) {
  return byId(templateId).content.firstElementChild.cloneNode(true);
}

export function part(node, name) {
  return node.querySelector(`[data-part="${name}"]`);
}

// Sets the text of each part; `texts` is by the name of the part.
export function fill(node, texts) {
  for (const [name, text] of Object.entries(texts)) setText(part(node, name), text);
}

export function make(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

// Makes one child for each item, in order. A child stays the same node while its item's key exists, so that a
// focused element keeps the focus.
export function keyed(parent, items, keyOf, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, index) => {
    const key = keyOf(item);
    const node = old.get(key) ?? create(item);
    old.delete(key);
    node.dataset.key = key;
    update(node, item);
    const there = parent.children[index];
    if (there !== node) parent.insertBefore(node, there ?? null);
  });
  for (const node of old.values()) node.remove();
}

// Fills a description list from pairs of a term and its text.
export function describe(list, pairs) {
  keyed(
    list,
    pairs,
    ([term]) => term,
    ([term]) => {
      const pair = document.createElement("div");
      pair.append(make("dt", term), make("dd", ""));
      return pair;
    },
    (pair, [, text]) => setText(pair.lastElementChild, text),
  );
}
