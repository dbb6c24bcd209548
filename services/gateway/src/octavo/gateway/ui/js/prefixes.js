// The prefix tree: runs of published blocks without a fork are one node. Built anew at most once a second.

import { NO_PARENT } from "./pool.js";
import { byId, compact, count, element, plural, setText } from "./format.js";

const MAX_ROOTS = 12;
const MAX_CHILDREN = 6;

/** {roots: [{start, length, size, holders, children}], numPublished, numRoots, numBroken}; largest first. */
export function prefixTree(pool) {
  const { numBlocks } = pool;
  const parent = new Int32Array(numBlocks);
  const numChildren = new Int32Array(numBlocks);
  const firstChild = new Int32Array(numBlocks).fill(-1);
  const nextSibling = new Int32Array(numBlocks).fill(-1);
  const roots = [];
  let numPublished = 0;
  let numBroken = 0;
  for (let block = 0; block < numBlocks; block += 1) {
    if (!pool.isPublished(block)) {
      parent[block] = -9;
      continue;
    }
    numPublished += 1;
    parent[block] = pool.parentOf(block);
    if (parent[block] === NO_PARENT) roots.push(block);
    else if (parent[block] < 0) numBroken += 1;
    else {
      numChildren[parent[block]] += 1;
      nextSibling[block] = firstChild[parent[block]];
      firstChild[parent[block]] = block;
    }
  }
  const size = new Int32Array(numBlocks).fill(1);
  const pending = numChildren.slice();
  const ready = [];
  for (let block = 0; block < numBlocks; block += 1) if (parent[block] !== -9 && !pending[block]) ready.push(block);
  while (ready.length) {
    const block = ready.pop();
    const above = parent[block];
    if (above < 0) continue;
    size[above] += size[block];
    if (!--pending[above]) ready.push(above);
  }
  const largestFirst = (a, b) => size[b] - size[a];
  const childrenOf = (block) => {
    const found = [];
    for (let child = firstChild[block]; child >= 0; child = nextSibling[child]) found.push(child);
    return found.sort(largestFirst);
  };
  const nodeAt = (start) => {
    let end = start;
    let length = 1;
    const blocks = [start];
    while (numChildren[end] === 1) {
      end = firstChild[end];
      length += 1;
      blocks.push(end);
    }
    return {
      start, length, blocks, size: size[start], holders: pool.refCounts[end], numChildren: numChildren[end],
      children: () => childrenOf(end).map(nodeAt),
    };
  };
  roots.sort(largestFirst);
  return { roots: roots.slice(0, MAX_ROOTS).map(nodeAt), numRoots: roots.length, numPublished, numBroken };
}

export class PrefixView {
  /** `onSelect(blocks)`: a run was chosen; null: none. */
  constructor(onSelect) {
    this.tree = byId("prefix-tree");
    this.about = byId("prefixes-about");
    this.onSelect = onSelect;
    this.open = new Set();
    this.focused = null;
    this.selected = null;
    this.rows = [];
    this.tree.addEventListener("keydown", (event) => this.onKey(event));
    this.tree.addEventListener("click", (event) => {
      const row = event.target.closest("[data-start]");
      if (row) this.choose(Number(row.dataset.start), true);
    });
    this.tree.addEventListener("focusin", (event) => {
      const row = event.target.closest("[data-start]");
      if (row) this.focused = Number(row.dataset.start);
    });
  }

  draw(pool) {
    this.pool = pool;
    const tree = prefixTree(pool);
    const shown = tree.numRoots > tree.roots.length ? `, the ${tree.roots.length} largest` : "";
    const broken = tree.numBroken ? `; ${plural(tree.numBroken, "block")} behind an evicted one` : "";
    setText(this.about, `${plural(tree.numPublished, "block")} findable in ${plural(tree.numRoots, "prefix", "prefixes")}${shown}${broken}`);
    this.rows = [];
    for (const root of tree.roots) this.list(root, 1);
    const largest = tree.roots[0]?.size ?? 1;
    const had = this.tree.contains(document.activeElement);
    if (!this.rows.some((row) => row.node.start === this.focused)) this.focused = this.rows[0]?.node.start ?? null;
    this.tree.replaceChildren(...this.rows.map((row) => this.row(row, largest)));
    if (!this.rows.length) this.tree.append(element("p", { class: "about", text: "No block can be found by its hash yet." }));
    if (had) this.tree.querySelector('[tabindex="0"]')?.focus({ preventScroll: true });
  }

  list(node, level) {
    this.rows.push({ node, level });
    if (!this.open.has(node.start) || !node.numChildren) return;
    for (const child of node.children().slice(0, MAX_CHILDREN)) this.list(child, level + 1);
  }

  row({ node, level }, largest) {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${Math.max(1.5, (100 * node.size) / largest)}%`;
    bar.classList.toggle("held", node.holders > 0);
    const label = node.length > 1 ? `${count(node.length)} blocks from ${node.start}` : `block ${node.start}`;
    const forks = node.numChildren ? `${compact(node.size)} in ${plural(node.numChildren, "branch", "branches")}` : "";
    const made = element(
      "div",
      {
        class: "prefix", role: "treeitem", "data-start": node.start, "aria-level": level,
        "aria-expanded": node.numChildren ? String(this.open.has(node.start)) : undefined,
        "aria-selected": String(this.selected === node.start),
        tabindex: node.start === this.focused ? "0" : "-1",
      },
      element("span", { class: "twist", "aria-hidden": "true", text: node.numChildren ? (this.open.has(node.start) ? "▾" : "▸") : "" }),
      element("span", { class: "prefix-label", text: label }),
      element("span", { class: "prefix-track", "aria-hidden": "true" }, bar),
      element("span", { class: "prefix-held num", text: node.holders ? `held by ${count(node.holders)}` : "cached" }),
      element("span", { class: "prefix-forks num", text: forks }),
    );
    made.style.setProperty("--level", level - 1);
    return made;
  }

  choose(start, toggles) {
    const row = this.rows.find((candidate) => candidate.node.start === start);
    if (!row) return;
    this.focused = start;
    const isNew = this.selected !== start;
    this.selected = isNew ? start : null;
    if (toggles && row.node.numChildren) {
      if (this.open.has(start) && !isNew) this.open.delete(start);
      else this.open.add(start);
    }
    this.onSelect(isNew ? row.node.blocks : null);
    this.draw(this.pool);
  }

  clear() {
    this.selected = null;
    if (this.pool) this.draw(this.pool);
  }

  onKey(event) {
    const at = this.rows.findIndex((row) => row.node.start === this.focused);
    if (at < 0) return;
    const { node, level } = this.rows[at];
    let to = at;
    if (event.key === "ArrowDown") to = Math.min(at + 1, this.rows.length - 1);
    else if (event.key === "ArrowUp") to = Math.max(at - 1, 0);
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = this.rows.length - 1;
    else if (event.key === "ArrowRight" && node.numChildren) this.open.add(node.start);
    else if (event.key === "ArrowLeft" && this.open.has(node.start)) this.open.delete(node.start);
    else if (event.key === "ArrowLeft") while (to > 0 && this.rows[to].level >= level) to -= 1;
    else if (event.key === "Enter" || event.key === " ") this.choose(node.start, false);
    else return;
    event.preventDefault();
    this.focused = this.rows[to].node.start;
    this.draw(this.pool);
    this.tree.querySelector('[tabindex="0"]')?.focus();
  }
}
