// The list of sequences, and the block table of the one that is chosen. Only rows in sight are in the page.

import { byId, compact, count, element, plural, setText, words } from "./format.js";

const ROW_PX = 36;
const NOTHING_CHOSEN = "Choose a sequence to see its block table, on its own and in the pool.";

export class SequenceList {
  /** `onSelect(id, blocks)`: it was chosen, or its table has changed; (null, null): none is. `onWhy(requestId)`. `onBlock(block)`: pointed at. */
  constructor(pool, activity, colours, { onSelect, onWhy, onBlock }) {
    Object.assign(this, { pool, activity, colours, onSelect, onWhy, onBlock });
    this.list = byId("sequence-list");
    this.inner = this.list.firstElementChild;
    this.find = byId("find");
    this.detail = byId("sequence-detail");
    this.rows = new Map();
    this.entries = [];
    this.selected = null;
    this.active = null;
    this.list.addEventListener("scroll", () => this.drawRows(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.find.addEventListener("input", () => this.draw());
    this.makeDetail();
  }

  collect() {
    const wanted = this.find.value.trim().toLowerCase();
    const entries = [...this.activity.sequences.values()];
    for (const id of this.pool.tables.keys()) {
      if (!this.activity.sequences.has(id)) entries.push({ id, state: "kept", tokens: null, computed: null, waits: "", request: "", choice: 0 });
    }
    const rank = { running: 0, swapped: 1, waiting: 2, kept: 3 };
    return entries
      .filter((entry) => !wanted || entry.request.toLowerCase().includes(wanted) || String(entry.id) === wanted)
      .sort((a, b) => rank[a.state] - rank[b.state] || a.id - b.id);
  }

  draw() {
    this.entries = this.collect();
    this.inner.style.height = `${Math.max(1, this.entries.length) * ROW_PX}px`;
    this.drawRows();
    this.drawDetail();
  }

  drawRows() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW_PX) - 2);
    const last = Math.min(this.entries.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / ROW_PX) + 2);
    const seen = new Set();
    for (let at = first; at < last; at += 1) {
      const entry = this.entries[at];
      seen.add(entry.id);
      let row = this.rows.get(entry.id);
      if (!row) {
        row = this.makeRow(entry.id);
        this.rows.set(entry.id, row);
        this.inner.append(row.box);
      }
      this.fillRow(row, entry, at);
    }
    for (const [id, row] of this.rows) {
      if (seen.has(id)) continue;
      row.box.remove();
      this.rows.delete(id);
    }
    if (this.empty) this.empty.hidden = this.entries.length > 0;
    else {
      this.empty = element("p", { class: "about list-empty", text: "No sequence is alive." });
      this.list.append(this.empty);
    }
    setText(this.empty, this.find.value ? "No sequence of that request is alive." : "No sequence is alive.");
    const activeRow = this.rows.get(this.active);
    if (activeRow) this.list.setAttribute("aria-activedescendant", activeRow.box.id);
    else this.list.removeAttribute("aria-activedescendant");
  }

  makeRow(id) {
    const row = { name: element("span", { class: "row-name mono" }), state: element("span", { class: "row-state" }), bar: element("span", { class: "row-fill" }), tokens: element("span", { class: "num" }), blocks: element("span", { class: "num row-blocks" }) };
    row.box = element(
      "div",
      { class: "row", role: "option", id: `sequence-${id}`, onclick: () => this.choose(id) },
      element("span", { class: "row-who" }, row.name, row.state),
      element("span", { class: "row-tokens" }, row.tokens, element("span", { class: "row-track", "aria-hidden": "true" }, row.bar)),
      row.blocks,
    );
    return row;
  }

  fillRow(row, entry, at) {
    row.box.style.transform = `translateY(${at * ROW_PX}px)`;
    row.box.setAttribute("aria-posinset", at + 1);
    row.box.setAttribute("aria-setsize", this.entries.length);
    row.box.setAttribute("aria-selected", String(this.selected === entry.id));
    row.box.classList.toggle("is-active", this.active === entry.id);
    setText(row.name, this.nameOf(entry));
    setText(row.state, entry.waits ? words(entry.waits) : entry.state);
    row.box.dataset.state = entry.state;
    setText(row.tokens, entry.tokens === null ? "" : `${compact(entry.computed)} / ${compact(entry.tokens)}`);
    row.bar.style.width = entry.tokens ? `${(100 * entry.computed) / entry.tokens}%` : "0";
    setText(row.blocks, compact(this.pool.tables.get(entry.id)?.blocks.length ?? 0));
  }

  nameOf(entry) {
    if (!entry.request) return `sequence ${entry.id}`;
    const choice = entry.choice ? ` #${entry.choice}` : "";
    const id = entry.request;
    return (id.length > 20 ? `${id.slice(0, 9)}…${id.slice(-8)}` : id) + choice;
  }

  choose(id) {
    this.active = id;
    this.selected = this.selected === id ? null : id;
    this.shownBlocks = null;
    this.draw();
    if (this.selected === null) this.onSelect(null, null);
  }

  /** Choose it, and bring it in sight. */
  reveal(id) {
    if (this.selected !== id) this.choose(id);
    const at = this.entries.findIndex((entry) => entry.id === id);
    if (at >= 0) this.list.scrollTop = Math.max(0, at * ROW_PX - this.list.clientHeight / 2);
  }

  clear() {
    this.selected = null;
    this.draw();
  }

  onKey(event) {
    const at = this.entries.findIndex((entry) => entry.id === this.active);
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW_PX) - 1);
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.entries.length - 1 };
    if (event.key in moves && this.entries.length) {
      const to = Math.max(0, Math.min(this.entries.length - 1, moves[event.key]));
      this.active = this.entries[to].id;
      const top = to * ROW_PX;
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      else if (top + ROW_PX > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW_PX - this.list.clientHeight;
      this.drawRows();
    } else if ((event.key === "Enter" || event.key === " ") && at >= 0) this.choose(this.active);
    else if (event.key === "Escape" && this.selected !== null) this.choose(this.selected);
    else return;
    event.preventDefault();
  }

  // The chosen one.

  makeDetail() {
    this.title = element("p", { class: "detail-title mono" });
    this.text = element("p", { class: "about" });
    this.why = element("button", { type: "button", text: "Why?", onclick: () => this.onWhy(this.shownRequest) });
    this.table = element("canvas", { class: "table-canvas", role: "img", "aria-label": "Block table" });
    this.ids = element("p", { class: "mono ids" });
    this.about = element("p", { class: "about", text: NOTHING_CHOSEN });
    this.chosen = element("div", { class: "chosen", hidden: true }, element("div", { class: "detail-head" }, this.title, this.why), this.text, this.table, element("details", {}, element("summary", { class: "about", text: "Block ids in order" }), this.ids));
    this.detail.append(this.about, this.chosen);
    this.table.addEventListener("pointermove", (event) => {
      const place = Math.floor(event.offsetY / this.cell) * this.perRow + Math.floor(event.offsetX / this.cell);
      const block = this.shownBlocks?.[place];
      if (block !== undefined) this.onBlock(block);
    });
    this.table.addEventListener("pointerleave", () => this.onBlock(null));
  }

  drawDetail() {
    const entry = this.selected === null ? null : this.entries.find((one) => one.id === this.selected);
    const table = this.pool.tables.get(this.selected);
    this.about.hidden = Boolean(entry || table);
    this.chosen.hidden = !(entry || table);
    if (this.chosen.hidden) {
      setText(this.about, this.selected === null ? NOTHING_CHOSEN : "The sequence has ended.");
      if (this.selected !== null && this.shownBlocks) this.onSelect(null, null);
      this.shownBlocks = null;
      return;
    }
    const blocks = table?.blocks ?? [];
    if (blocks !== this.shownBlocks) this.onSelect(this.selected, blocks);
    this.shownBlocks = blocks;
    this.shownRequest = entry?.request ?? "";
    this.why.hidden = !this.shownRequest;
    setText(this.title, this.shownRequest || `sequence ${this.selected}`);
    const numShared = blocks.reduce((sum, block) => sum + (this.pool.refCounts[block] > 1), 0);
    const parts = [`Sequence ${this.selected}`];
    if (entry?.tokens) parts.push(`${count(entry.prompt)} prompt and ${plural(entry.tokens - entry.prompt, "output token")}`);
    parts.push(plural(blocks.length, "block"), `${count(numShared)} shared`);
    if (table) parts.push(`${count(Math.min(table.published, blocks.length))} published`);
    setText(this.text, parts.join(" · "));
    setText(this.ids, blocks.length > 400 ? `${blocks.slice(0, 400).join(" ")} … ${count(blocks.length - 400)} more` : blocks.join(" "));
    this.table.setAttribute("aria-label", `Block table of ${plural(blocks.length, "block")}, ${count(numShared)} shared`);
    this.drawTable(blocks);
  }

  drawTable(blocks) {
    const width = this.table.parentElement.clientWidth;
    this.cell = blocks.length > 600 ? 6 : blocks.length > 200 ? 9 : 13;
    this.perRow = Math.max(1, Math.floor(width / this.cell));
    const ratio = Math.max(1, devicePixelRatio);
    const height = Math.max(1, Math.min(Math.ceil(blocks.length / this.perRow), 60)) * this.cell;
    Object.assign(this.table, { width: width * ratio, height: height * ratio });
    this.table.style.width = `${width}px`;
    this.table.style.height = `${height}px`;
    const context = this.table.getContext("2d");
    context.scale(ratio, ratio);
    const side = this.cell - (this.cell > 6 ? 2 : 1);
    blocks.forEach((block, place) => {
      const state = this.pool.states[block];
      context.fillStyle = this.colours.css(state, this.pool.refCounts[block]);
      context.fillRect((place % this.perRow) * this.cell, Math.floor(place / this.perRow) * this.cell, side, side);
    });
  }
}
