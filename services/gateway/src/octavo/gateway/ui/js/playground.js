// The playground: a conversation with the served model.

import { byId, compact, duration, element, setText } from "./format.js";
import { authorization, refusal } from "./keys.js";
import { TokenView } from "./tokens.js";

const SETTINGS_KEY = "octavo.sampling";
const NUM_ALTERNATIVES = 5;
const STARTERS = ["Explain paged attention to a librarian.", "Write a haiku about memory.", "List three uses for a paper clip."];

/** name, label, kind, and for numbers least, most, step and what an empty field means. */
const FIELDS = [
  { name: "system", label: "System message", kind: "text" },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, unset: "1" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, unset: "1" },
  { name: "top_k", label: "Top k", min: 0, step: 1, unset: "all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, unset: "0" },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, unset: "no limit" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, unset: "0" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, unset: "0" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05, unset: "1" },
  { name: "seed", label: "Seed", step: 1, unset: "random" },
  { name: "stop", label: "Stop string", kind: "line", unset: "none" },
];

export class Playground {
  /** `onWhy(requestId)`. */
  constructor(onWhy) {
    this.onWhy = onWhy;
    this.log = byId("messages");
    this.prompt = byId("prompt");
    this.send = byId("send");
    this.note = byId("composer-note");
    this.welcome = byId("welcome");
    this.history = [];
    this.running = null;
    this.makeControls();
    byId("starters").append(...STARTERS.map((text) => element("button", { type: "button", text, onclick: () => { this.prompt.value = text; this.submit(); } })));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
    byId("new-chat").addEventListener("click", () => this.reset());
    if (matchMedia("(max-width: 1000px)").matches) byId("controls").open = false;
  }

  makeControls() {
    const saved = JSON.parse(localStorage.getItem(SETTINGS_KEY) ?? "{}");
    const form = byId("sampling");
    this.inputs = {};
    for (const field of FIELDS) {
      const id = `field-${field.name}`;
      const isNumber = !field.kind;
      const input = field.kind === "text"
        ? element("textarea", { id, rows: 3, placeholder: "None" })
        : element("input", { id, type: isNumber ? "number" : "text", min: field.min, max: field.max, step: isNumber ? field.step : undefined, placeholder: field.unset, inputmode: isNumber ? "decimal" : undefined });
      input.value = saved[field.name] ?? "";
      this.inputs[field.name] = input;
      form.append(element("label", { class: `field${field.kind === "text" ? " wide" : ""}`, for: id }, element("span", { text: field.label }), input));
    }
    this.probabilities = element("input", { type: "checkbox", id: "probabilities", checked: saved.probabilities ?? true });
    form.append(element("label", { class: "field check", for: "probabilities" }, element("span", { text: "Ask for token probabilities" }), this.probabilities));
    form.append(element("p", { class: "about", text: "An empty field leaves the choice to the server." }));
    form.addEventListener("change", () => {
      const values = Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value]));
      localStorage.setItem(SETTINGS_KEY, JSON.stringify({ ...values, probabilities: this.probabilities.checked }));
    });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  reset() {
    this.running?.abort();
    this.history = [];
    this.log.replaceChildren(this.welcome);
    setText(this.note, "");
    this.prompt.focus();
  }

  body() {
    const values = {};
    for (const { name, kind } of FIELDS) {
      const value = this.inputs[name].value.trim();
      if (value !== "" && name !== "system") values[name] = kind ? value : Number(value);
    }
    const system = this.inputs.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.history];
    const asked = this.probabilities.checked ? { logprobs: true, top_logprobs: NUM_ALTERNATIVES } : {};
    return { ...values, ...asked, messages, stream: true, stream_options: { include_usage: true } };
  }

  async submit() {
    const text = this.prompt.value.trim();
    const invalid = Object.values(this.inputs).find((input) => !input.checkValidity());
    if (invalid) {
      byId("controls").open = true;
      invalid.reportValidity();
      return;
    }
    if (!text) return;
    this.prompt.value = "";
    this.welcome.remove();
    this.history.push({ role: "user", content: text });
    this.log.append(element("div", { class: "message user" }, element("p", { text })));
    const answer = new Answer(this.onWhy);
    this.log.append(answer.box);
    this.running = new AbortController();
    this.setBusy(true);
    try {
      await answer.stream(this.body(), this.running.signal, () => this.follow());
    } finally {
      if (answer.text) this.history.push({ role: "assistant", content: answer.text });
      else this.history.pop();
      this.running = null;
      this.setBusy(false);
      this.follow();
    }
  }

  setBusy(isBusy) {
    setText(this.send, isBusy ? "Stop" : "Send");
    this.send.classList.toggle("is-stop", isBusy);
    this.log.setAttribute("aria-busy", String(isBusy));
  }

  /** Keep the end in sight, unless the reader has scrolled away from it. */
  follow() {
    const { log } = this;
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
  }
}

class Answer {
  constructor(onWhy) {
    this.text = "";
    this.tokens = new TokenView();
    this.plain = element("p", { class: "answer" });
    this.thoughts = element("details", { class: "thoughts", hidden: true }, element("summary", { text: "Reasoning" }), element("p", {}));
    this.facts = element("span", { class: "about num" });
    this.toggle = element("button", { type: "button", class: "quiet", "aria-pressed": "false", text: "Tokens", hidden: true, onclick: () => this.flip() });
    this.why = element("button", { type: "button", class: "quiet", text: "Why?", hidden: true, onclick: () => onWhy(this.requestId) });
    this.key = element("p", { class: "token-key about", hidden: true }, element("span", { text: "likely" }), ...[0, 1, 2, 3, 4, 5].map((at) => element("span", { class: `token p${at}`, "aria-hidden": "true" })), element("span", { text: "surprising" }));
    this.box = element("article", { class: "message assistant", "aria-label": "Answer" }, this.thoughts, this.plain, this.tokens.box, this.key, element("footer", {}, this.facts, this.toggle, this.why));
  }

  flip() {
    const shows = this.tokens.box.hidden;
    this.tokens.box.hidden = this.key.hidden = !shows;
    this.plain.hidden = shows;
    this.toggle.setAttribute("aria-pressed", String(shows));
    setText(this.toggle, shows ? "Text" : "Tokens");
  }

  async stream(body, signal, onGrowth) {
    const began = performance.now();
    let firstAt = null;
    let usage = null;
    let reason = null;
    this.plain.classList.add("is-writing");
    try {
      const response = await fetch("/v1/chat/completions", { method: "POST", signal, body: JSON.stringify(body), headers: { "Content-Type": "application/json", ...authorization("api") } });
      this.requestId = response.headers.get("x-request-id");
      if (!response.ok) throw new Error(await refusal(response));
      for await (const event of events(response.body)) {
        if (event.error) throw new Error(event.error.message);
        usage = event.usage ?? usage;
        const choice = event.choices[0];
        if (!choice) continue;
        reason = choice.finish_reason ?? reason;
        firstAt ??= performance.now();
        this.grow(choice);
        onGrowth();
      }
    } catch (error) {
      if (signal.aborted) reason = "stopped";
      else this.fail(error.message);
    }
    this.plain.classList.remove("is-writing");
    this.why.hidden = !this.requestId || firstAt === null;
    this.tell(began, firstAt, performance.now(), usage, reason);
  }

  grow(choice) {
    const { content, reasoning_content: thought } = choice.delta;
    if (thought) {
      this.thoughts.hidden = false;
      this.thoughts.lastElementChild.append(thought);
    }
    if (content) {
      this.text += content;
      this.plain.append(content);
    }
    if (choice.logprobs?.content?.length) {
      this.tokens.add(choice.logprobs.content);
      this.toggle.hidden = false;
    }
  }

  fail(message) {
    this.box.insertBefore(element("p", { class: "notice", role: "alert", text: message }), this.box.lastElementChild);
  }

  tell(began, firstAt, endedAt, usage, reason) {
    if (firstAt === null) return;
    const parts = [`first token after ${duration((firstAt - began) / 1000)}`];
    if (usage) {
      const number = usage.completion_tokens;
      parts.push(`${number} tokens`);
      if (number > 1) parts.push(`${compact((number - 1) / ((endedAt - firstAt) / 1000))} tokens/s`);
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
    }
    if (reason && reason !== "stop") parts.push(reason === "length" ? "cut at the longest length" : reason);
    setText(this.facts, parts.join(" · "));
  }
}

/** The JSON events of a server-sent event stream. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
