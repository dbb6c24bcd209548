// Figures at the top of the live view, and its queues and tiers.

import { byId, compact, count, duration, element, percent, setText } from "./format.js";

const LATENCY_SPAN_S = 30;

const FIGURES = [
  ["used", "Blocks in use"], ["sharing", "Saved by sharing"], ["hits", "Prefix hits"], ["running", "Running"],
  ["waiting", "Waiting"], ["rate", "Output"], ["ttft", "TTFT"], ["tpot", "TPOT"],
];

export class Figures {
  constructor(pool, activity, groups) {
    Object.assign(this, { pool, activity, groups });
    this.cells = {};
    for (const [name, label] of FIGURES) {
      const value = element("dd", { class: "num", text: "–" });
      const about = element("dd", { class: "about" });
      this.cells[name] = { value, about };
      byId("figures").append(element("div", {}, element("dt", { text: label }), value, about));
    }
  }

  set(name, value, about) {
    setText(this.cells[name].value, value);
    setText(this.cells[name].about, about);
  }

  clear() {
    for (const [name] of FIGURES) this.set(name, "–", "");
    setText(byId("pool-about"), "");
  }

  draw() {
    const { pool, activity, groups } = this;
    if (pool.info) {
      const { counts, totals, num_blocks: all, block_size: size } = pool.info;
      this.set("used", percent(counts.active / all), `${compact(counts.active)} of ${compact(all)}`);
      this.set("sharing", compact(pool.numSaved), `blocks; ${compact(pool.numShared)} are shared`);
      const looked = totals.prefix_lookup_tokens;
      this.set("hits", looked ? percent(totals.prefix_hit_tokens / looked) : "–", `of ${compact(looked)} prompt tokens`);
      const group = groups.figures.length > 1 ? `${groups.shownName} · ` : "";
      setText(byId("pool-about"), `${group}${count(all)} blocks of ${size} tokens`);
    }
    if (activity.info) {
      const { queues } = activity.info;
      this.set("running", count(queues.running), queues.max_running ? `of ${count(queues.max_running)} slots` : "");
      this.set("waiting", count(queues.waiting + queues.parked), queues.parked ? `${count(queues.parked)} for a shared prefix` : "in the queue");
      this.set("rate", compact(activity.outputRate()), "tokens/s");
      this.set("ttft", duration(activity.median("ttft", LATENCY_SPAN_S)), "median, last 30 s");
      this.set("tpot", duration(activity.median("tpot", LATENCY_SPAN_S)), "median, last 30 s");
    }
  }
}

export class Places {
  constructor(pool, activity) {
    Object.assign(this, { pool, activity });
    this.box = byId("places");
    this.rows = new Map();
  }

  clear() {
    this.box.replaceChildren();
    this.rows.clear();
    this.about = null;
  }

  draw() {
    const { pool, activity } = this;
    if (activity.info) {
      const { running, waiting, parked, swapped, max_running: slots } = activity.info.queues;
      const most = Math.max(slots, waiting, parked, swapped, 1);
      this.show("running", "Running", running, most, "active", slots ? `${count(running)} of ${count(slots)} slots` : count(running));
      this.show("waiting", "Waiting", waiting, most, "quarantined", count(waiting));
      this.show("parked", "Waiting for a shared prefix", parked, most, "cached", count(parked));
      this.show("swapped", "In host memory", swapped, most, "transferring", count(swapped));
    }
    if (pool.info) {
      const { counts, totals, num_blocks: all } = pool.info;
      const held = all - counts.free;
      const host = counts.host_free + counts.host_swapped + counts.host_cached;
      this.show("device", "Device blocks that hold something", held, all, "active", `${count(held)} of ${count(all)}`);
      if (host) {
        const used = counts.host_swapped + counts.host_cached;
        this.show("host", "Host blocks", used, host, "cached", `${count(used)} of ${count(host)}: ${count(counts.host_swapped)} swapped, ${count(counts.host_cached)} cached`);
      }
      this.note(`Since the KV manager started: ${compact(totals.evictions)} evictions, ${compact(totals.sunk_blocks)} blocks sunk to the host, ${compact(totals.host_hit_tokens)} prompt tokens restored from there, ${compact(totals.swapped_out_blocks)} blocks swapped out and ${compact(totals.swapped_in_blocks)} in.`);
    }
  }

  show(key, label, value, most, colour, text) {
    let row = this.rows.get(key);
    if (!row) {
      row = { fill: element("span", { class: `place-fill ${colour}` }), text: element("span", { class: "num" }) };
      row.box = element("div", { class: "place" }, element("span", { text: label }), row.text, element("span", { class: "place-track", "aria-hidden": "true" }, row.fill));
      this.rows.set(key, row);
      this.box.insertBefore(row.box, this.about ?? null);
    }
    row.fill.style.width = `${(100 * value) / most}%`;
    setText(row.text, text);
  }

  note(text) {
    if (!this.about) {
      this.about = element("p", { class: "about" });
      this.box.append(this.about);
    }
    setText(this.about, text);
  }
}
