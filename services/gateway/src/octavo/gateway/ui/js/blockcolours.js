// Which colour a block has: its state; for active ones, deeper the more tables share it.

import { STATES } from "./pool.js";
import { colour, css, mixed } from "./theme.js";

const ACTIVE = STATES.indexOf("active");
const MOST_SHARED = 64;

const packed = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

export class BlockColours {
  constructor() {
    this.read();
  }

  /** Take the colours of the present theme. */
  read() {
    const sheet = colour("sheet");
    const states = STATES.map(colour);
    const deep = colour("active-deep");
    const shares = Array.from({ length: MOST_SHARED + 1 }, (_, holders) =>
      mixed(states[ACTIVE], deep, Math.min(1, Math.log2(Math.max(1, holders)) / 5)));
    this.states = states;
    this.shares = shares;
    const both = (make) => [make, (rgb) => make(mixed(rgb, sheet, 0.82))];
    const [plain, faded] = both(packed);
    this.byState = [states.map(plain), states.map(faded)];
    this.byShare = [shares.map(plain), shares.map(faded)];
  }

  /** As a pixel, 0xAABBGGRR. */
  pixel(state, refCount, isFaded) {
    const fade = isFaded ? 1 : 0;
    if (state === ACTIVE && refCount > 1) return this.byShare[fade][Math.min(refCount, MOST_SHARED)];
    return this.byState[fade][state];
  }

  css(state, refCount) {
    if (state === ACTIVE && refCount > 1) return css(this.shares[Math.min(refCount, MOST_SHARED)]);
    return css(this.states[state]);
  }
}
