// Numbers and small pieces of the page.

const integers = new Intl.NumberFormat("en-US");

export const count = (value) => integers.format(value);

export function percent(share, digits = 0) {
  return Number.isFinite(share) ? `${(share * 100).toFixed(digits)} %` : "–";
}

/** Seconds, as people write them: 850 µs, 12.4 ms, 3.21 s. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.1) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export function compact(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1_000_000) return `${(value / 1e6).toFixed(value >= 1e8 ? 0 : 1)}M`;
  if (value >= 10_000) return `${(value / 1000).toFixed(value >= 100_000 ? 0 : 1)}k`;
  return value >= 100 || Number.isInteger(value) ? count(Math.round(value)) : value.toFixed(1);
}

export function plural(number, noun, nouns = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : nouns}`;
}

/** Words of a name: in_flight_prefix is "in flight prefix". */
export const words = (name) => name.replaceAll("_", " ");

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`class`, `text`, `on…`, others as they are) and children. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets text only where it changes, so that nothing is laid out anew for nothing. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Value at a share (0 to 1) of ascending values, between the two nearest. */
export function quantile(ordered, share) {
  if (!ordered.length) return NaN;
  const position = (ordered.length - 1) * share;
  const below = Math.floor(position);
  const above = Math.min(below + 1, ordered.length - 1);
  return ordered[below] + (ordered[above] - ordered[below]) * (position - below);
}
