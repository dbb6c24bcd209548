// Starts the page: theme, views, keys, and what the server serves.

import { byId, setText } from "./format.js";
import { authorization, key, setKey } from "./keys.js";
import { LiveView } from "./live.js";
import { Playground } from "./playground.js";
import { startTheme } from "./theme.js";
import { WhyPanel } from "./why.js";

const VIEWS = ["playground", "cache"];
const HEALTH_INTERVAL_MS = 10_000;

startTheme(byId("theme"));
const why = new WhyPanel();
const live = new LiveView((requestId) => why.show(requestId));
new Playground((requestId) => why.show(requestId));

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The address says it: #playground, #cache, or #cache/GROUP. */
function showView() {
  const [wanted, group] = location.hash.slice(1).split("/").map(decoded);
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const name of VIEWS) byId(`view-${name}`).hidden = name !== view;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = view === "cache" ? "Live cache – Octavo" : "Playground – Octavo";
  live.show(view === "cache", group);
}

async function showServed() {
  const served = byId("served");
  let text = "the gateway cannot be reached";
  let isReady = false;
  try {
    const ready = await fetch("/health/ready");
    if (ready.ok) {
      const models = await fetch("/v1/models", { headers: authorization("api") });
      isReady = models.ok;
      text = models.ok ? (await models.json()).data.map((model) => model.id).join(", ") : "an API key is needed";
    } else text = (await ready.json()).reason ?? "not ready";
  } catch {
    isReady = false;
  }
  setText(served, text);
  served.title = text;
  served.classList.toggle("ready", isReady);
  served.classList.toggle("trouble", !isReady);
}

function startKeys() {
  const dialog = byId("keys");
  byId("open-keys").addEventListener("click", () => {
    byId("api-key").value = key("api");
    byId("admin-key").value = key("admin");
    dialog.showModal();
  });
  byId("keys-form").addEventListener("submit", () => {
    setKey("api", byId("api-key").value.trim());
    setKey("admin", byId("admin-key").value.trim());
    live.restart();
    showServed();
  });
  for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
}

startKeys();
addEventListener("hashchange", showView);
showView();
showServed();
setInterval(() => document.hidden || showServed(), HEALTH_INTERVAL_MS);
