// The live view: takes what the stream brings, and draws at most once a frame what has changed.

import { Activity } from "./activity.js";
import { BlockColours } from "./blockcolours.js";
import { LatencyCharts, StepsChart } from "./charts.js";
import { byId, count, plural, setText } from "./format.js";
import { Groups } from "./groups.js";
import { PoolMap } from "./map.js";
import { Figures, Places } from "./places.js";
import { Pool, STATES } from "./pool.js";
import { PrefixView } from "./prefixes.js";
import { SequenceList } from "./sequences.js";
import { LiveStream } from "./stream.js";
import { movesLittle, onTheme } from "./theme.js";

const SLOW_VIEWS_MS = 1000;
const TEXT_VIEWS_MS = 240;

export class LiveView {
  constructor(onWhy) {
    this.pool = new Pool();
    this.activity = new Activity();
    const colours = new BlockColours();
    this.map = new PoolMap(this.pool, colours, (block) => this.describe(block), (block) => this.pick(block));
    this.list = new SequenceList(this.pool, this.activity, colours, {
      onSelect: (id, blocks) => {
        if (this.prefixes.selected !== null) this.prefixes.clear();
        this.highlight(blocks);
      },
      onWhy,
      onBlock: (block) => this.map.moveTo(block),
    });
    this.prefixes = new PrefixView((blocks) => {
      this.list.clear();
      this.highlight(blocks);
    });
    this.groups = new Groups((group) => location.replace(`#cache/${encodeURIComponent(group)}`));
    this.figures = new Figures(this.pool, this.activity, this.groups);
    this.places = new Places(this.pool, this.activity);
    this.steps = new StepsChart(this.activity);
    this.latency = new LatencyCharts(this.activity);
    this.absences = new Map();
    this.stream = new LiveStream({
      onJson: (message) => this.takeMessage(message),
      onBlocks: (changes) => this.pool.takeBlocks(changes),
      onState: (state, reason) => this.takeState(state, reason),
    });
    this.isShown = false;
    this.drawn = { text: -Infinity, slow: -Infinity, version: -1 };
    onTheme(() => {
      this.drawn.slow = this.drawn.text = -Infinity;
      this.groups.isNew = true;
    });
    document.addEventListener("visibilitychange", () => this.follow());
  }

  /** `group`: the one to show from now on, if it is given. */
  show(isShown, group) {
    this.isShown = isShown;
    if (group !== undefined && group !== this.stream.group) this.choose(group);
    this.follow();
  }

  /** Show another group; empty: the first. */
  choose(group) {
    this.stream.stop();
    this.stream.group = group;
    this.groups.show(group);
    this.absences.clear();
    this.pool.forget();
    this.activity.reset();
    this.prefixes.open.clear();
    for (const part of [this.list, this.prefixes, this.figures, this.places]) part.clear();
    this.highlight(null);
    this.showNotice();
  }

  /** The stream is open while somebody can see the view. */
  follow() {
    if (this.isShown && !document.hidden) {
      this.stream.start();
      if (!this.frame) this.frame = requestAnimationFrame((now) => this.draw(now));
    } else {
      this.stream.stop();
      if (this.frame) cancelAnimationFrame(this.frame);
      this.frame = null;
    }
  }

  restart() {
    this.absences.clear();
    if (this.isShown) this.stream.restart();
  }

  takeMessage(message) {
    if (message.type === "pool") {
      this.absences.delete("kvmanager");
      this.pool.takeInfo(message);
    } else if (message.type === "activity") {
      this.absences.delete("scheduler");
      this.activity.take(message);
    } else if (message.type === "hello") this.groups.show(message.pool_id);
    else if (message.type === "groups") this.groups.take(message);
    else if (message.type === "away") this.absences.set(message.service, message.reason);
    this.showNotice();
  }

  takeState(state, reason) {
    if (state === "unknown") return location.replace("#cache/");
    if (state === "open") this.absences.delete("gateway");
    else this.absences.set("gateway", reason);
    this.showNotice();
  }

  showNotice() {
    const names = { gateway: "Gateway", scheduler: "Scheduler", kvmanager: "KV manager" };
    const text = [...this.absences].map(([service, reason]) => `${names[service]}: ${reason}.`).join(" ");
    const notice = byId("live-notice");
    notice.hidden = !text;
    setText(notice, text);
  }

  draw(now) {
    this.frame = requestAnimationFrame((next) => this.draw(next));
    performance.mark("octavo-draw");
    this.map.draw();
    if (!movesLittle()) this.steps.draw(false);
    this.groups.draw();
    const isNew = this.drawn.version !== this.pool.version + this.activity.version;
    if (isNew && now - this.drawn.text >= TEXT_VIEWS_MS) {
      this.drawn.text = now;
      this.drawn.version = this.pool.version + this.activity.version;
      this.figures.draw();
      this.places.draw();
      this.list.draw();
      if (movesLittle()) this.steps.draw(true);
    } else if (now - this.drawn.slow >= SLOW_VIEWS_MS) {
      this.drawn.slow = now;
      this.latency.draw();
      this.prefixes.draw(this.pool);
    }
    performance.measure("octavo-frame", "octavo-draw");
    if (performance.getEntriesByName("octavo-frame").length > 2000) performance.clearMeasures("octavo-frame");
    performance.clearMarks("octavo-draw");
  }

  highlight(blocks) {
    this.map.highlight(blocks);
  }

  describe(block) {
    const { pool } = this;
    const parts = [`Block ${count(block)}`, STATES[pool.states[block]]];
    const holders = pool.refCounts[block];
    if (holders) parts.push(`held by ${plural(holders, "table")}`);
    parts.push(`generation ${count(pool.generations[block])}`);
    const owners = holders ? pool.ownersOf(block) : [];
    if (owners.length) {
      const first = this.activity.sequences.get(owners[0])?.request;
      const more = owners.length > 1 ? ` and ${owners.length - 1} more` : "";
      parts.push(`owner: sequence ${owners[0]}${first ? ` of ${first}` : ""}${more}`);
    }
    if (pool.isPublished(block)) {
      const parent = pool.parentOf(block);
      parts.push(parent >= 0 ? `findable, after block ${count(parent)}` : parent === -1 ? "findable, first of its prefix" : "its prefix is broken");
    }
    return parts.join(" · ");
  }

  pick(block) {
    const [owner] = this.pool.ownersOf(block);
    if (owner !== undefined) this.list.reveal(owner);
  }
}
