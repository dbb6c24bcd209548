// Tells people what the record of a request says: why it waited, what the cache had, what preemption cost.

import { byId, count, duration, element, percent, plural, words } from "./format.js";
import { authorization, refusal } from "./keys.js";

const MEANINGS = {
  behind_others: "others were before it in the queue",
  no_slot: "as many sequences ran as may",
  prefill_backlog: "prompts that held blocks already filled the steps",
  kv_answer: "the KV manager was asked for its blocks",
  no_blocks: "too few blocks were left in the pool",
  in_flight_prefix: "another sequence was computing its next block",
  hashing: "its prompt was being hashed",
  no_credit: "its row sat out for want of one more block",
  swapped: "its blocks were in host memory",
  pool_lost: "the worker or the KV manager was away",
  hit_device: "found on the device",
  hit_host: "found in host memory",
  never_stored: "never seen before",
  evicted: "seen before, evicted since",
  flushed: "seen before, flushed since",
  in_flight: "being computed by another sequence",
  other_salt: "there under another salt",
  other_adapter: "there for another adapter",
  last_token: "found, computed again for its last token",
  slower_tier: "in host memory, and faster to compute",
  tail_not_full: "the last block, not full",
  unexplained: "not found, without a reason given",
};

export class WhyPanel {
  constructor() {
    this.dialog = byId("why");
    this.body = byId("why-body");
  }

  async show(requestId) {
    this.body.replaceChildren(element("p", { class: "about", text: "Asking the scheduler…" }));
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const explanation = await explain(requestId);
      this.body.replaceChildren(element("p", { class: "mono why-id", text: explanation.id }), ...explanation.prompts.map(prompt));
    } catch (error) {
      this.body.replaceChildren(element("p", { class: "notice", text: error.message }));
    }
  }
}

/** As an operator if that is allowed, else as a client. */
async function explain(requestId) {
  const id = encodeURIComponent(requestId);
  let response = await fetch(`api/requests/${id}/why`, { headers: authorization("admin") });
  if (!response.ok) {
    response = await fetch(`/v1/requests/${id}/why`, { headers: authorization("api") });
  }
  if (!response.ok) throw new Error(await refusal(response));
  return response.json();
}

function prompt(record) {
  const facts = [
    ["state", record.error ? `failed: ${record.error.message}` : record.state],
    ["prompt", plural(record.num_prompt_tokens, "token")],
    ["first token", record.first_token_s === null ? "not yet" : `after ${duration(record.first_token_s)}`],
    ["ended", record.ended_s === null ? "not yet" : `after ${duration(record.ended_s)}`],
  ];
  return element(
    "section",
    { class: "why-prompt" },
    element("dl", { class: "facts" }, ...facts.flatMap(([name, text]) => [element("dt", { text: name }), element("dd", { text })])),
    ...record.sequences.map((sequence) => choice(sequence, record)),
    record.num_unlisted_sequences ? element("p", { class: "about", text: `and ${plural(record.num_unlisted_sequences, "more sequence")}` }) : null,
  );
}

function choice(sequence, record) {
  const waits = Object.entries(sequence.waited_s).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
  const longest = waits[0]?.[1] ?? 1;
  const title = record.num_choices > 1 || record.sequences.length > 1 ? `Choice ${sequence.choice_index}` : null;
  return element(
    "div",
    { class: "why-choice" },
    title ? element("h3", { text: title }) : null,
    element("h4", { text: "Why it waited" }),
    waits.length
      ? element("ul", { class: "why-list" }, ...waits.map(([cause, seconds]) => line(cause, duration(seconds), seconds / longest)))
      : element("p", { class: "about", text: "It did not wait." }),
    sequence.waits_for ? element("p", { class: "about", text: `It waits now: ${MEANINGS[sequence.waits_for] ?? words(sequence.waits_for)}.` }) : null,
    ...sequence.admissions.flatMap(admission),
    element("h4", { text: "Preemptions" }),
    sequence.preemptions.length
      ? element("ul", { class: "why-list" }, ...sequence.preemptions.map(preemption))
      : element("p", { class: "about", text: "None: nothing was taken from it." }),
    sequence.finish_reason ? element("p", { class: "about", text: `It ended by: ${sequence.finish_reason}.` }) : null,
  );
}

function line(name, value, share) {
  const bar = element("span", { class: "why-bar", "aria-hidden": "true" });
  bar.style.width = `${Math.max(1, 100 * share)}%`;
  return element("li", {}, element("span", { text: MEANINGS[name] ?? words(name) }), element("span", { class: "num", text: value }), bar);
}

function admission(record) {
  const outcomes = Object.entries(record.blocks).sort((a, b) => b[1] - a[1]);
  const hits = (record.blocks.hit_device ?? 0) + (record.blocks.hit_host ?? 0);
  const cost = record.block_copy_s === undefined ? null : `A block took ${duration(record.block_copy_s)} to copy and ${duration(record.block_compute_s)} to compute.`;
  const evictors = record.evicted_by ? `Evicted for ${record.evicted_by.join(", ")}.` : null;
  return [
    element("h4", { text: `Blocks it got, ${duration(record.at_s)} after it came` }),
    element("p", { class: "about", text: `${count(hits)} of ${plural(record.num_blocks, "block")} found in the cache (${percent(hits / Math.max(1, record.num_blocks))})` }),
    element("ul", { class: "why-list" }, ...outcomes.map(([outcome, number]) => line(outcome, count(number), number / record.num_blocks))),
    cost || evictors ? element("p", { class: "about", text: [cost, evictors].filter(Boolean).join(" ") }) : null,
  ];
}

function preemption(record) {
  const back = record.back_after_s === null ? "not back yet" : `back after ${duration(record.back_after_s)}`;
  const cost = record.cost_s === null ? "" : `, which cost ${duration(record.cost_s)}`;
  const again = record.num_tokens_computed_again ? `; ${plural(record.num_tokens_computed_again, "token")} computed again` : "";
  return element("li", {}, element("span", { text: `${words(record.why)}, by ${record.kind}, ${duration(record.at_s)} after it came: ${plural(record.num_blocks, "block")}${again}${cost}; ${back}` }));
}
