// Reads the live stream: frames as gateway/live_frames.py writes them. Connects again when it breaks.

import { authorization, refusal } from "./keys.js";

const HEADER_BYTES = 8;
const JSON_FRAME = 1;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8000;

export class LiveStream {
  /** `handlers`: onJson(body), onBlocks(changes), onState("open" | "lost" | "refused" | "unknown", reason). */
  constructor(handlers) {
    this.handlers = handlers;
    this.abort = null;
    this.retryMs = FIRST_RETRY_MS;
    /** The group to show; empty: the first. */
    this.group = "";
  }

  start() {
    if (this.abort) return;
    this.abort = new AbortController();
    this.run(this.abort);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  restart() {
    this.stop();
    this.start();
  }

  async run(abort) {
    while (!abort.signal.aborted) {
      try {
        const response = await fetch(`api/stream?pool=${encodeURIComponent(this.group)}`, { headers: authorization("admin"), signal: abort.signal });
        if (response.ok) {
          this.handlers.onState("open", "");
          this.retryMs = FIRST_RETRY_MS;
          await this.read(response.body.getReader());
          this.handlers.onState("lost", "the gateway ended the stream");
        } else {
          this.handlers.onState(response.status === 404 ? "unknown" : "refused", await refusal(response));
          if ([401, 403, 404].includes(response.status)) return;
        }
      } catch (error) {
        if (abort.signal.aborted) return;
        this.handlers.onState("lost", "the gateway cannot be reached");
      }
      await new Promise((resolve) => setTimeout(resolve, this.retryMs));
      this.retryMs = Math.min(this.retryMs * 2, LAST_RETRY_MS);
    }
  }

  async read(reader) {
    let rest = new Uint8Array(0);
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest = rest.length ? joined(rest, value) : value;
      let at = 0;
      while (rest.length - at >= HEADER_BYTES) {
        const view = new DataView(rest.buffer, rest.byteOffset + at, HEADER_BYTES);
        const length = view.getUint32(0, true);
        if (rest.length - at - HEADER_BYTES < length) break;
        const payload = rest.slice(at + HEADER_BYTES, at + HEADER_BYTES + length);
        await this.take(view.getUint8(4), view.getUint8(5) ? await inflated(payload) : payload);
        at += HEADER_BYTES + length;
      }
      rest = rest.subarray(at);
    }
  }

  take(kind, payload) {
    if (kind === JSON_FRAME) this.handlers.onJson(JSON.parse(new TextDecoder().decode(payload)));
    else this.handlers.onBlocks(blockChanges(payload));
  }
}

function joined(before, after) {
  const both = new Uint8Array(before.length + after.length);
  both.set(before);
  both.set(after, before.length);
  return both;
}

async function inflated(payload) {
  const stream = new Blob([payload]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function blockChanges(payload) {
  const { buffer } = payload;
  const [length, first] = new Int32Array(buffer, 0, 2);
  let at = 8;
  const column = () => {
    const values = new Int32Array(buffer, at, length);
    at += 4 * length;
    return values;
  };
  const ids = first < 0 ? column() : null;
  const [generations, parents, parentGenerations, refCounts] = [column(), column(), column(), column()];
  return { length, first, ids, generations, parents, parentGenerations, refCounts, states: new Uint8Array(buffer, at, length) };
}
