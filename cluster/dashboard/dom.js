// The only ways in which data gets into the document: as text, and as attributes with fixed names.

export function byId(id) {
  return document.getElementById(id);
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function show(node, isShown) {
  node.hidden = !isShown;
}

// A new copy of what stands in a <template>.
export function copyOf(templateId) {
  return byId(templateId).content.firstElementChild.cloneNode(true);
}

export function part(node, name) {
  return node.querySelector(`[data-part="${name}"]`);
}

// `texts`: what each part shall say.
export function fill(node, texts) {
  for (const [name, text] of Object.entries(texts)) say(part(node, name), text);
}

export function make(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

// One child for each item, in their order. A child stays the same node as long as its item's key is there,
// so that what has the focus keeps it.
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

// Pairs of a term and what it says.
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
    (pair, [, text]) => say(pair.lastElementChild, text),
  );
}
