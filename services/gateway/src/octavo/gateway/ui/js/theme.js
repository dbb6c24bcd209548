// Owns the theme: automatic, light or dark. Sets data-theme on the root, and tells who draws by hand.

const KEY = "octavo.theme";
const MODES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

const mode = () => localStorage.getItem(KEY) ?? "auto";

function apply() {
  const resolved = mode() === "auto" ? (dark.matches ? "dark" : "light") : mode();
  document.documentElement.dataset.theme = resolved;
  for (const listener of listeners) listener();
}

export function onTheme(listener) {
  listeners.add(listener);
}

export function startTheme(button) {
  const show = () => {
    const name = { auto: "Auto", light: "Light", dark: "Dark" }[mode()];
    button.textContent = name;
    button.setAttribute("aria-label", `Theme: ${name === "Auto" ? "automatic" : name.toLowerCase()}`);
  };
  button.addEventListener("click", () => {
    localStorage.setItem(KEY, MODES[(MODES.indexOf(mode()) + 1) % MODES.length]);
    apply();
    show();
  });
  dark.addEventListener("change", apply);
  apply();
  show();
}

/** A colour of the theme as [red, green, blue], 0 to 255. */
export function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim().replace("#", "");
  const full = hex.length === 3 ? [...hex].map((digit) => digit + digit).join("") : hex;
  return [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16));
}

export function mixed(a, b, share) {
  return a.map((value, at) => Math.round(value + (b[at] - value) * share));
}

export const css = ([red, green, blue], alpha = 1) => `rgb(${red} ${green} ${blue} / ${alpha})`;

export const movesLittle = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
