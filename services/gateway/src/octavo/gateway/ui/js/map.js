// The block pool as a map: one cell a block, in the order of their ids.

import { STATES } from "./pool.js";
import { byId, count, element, percent, setText } from "./format.js";
import { colour, css, onTheme } from "./theme.js";

const PITCHES = [20, 18, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2];
const GAP_FROM_PITCH = 4;

export class PoolMap {
  /** `describe(block)`: its line of text. `onPick(block)`: it was clicked, or chosen with Enter. */
  constructor(pool, colours, describe, onPick) {
    Object.assign(this, { pool, colours, describe, onPick });
    this.box = byId("map");
    this.canvas = byId("map-canvas");
    this.cursor = byId("map-cursor");
    this.readout = byId("readout");
    this.legend = byId("legend");
    this.image = null;
    this.small = document.createElement("canvas");
    this.pitch = 0;
    this.columns = 1;
    this.rows = 1;
    this.at = null;
    this.stateShown = null;
    this.members = null;
    this.isLaidOut = false;
    this.items = this.makeLegend();
    onTheme(() => this.repaint());
    new ResizeObserver(() => {
      this.isLaidOut = false;
    }).observe(this.box);
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => this.box.matches(":focus-visible") || this.moveTo(null));
    this.box.addEventListener("click", () => this.at !== null && this.onPick(this.at));
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("focus", () => {
      if (this.box.matches(":focus-visible") && this.at === null && this.pool.numBlocks) this.moveTo(0);
    });
    this.box.addEventListener("blur", () => this.moveTo(null));
  }

  makeLegend() {
    return STATES.map((name, state) => {
      const number = element("span", { class: "num" });
      const button = element(
        "button",
        { type: "button", class: `legend-item ${name}`, "aria-pressed": "false", onclick: () => this.toggle(state) },
        element("span", { class: "swatch", "aria-hidden": "true" }), element("span", { text: name }), number,
      );
      this.legend.append(element("li", {}, button));
      return { name, button, number };
    });
  }

  /** Show the blocks of one state alone, or all again. */
  toggle(state) {
    this.stateShown = this.stateShown === state ? null : state;
    this.items.forEach(({ button }, at) => button.setAttribute("aria-pressed", String(at === this.stateShown)));
    this.repaint();
  }

  /** Show these blocks alone; null: all. */
  highlight(blocks) {
    this.members = blocks && blocks.length ? new Set(blocks) : null;
    this.repaint();
  }

  repaint() {
    this.colours.read();
    this.pool.changed = null;
  }

  /** Draw what has changed. Returns whether anything had. */
  draw() {
    const { pool } = this;
    byId("map-wait").hidden = pool.numBlocks > 0;
    this.canvas.hidden = !pool.numBlocks;
    if (!pool.numBlocks) for (const { number } of this.items) setText(number, "");
    if (!pool.numBlocks || !this.box.clientWidth) return false;
    if (!this.isLaidOut || this.image?.length !== this.columns * this.rows || this.drawnBlocks !== pool.numBlocks) this.layOut();
    const { changed } = pool;
    if (changed && !changed.length) return false;
    if (changed) for (const block of changed) this.image[block] = this.pixel(block);
    else for (let block = 0; block < pool.numBlocks; block += 1) this.image[block] = this.pixel(block);
    pool.changed = [];
    this.paint();
    this.drawLegend();
    if (this.at !== null) this.tell();
    return true;
  }

  pixel(block) {
    const { states, refCounts } = this.pool;
    const isFaded = (this.stateShown !== null && states[block] !== this.stateShown) || (this.members !== null && !this.members.has(block));
    return this.colours.pixel(states[block], refCounts[block], isFaded);
  }

  layOut() {
    const width = this.box.clientWidth;
    const most = Math.max(300, Math.min(540, innerHeight * 0.62));
    const fits = (pitch) => Math.ceil(this.pool.numBlocks / Math.floor(width / pitch)) * pitch <= most;
    this.pitch = PITCHES.find(fits) ?? 1;
    this.columns = Math.max(1, Math.min(Math.floor(width / this.pitch), this.pool.numBlocks));
    this.rows = Math.ceil(this.pool.numBlocks / this.columns);
    this.ratio = Math.max(1, devicePixelRatio);
    Object.assign(this.small, { width: this.columns, height: this.rows });
    this.data = new ImageData(this.columns, this.rows);
    this.image = new Uint32Array(this.data.data.buffer);
    this.canvas.width = this.columns * this.pitch * this.ratio;
    this.canvas.height = this.rows * this.pitch * this.ratio;
    this.canvas.style.width = `${this.columns * this.pitch}px`;
    this.canvas.style.height = `${this.rows * this.pitch}px`;
    this.drawnBlocks = this.pool.numBlocks;
    this.isLaidOut = true;
    this.pool.changed = null;
    this.box.setAttribute("aria-label", `Block pool, ${count(this.pool.numBlocks)} blocks in ${count(this.rows)} rows of ${this.columns}`);
  }

  paint() {
    this.small.getContext("2d").putImageData(this.data, 0, 0);
    const context = this.canvas.getContext("2d");
    const { width, height } = this.canvas;
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, width, height);
    context.drawImage(this.small, 0, 0, width, height);
    if (this.pitch < GAP_FROM_PITCH) return;
    const gap = this.ratio * (this.pitch >= 12 ? 2 : 1);
    const step = this.pitch * this.ratio;
    context.fillStyle = css(colour("sheet"));
    for (let column = 1; column <= this.columns; column += 1) context.fillRect(column * step - gap, 0, gap, height);
    for (let row = 1; row <= this.rows; row += 1) context.fillRect(0, row * step - gap, width, gap);
  }

  drawLegend() {
    const { counts } = this.pool.info;
    for (const { name, number } of this.items) {
      setText(number, `${count(counts[name])}`);
      number.title = percent(counts[name] / this.pool.numBlocks, 1);
    }
  }

  point(event) {
    if (!this.pitch) return;
    const bounds = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - bounds.left) / this.pitch);
    const row = Math.floor((event.clientY - bounds.top) / this.pitch);
    const block = row * this.columns + column;
    const isInside = column >= 0 && column < this.columns && row >= 0 && block < this.pool.numBlocks;
    this.moveTo(isInside ? block : null);
  }

  moveTo(block) {
    this.at = block;
    this.cursor.hidden = block === null;
    if (block === null) {
      setText(this.readout, "Point at a block, or move with the arrow keys.");
      return;
    }
    const { pitch, columns } = this;
    const size = Math.max(pitch, 5) + 4;
    const inset = (size - pitch) / 2;
    const left = this.canvas.offsetLeft + (block % columns) * pitch - inset;
    const top = this.canvas.offsetTop + Math.floor(block / columns) * pitch - inset;
    Object.assign(this.cursor.style, { width: `${size}px`, height: `${size}px`, transform: `translate(${left}px, ${top}px)` });
    this.tell();
  }

  tell() {
    setText(this.readout, this.describe(this.at));
  }

  onKey(event) {
    if (!this.pool.numBlocks) return;
    const last = this.pool.numBlocks - 1;
    const at = this.at ?? 0;
    const page = this.columns * 10;
    const moves = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + this.columns, ArrowUp: at - this.columns,
      PageDown: at + page, PageUp: at - page, Home: 0, End: last,
    };
    if (event.key in moves) this.moveTo(Math.max(0, Math.min(last, moves[event.key])));
    else if (event.key === "Enter" || event.key === " ") this.onPick(at);
    else return;
    event.preventDefault();
  }
}
