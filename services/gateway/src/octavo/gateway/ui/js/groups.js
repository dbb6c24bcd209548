// All worker groups side by side, and the choice of the one that the rest of the view shows.

import { prepared } from "./charts.js";
import { byId, compact, count, element, percent, plural, setText } from "./format.js";
import { colour, css } from "./theme.js";

const KEPT_S = 120;
const RECENT_S = 60;

/** Share of looked up prompt tokens that were found between two samples; NaN if none were looked up. */
const hitRate = (from, to) => (to.lookup_tokens - from.lookup_tokens > 0 ? (to.hit_tokens - from.hit_tokens) / (to.lookup_tokens - from.lookup_tokens) : NaN);

export class Groups {
  /** `onChoose(pool)`: somebody wants to see that group. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.panel = byId("groups");
    this.list = byId("group-list");
    this.rows = new Map();
    this.figures = [];
    this.shown = "";
    this.isNew = false;
  }

  /** A JSON message of type "groups". */
  take({ groups }) {
    this.figures = groups;
    const now = performance.now() / 1000;
    const named = new Set(groups.map((group) => group.pool_id));
    for (const [pool, row] of this.rows) {
      if (named.has(pool)) continue;
      row.box.remove();
      this.rows.delete(pool);
    }
    for (const group of groups) {
      const row = this.rows.get(group.pool_id) ?? this.makeRow(group.pool_id);
      if (group.lookup_tokens === null) row.samples = [];
      else row.samples.push({ ...group, at: now });
      while (row.samples.length && row.samples[0].at < now - KEPT_S) row.samples.shift();
    }
    this.isNew = true;
  }

  /** The group that the view shows; empty: the first. */
  show(pool) {
    this.shown = pool;
    this.isNew = true;
  }

  get shownName() {
    return this.shown || this.figures[0]?.pool_id || "";
  }

  makeRow(pool) {
    const texts = Object.fromEntries(["state", "running", "waiting", "blocks", "hits", "requests"].map((name) => [name, element("span", { class: "num" })]));
    const bars = Object.fromEntries(["running", "blocks", "requests"].map((name) => [name, element("span", { class: "bar" })]));
    const cell = (name, label, ...rest) => element("span", { class: `cell ${name}` }, element("span", { class: "cell-label", text: label }), texts[name], ...rest);
    const track = (name) => element("span", { class: "track", "aria-hidden": "true" }, bars[name]);
    const spark = element("canvas", { class: "spark", "aria-hidden": "true" });
    const radio = element("input", { type: "radio", name: "group", value: pool, "aria-label": pool, "aria-describedby": `group-${pool}`, onchange: () => this.onChoose(pool) });
    texts.state.className = "group-state";
    const box = element(
      "label",
      { class: "group" },
      radio,
      element("span", { class: "group-name" }, element("span", { class: "mono", text: pool }), texts.state),
      element("span", { class: "group-cells", id: `group-${pool}` },
        cell("running", "Running", track("running")), cell("waiting", "Waiting"), cell("blocks", "Blocks in use", track("blocks")),
        cell("hits", "Prefix hits", spark), cell("requests", "Sent there", track("requests"))),
    );
    const row = { box, radio, texts, bars, spark, samples: [] };
    const after = [...this.rows].find(([other]) => other > pool)?.[1].box ?? null;
    this.rows.set(pool, row);
    this.rows = new Map([...this.rows].sort(([a], [b]) => (a < b ? -1 : 1)));
    this.list.insertBefore(box, after);
    return row;
  }

  draw() {
    if (!this.isNew) return;
    this.isNew = false;
    this.panel.hidden = this.figures.length < 2;
    if (this.panel.hidden) return;
    const sum = (name) => this.figures.reduce((total, group) => total + group[name], 0);
    setText(byId("groups-about"), `${count(sum("running"))} running and ${count(sum("waiting"))} waiting in ${plural(this.figures.length, "group")}`);
    const mostRouted = Math.max(1, ...this.figures.map((group) => group.routed_requests));
    for (const group of this.figures) this.fillRow(this.rows.get(group.pool_id), group, sum("routed_requests"), mostRouted);
  }

  fillRow(row, group, allRouted, mostRouted) {
    const { texts, bars } = row;
    const isReady = !group.why_not_ready;
    row.radio.checked = group.pool_id === this.shownName;
    row.box.classList.toggle("trouble", !isReady);
    setText(texts.state, isReady ? "ready" : group.why_not_ready);
    row.box.title = group.why_not_ready;
    const inUse = group.blocks - group.available_blocks;
    setText(texts.running, group.max_running ? `${count(group.running)} of ${count(group.max_running)}` : count(group.running));
    setText(texts.waiting, group.waiting ? `${count(group.waiting)}, ${compact(group.waiting_tokens)} tokens` : "none");
    setText(texts.blocks, group.blocks ? `${percent(inUse / group.blocks)} of ${compact(group.blocks)}` : "–");
    setText(texts.requests, allRouted ? `${compact(group.routed_requests)}, ${percent(group.routed_requests / allRouted)}` : "none yet");
    bars.running.style.width = `${group.max_running ? (100 * group.running) / group.max_running : 0}%`;
    bars.blocks.style.width = `${group.blocks ? (100 * inUse) / group.blocks : 0}%`;
    bars.requests.style.width = `${(100 * group.routed_requests) / mostRouted}%`;
    const last = row.samples.at(-1);
    const recent = last && hitRate(row.samples.find((sample) => sample.at >= last.at - RECENT_S), last);
    const always = last && hitRate({ hit_tokens: 0, lookup_tokens: 0 }, last);
    setText(texts.hits, last ? percent(Number.isFinite(recent) ? recent : always) : "–");
    drawSpark(row.spark, row.samples);
  }
}

/** The hit rate between each two samples, over the time that is kept. */
function drawSpark(canvas, samples) {
  const { context, width, height } = prepared(canvas);
  const now = samples.at(-1)?.at;
  const points = [];
  samples.forEach((sample, at) => {
    const rate = at ? hitRate(samples[at - 1], sample) : NaN;
    if (Number.isFinite(rate)) points.push([width * (1 - (now - sample.at) / KEPT_S), height - 1.5 - (height - 3) * rate]);
  });
  context.strokeStyle = css(colour("cached"));
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  points.forEach(([x, y], at) => context[at ? "lineTo" : "moveTo"](x, y));
  context.stroke();
}
