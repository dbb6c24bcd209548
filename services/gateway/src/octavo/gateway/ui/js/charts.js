// Drawn figures over time: steps with stalls, latencies, goodput.

import { byId, compact, count, duration, element, percent, quantile, setText } from "./format.js";
import { colour, css, mixed, onTheme } from "./theme.js";

const SPANS_S = [2, 10, 30];
const WINDOW_S = 120;
const BUCKET_S = 4;
const SLO_KEY = "octavo.slo";

/** A canvas that is as sharp as the screen. Returns {context, width, height} in CSS pixels. */
export function prepared(canvas) {
  const ratio = Math.max(1, devicePixelRatio);
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

let inks;
function palette() {
  inks ??= {
    line: css(colour("line")), faint: css(colour("faint")), soft: css(colour("soft")), ink: css(colour("ink")),
    decode: css(colour("active")), prefill: css(mixed(colour("cached"), colour("sheet"), 0.1)),
    stall: css(colour("quarantined")), idle: css(colour("transferring"), 0.7), accent: css(colour("accent")),
    band: css(colour("accent"), 0.16), rest: css(colour("faint"), 0.35),
  };
  return inks;
}
onTheme(() => {
  inks = null;
});

/** Steps narrower than this are drawn together, by columns of the mean. */
const NARROWEST_PX = 2.5;
const COLUMN_PX = 4;

function columns(steps, columnOf) {
  const sums = new Map();
  for (const step of steps) {
    const column = columnOf(step);
    const sum = sums.get(column) ?? { steps: 0, rows: 0, tokens: 0, prefill: 0 };
    sum.steps += 1;
    sum.rows += step.rows;
    sum.tokens += step.tokens;
    sum.prefill += step.prefill;
    sums.set(column, sum);
  }
  return sums;
}

const LABEL_FONT = '11px system-ui, "Segoe UI", sans-serif';

export class StepsChart {
  constructor(activity) {
    this.activity = activity;
    this.canvas = byId("steps-canvas");
    this.readout = byId("steps-readout");
    this.spanS = 10;
    this.pointed = null;
    this.canvas.tabIndex = 0;
    const choices = byId("steps-span");
    for (const spanS of SPANS_S) {
      const radio = element("input", { type: "radio", name: "span", value: spanS, checked: spanS === this.spanS, onchange: () => { this.spanS = spanS; } });
      choices.append(element("label", {}, radio, element("span", { text: `${spanS} s` })));
    }
    this.canvas.addEventListener("pointermove", (event) => {
      this.pointed = this.stepAt(event.offsetX);
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.pointed = null;
    });
    this.canvas.addEventListener("blur", () => {
      this.pointed = null;
    });
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const { steps } = this.activity;
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction || !steps.length) return;
    event.preventDefault();
    const at = this.pointed ? steps.indexOf(this.pointed) + direction : steps.length - 1;
    this.pointed = steps[Math.max(0, Math.min(steps.length - 1, at))];
  }

  stepAt(x) {
    const now = this.end ?? this.activity.now();
    const at = now - this.spanS * (1 - x / this.canvas.clientWidth);
    let nearest = null;
    for (let index = this.activity.steps.length - 1; index >= 0; index -= 1) {
      const step = this.activity.steps[index];
      if (step.ended < at - 0.5) break;
      if (step.ended - step.compute <= at) {
        nearest = step;
        break;
      }
    }
    return nearest;
  }

  draw(isStill) {
    const { context, width, height } = prepared(this.canvas);
    const { activity, spanS } = this;
    const ink = palette();
    const now = isStill ? (activity.info?.now ?? 0) : activity.now() - 0.25;
    this.end = now;
    const begin = now - spanS;
    const lanes = { top: 16, bottom: height - 40, idle: height - 34, stall: height - 24 };
    const x = (at) => ((at - begin) / spanS) * width;
    const shown = [];
    for (let index = activity.steps.length - 1; index >= 0 && activity.steps[index].ended > begin; index -= 1) shown.push(activity.steps[index]);
    const most = Math.max(1, ...shown.map((step) => step.rows));
    const tall = lanes.bottom - lanes.top;
    context.font = LABEL_FONT;
    context.fillStyle = ink.line;
    context.fillRect(0, lanes.bottom, width, 1);
    const bar = (left, wide, rows, prefillShare) => {
      const high = Math.max(2, (tall * rows) / most);
      context.fillStyle = ink.decode;
      context.fillRect(left, lanes.bottom - high, wide, high * (1 - prefillShare));
      context.fillStyle = ink.prefill;
      context.fillRect(left, lanes.bottom - high * prefillShare, wide, high * prefillShare);
    };
    if (shown.length * NARROWEST_PX > width) {
      for (const [column, sum] of columns(shown, (step) => Math.floor(x(step.ended) / COLUMN_PX))) {
        bar(column * COLUMN_PX, COLUMN_PX - 1, sum.rows / sum.steps, sum.prefill / Math.max(1, sum.tokens));
      }
    } else {
      for (const step of shown) {
        const left = x(step.ended - step.compute);
        bar(left, Math.max(1, x(step.ended) - left - 0.6), step.rows, step.prefill / Math.max(1, step.tokens));
      }
    }
    let [busy, idle] = [0, 0];
    for (const step of shown) {
      busy += step.compute;
      idle += Math.min(step.idle, spanS);
      if (step.idle * width > spanS * 0.5) {
        context.fillStyle = ink.idle;
        const to = x(step.ended - step.compute);
        const from = Math.max(0, x(step.ended - step.compute - step.idle));
        context.fillRect(from, lanes.idle, Math.max(1, to - from), 5);
      }
    }
    let stalled = 0;
    let numStalls = 0;
    context.fillStyle = ink.stall;
    for (const stall of activity.stalls) {
      if (stall.ended < begin) continue;
      numStalls += 1;
      stalled += stall.ended - Math.max(begin, stall.began);
      context.fillRect(x(stall.began), lanes.stall, Math.max(2, x(stall.ended) - x(stall.began)), 5);
    }
    if (this.pointed && this.pointed.ended > begin) {
      context.fillStyle = ink.ink;
      context.fillRect(x(this.pointed.ended - this.pointed.compute / 2) - 0.5, lanes.top, 1, lanes.bottom - lanes.top);
    }
    context.fillStyle = ink.faint;
    context.textBaseline = "top";
    context.fillText(`${count(most)} rows`, 0, 0);
    context.textBaseline = "bottom";
    for (let mark = 0; mark <= 4; mark += 1) {
      const text = mark === 4 ? "now" : `−${+(spanS * (1 - mark / 4)).toFixed(1)} s`;
      context.textAlign = mark === 0 ? "left" : mark === 4 ? "right" : "center";
      context.fillText(text, (width * mark) / 4, height);
    }
    context.textAlign = "left";
    this.tell({ busy, idle, stalled, numStalls, shown });
  }

  tell({ busy, idle, stalled, numStalls, shown }) {
    const step = this.pointed;
    if (step) {
      const kind = step.prefill ? `${count(step.tokens)} tokens, ${count(step.prefill)} of prompts` : `${count(step.tokens)} tokens`;
      setText(this.readout, `Step ${count(step.id)}: ${count(step.rows)} rows, ${kind}; computed ${duration(step.compute)}, without a plan ${duration(step.idle)} before, ${duration(step.ended - step.launched)} from plan to result`);
      return;
    }
    const rate = shown.length / this.spanS;
    const stalls = numStalls ? `${count(numStalls)} stalls, ${duration(stalled)}` : "no stalls";
    setText(this.readout, shown.length
      ? `${compact(rate)} steps/s; worker busy ${percent(busy / this.spanS)}, without a plan ${percent(idle / Math.max(busy + idle, 1e-9), 1)} of the time between; ${stalls}`
      : "No steps in this span.");
  }
}

export class LatencyCharts {
  constructor(activity) {
    this.activity = activity;
    const saved = JSON.parse(localStorage.getItem(SLO_KEY) ?? "null") ?? { ttft: 1000, tpot: 50 };
    this.inputs = { ttft: byId("slo-ttft"), tpot: byId("slo-tpot") };
    for (const [name, input] of Object.entries(this.inputs)) {
      input.value = saved[name];
      input.addEventListener("change", () => localStorage.setItem(SLO_KEY, JSON.stringify(this.limits())));
    }
  }

  limits() {
    const read = (input) => (Number(input.value) > 0 ? Number(input.value) : Infinity);
    return { ttft: read(this.inputs.ttft), tpot: read(this.inputs.tpot) };
  }

  draw() {
    const { activity } = this;
    const now = activity.info?.now ?? 0;
    const first = Math.floor((now - WINDOW_S) / BUCKET_S) + 1;
    const buckets = Array.from({ length: WINDOW_S / BUCKET_S }, () => ({ ttft: [], tpot: [], good: 0, all: 0 }));
    const { ttft, tpot } = this.limits();
    let [good, all] = [0, 0];
    for (const request of activity.ended) {
      const bucket = buckets[Math.floor(request.at / BUCKET_S) - first];
      if (!bucket) continue;
      if (request.ttft !== null && !request.isFailed) bucket.ttft.push(request.ttft);
      if (request.tpot !== null && !request.isFailed) bucket.tpot.push(request.tpot);
      const isGood = !request.isFailed && request.ttft !== null && request.ttft * 1000 < ttft && (request.tpot ?? 0) * 1000 < tpot;
      bucket.all += request.output / BUCKET_S;
      all += request.output;
      if (isGood) {
        bucket.good += request.output / BUCKET_S;
        good += request.output;
      }
    }
    for (const name of ["ttft", "tpot"]) {
      const spread = buckets.map((bucket) => {
        const ordered = bucket[name].sort((a, b) => a - b);
        return ordered.length ? [quantile(ordered, 0.5), quantile(ordered, 0.9)] : null;
      });
      drawSpread(byId(`${name}-canvas`), spread, this.limits()[name] / 1000);
      setText(byId(`${name}-now`), duration(activity.median(name, WINDOW_S)));
    }
    drawGoodput(byId("goodput-canvas"), buckets);
    setText(byId("goodput-now"), all ? `${compact(good / WINDOW_S)} tokens/s, ${percent(good / all)}` : "–");
  }
}

function axis(context, width, top, label) {
  const ink = palette();
  context.font = LABEL_FONT;
  context.fillStyle = ink.line;
  context.fillRect(0, top, width, 1);
  context.fillStyle = ink.faint;
  context.textBaseline = "bottom";
  context.fillText(label, 0, top - 2);
}

function drawSpread(canvas, spread, limitS) {
  const { context, width, height } = prepared(canvas);
  const ink = palette();
  const top = 16;
  const bottom = height - 2;
  const most = Math.max(1e-6, ...spread.map((values) => values?.[1] ?? 0));
  const y = (value) => bottom - ((bottom - top) * value) / (most * 1.05);
  const x = (at) => (width * (at + 0.5)) / spread.length;
  axis(context, width, top, duration(most * 1.05));
  context.fillStyle = ink.line;
  context.fillRect(0, bottom, width, 1);
  if (limitS < most * 1.05) {
    context.setLineDash([3, 3]);
    context.strokeStyle = ink.stall;
    context.beginPath();
    context.moveTo(0, y(limitS));
    context.lineTo(width, y(limitS));
    context.stroke();
    context.setLineDash([]);
  }
  for (const run of runs(spread)) {
    context.fillStyle = ink.band;
    context.beginPath();
    run.forEach((at, place) => context[place ? "lineTo" : "moveTo"](x(at), y(spread[at][1])));
    run.toReversed().forEach((at) => context.lineTo(x(at), y(spread[at][0])));
    context.fill();
    context.strokeStyle = ink.accent;
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    run.forEach((at, place) => context[place ? "lineTo" : "moveTo"](x(at), y(spread[at][0])));
    context.stroke();
    if (run.length === 1) {
      context.fillStyle = ink.accent;
      context.fillRect(x(run[0]) - 1.5, y(spread[run[0]][0]) - 1.5, 3, 3);
    }
  }
  context.lineWidth = 1;
}

/** Stretches of places that have values. */
function runs(spread) {
  const found = [];
  spread.forEach((values, at) => {
    if (!values) return;
    if (at && spread[at - 1]) found.at(-1).push(at);
    else found.push([at]);
  });
  return found;
}

function drawGoodput(canvas, buckets) {
  const { context, width, height } = prepared(canvas);
  const ink = palette();
  const top = 16;
  const bottom = height - 2;
  const most = Math.max(1, ...buckets.map((bucket) => bucket.all));
  axis(context, width, top, `${compact(most)} tokens/s`);
  const wide = width / buckets.length;
  buckets.forEach((bucket, at) => {
    const high = ((bottom - top) * bucket.all) / most;
    const goodHigh = ((bottom - top) * bucket.good) / most;
    context.fillStyle = ink.rest;
    context.fillRect(at * wide, bottom - high, wide - 1.5, high - goodHigh);
    context.fillStyle = ink.accent;
    context.fillRect(at * wide, bottom - goodHigh, wide - 1.5, goodHigh);
  });
  context.fillStyle = ink.line;
  context.fillRect(0, bottom, width, 1);
}
