// Owns what the page knows of the scheduler: sequences, the last steps and stalls, and requests that ended.

import { quantile } from "./format.js";

const KEPT_S = 130;
const MAX_STEPS = 12_000;
const RATE_WINDOW_S = 3;
export const SEQUENCE_STATES = ["", "waiting", "running", "swapped"];

export class Activity {
  constructor() {
    this.reset();
  }

  reset() {
    this.info = null;
    this.names = new Map();
    this.sequences = new Map();
    this.steps = [];
    this.stalls = [];
    this.ended = [];
    this.totals = [];
    this.offset = null;
    this.version = 0;
  }

  take(message) {
    if (message.is_first) this.reset();
    this.info = message;
    const sample = message.now - performance.now() / 1000;
    this.offset = this.offset === null || Math.abs(sample - this.offset) > 1 ? sample : this.offset + 0.1 * (sample - this.offset);
    for (const [id, request, choice] of message.names) this.names.set(id, { request, choice });
    const [ids, states, tokens, prompts, computed, waits] = message.sequences;
    const present = new Map();
    ids.forEach((id, at) => {
      const name = this.names.get(id);
      present.set(id, {
        id, state: SEQUENCE_STATES[states[at]], tokens: tokens[at], prompt: prompts[at], computed: computed[at],
        waits: message.causes[waits[at]] ?? "", request: name?.request ?? "", choice: name?.choice ?? 0,
      });
    });
    this.sequences = present;
    for (const id of this.names.keys()) if (!present.has(id)) this.names.delete(id);
    for (const [id, launched, ended, compute, idle, rows, tokenCount, prefill] of message.steps) {
      this.steps.push({ id, launched, ended, compute: compute / 1e6, idle: idle / 1e6, rows, tokens: tokenCount, prefill });
    }
    for (const [began, ended, cause] of message.stalls) this.stalls.push({ began, ended, cause });
    for (const [request, at, ttft, decode, output, choices, isFailed] of message.ended) {
      const perChoice = output / Math.max(1, choices);
      this.ended.push({ request, at, ttft, output, isFailed, tpot: perChoice > 1 ? decode / (perChoice - 1) : null });
    }
    this.totals.push({ at: message.now, output: message.totals.output_tokens });
    this.cut(message.now);
    this.version += 1;
  }

  cut(now) {
    const oldest = now - KEPT_S;
    drop(this.steps, (step) => step.ended < oldest);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    drop(this.stalls, (stall) => stall.ended < oldest);
    drop(this.ended, (request) => request.at < oldest);
    drop(this.totals, (total) => total.at < now - RATE_WINDOW_S);
  }

  /** The scheduler's clock, as far as it can be told here. */
  now() {
    return this.offset === null ? 0 : this.offset + performance.now() / 1000;
  }

  /** Output tokens a second, over the last seconds. */
  outputRate() {
    const [first, last] = [this.totals[0], this.totals.at(-1)];
    return first && last.at > first.at ? (last.output - first.output) / (last.at - first.at) : NaN;
  }

  /** Median of a latency ("ttft" or "tpot") over the requests that ended in the last `spanS`. */
  median(name, spanS) {
    const since = this.info ? this.info.now - spanS : 0;
    const values = this.ended.filter((request) => request.at >= since && request[name] !== null && !request.isFailed);
    return quantile(values.map((request) => request[name]).sort((a, b) => a - b), 0.5);
  }
}

function drop(entries, isOld) {
  let old = 0;
  while (old < entries.length && isOld(entries[old])) old += 1;
  if (old) entries.splice(0, old);
}
