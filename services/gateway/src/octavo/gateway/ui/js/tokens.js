// An answer token by token: colour by probability, alternatives on hover and focus.

import { byId, element } from "./format.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1, 0.02];

/** 0 for a token that was nearly certain, 5 for a surprise. */
export function level(probability) {
  const at = LEVELS.findIndex((least) => probability >= least);
  return at < 0 ? LEVELS.length : at;
}

const shown = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

function probabilityText(probability) {
  if (probability >= 0.9995) return "100 %";
  return probability >= 0.001 ? `${(probability * 100).toFixed(1)} %` : "< 0.1 %";
}

const decoder = new TextDecoder();

/** The text of a token: of its bytes, if they are whole characters. */
function textOf(entry) {
  return entry.token || (entry.bytes ? decoder.decode(new Uint8Array(entry.bytes)) : "");
}

export class TokenView {
  constructor() {
    this.box = element("div", { class: "tokens", role: "group", "aria-label": "Tokens; arrow keys move between them", hidden: true });
    this.entries = [];
    this.at = 0;
    this.card = byId("token-card");
    this.box.addEventListener("pointerover", (event) => this.onPoint(event));
    this.box.addEventListener("pointerleave", () => this.hide());
    this.box.addEventListener("focusin", (event) => this.onPoint(event));
    this.box.addEventListener("focusout", () => this.hide());
    this.box.addEventListener("keydown", (event) => this.onKey(event));
  }

  add(entries) {
    for (const entry of entries) {
      const at = this.entries.length;
      this.entries.push(entry);
      const probability = Math.exp(entry.logprob);
      const text = textOf(entry);
      const span = element("span", {
        class: `token p${level(probability)}`, tabindex: at ? "-1" : "0", "data-at": at, role: "img",
        "aria-label": `${shown(text)}, ${probabilityText(probability)}`, text: text.replaceAll("\n", "↵\n"),
      });
      this.box.append(span);
    }
  }

  onPoint(event) {
    const span = event.target.closest("[data-at]");
    if (span) this.show(span);
    else this.hide();
  }

  onKey(event) {
    const moves = { ArrowRight: this.at + 1, ArrowDown: this.at + 1, ArrowLeft: this.at - 1, ArrowUp: this.at - 1, Home: 0, End: this.entries.length - 1 };
    if (event.key === "Escape") this.hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.box.children[this.at]?.setAttribute("tabindex", "-1");
    this.at = Math.max(0, Math.min(this.entries.length - 1, moves[event.key]));
    const span = this.box.children[this.at];
    span.setAttribute("tabindex", "0");
    span.focus();
  }

  show(span) {
    this.at = Number(span.dataset.at);
    const entry = this.entries[this.at];
    const rows = [...(entry.top_logprobs ?? [])].sort((a, b) => b.logprob - a.logprob);
    if (!rows.some((row) => row.token === entry.token && row.logprob === entry.logprob)) rows.push(entry);
    this.card.replaceChildren(
      element("p", { class: "about", text: `Token ${this.at + 1} of ${this.entries.length}` }),
      ...rows.map((row) => {
        const probability = Math.exp(row.logprob);
        const bar = element("span", { class: "token-bar" });
        bar.style.width = `${Math.max(0.5, 100 * probability)}%`;
        const isChosen = row.token === entry.token && row.logprob === entry.logprob;
        return element("div", { class: `token-row${isChosen ? " chosen-token" : ""}` }, bar, element("span", { class: "mono", text: shown(textOf(row)) }), element("span", { class: "num", text: probabilityText(probability) }));
      }),
    );
    this.card.hidden = false;
    const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { offsetWidth: wide, offsetHeight: high } = this.card;
    const left = Math.max(8, Math.min(place.left, innerWidth - wide - 8));
    const below = place.bottom + 6;
    const top = below + high > innerHeight - 8 ? place.top - high - 6 : below;
    this.card.style.transform = `translate(${left}px, ${Math.max(8, top)}px)`;
  }

  hide() {
    this.card.hidden = true;
  }
}
