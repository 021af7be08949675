// The page: views behind tabs, the model, the key, and whether the engine is there.

import { ChatView } from "./chat";
import { button, byId, field, make, say } from "./dom";
import { EngineView } from "./engine";
import { ServerError, requestJson, health, key, messageOf, type Health } from "./server";
import { themeSwitch } from "./theme";
import { TokensView } from "./tokens";

const NAMES = ["chat", "tokens", "engine"] as const;
const HEALTH_MS = 3000;
const WORDS: Record<Health, string> = { ready: "engine ready", "engine away": "engine not ready", "server away": "server unreachable" };

byId("key").before(themeSwitch());
const model = byId<HTMLSelectElement>("model");
const status = byId("status");
/** The model's name in requests. Until it is known they name none, and get the only model. */
const modelName = (): string | undefined => model.value || undefined;
const engine = new EngineView(modelName);
const chat = new ChatView(modelName);
const tokens = new TokensView(modelName);

let now: string = "chat";

function show(name: string): void {
  now = (NAMES as readonly string[]).includes(name) ? name : "chat";
  for (const each of NAMES) {
    const tab = byId(`tab-${each}`);
    byId(each).hidden = each !== now;
    tab.setAttribute("aria-selected", String(each === now));
    tab.tabIndex = each === now ? 0 : -1;
  }
  look();
}

/** Follow the engine's state only while it is visible. */
function look(): void {
  engine.show(now === "engine" && !document.hidden);
}

byId("tabs").addEventListener("click", (event) => {
  const tab = (event.target as HTMLElement).closest<HTMLElement>("[role=tab]");
  if (tab) location.hash = tab.id.replace("tab-", "");
});
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step === undefined) return;
  const at = NAMES.findIndex((name) => name === now);
  const next = NAMES[(at + step + NAMES.length) % NAMES.length] ?? "chat";
  location.hash = next;
  show(next); // the event of the hash comes later, perhaps after the next key
  byId(`tab-${next}`).focus();
});
model.addEventListener("change", () => {
  engine.changeModel();
  showDefaults();
});
addEventListener("hashchange", () => show(location.hash.slice(1)));
document.addEventListener("visibilitychange", look);

// ---- the server --------------------------------------------------------------------------------

interface Card {
  id: string;
  default_sampling_params: Record<string, number>;
  capabilities?: { vision?: boolean };
}

let cards: Card[] = [];

/** Show the chosen model's limits, and the defaults for absent fields of a request. */
function showDefaults(): void {
  const card = cards.find(({ id }) => id === model.value);
  const defaults = card?.default_sampling_params ?? {};
  chat.allowImages(card?.capabilities?.vision === true);
  chat.showDefaults(defaults);
  tokens.parameters.showDefaults(defaults);
}

async function loadModels(): Promise<void> {
  try {
    const { data } = await requestJson<{ data: Card[] }>("v1/models");
    const kept = model.value;
    model.replaceChildren(...data.map(({ id }) => make("option", { value: id, selected: id === kept }, id)));
    cards = data;
    showDefaults();
    say("");
  } catch (error) {
    say(messageOf(error));
    if (error instanceof ServerError && error.status === 401) showKeyForm();
  }
}

let was: Health | null = null;

async function checkHealth(): Promise<void> {
  if (!document.hidden) {
    const found = await health();
    if (found !== was) {
      status.textContent = WORDS[found];
      status.dataset["state"] = found;
      if (found === "ready") void loadModels();
    }
    was = found;
  }
  setTimeout(() => void checkHealth(), HEALTH_MS);
}

const keyInput = make("input", { type: "password", autocomplete: "off", name: "key" });
const keyForm = make("form", { method: "dialog", onsubmit: () => { key.set(keyInput.value.trim()); void loadModels(); engine.show(false); look(); } },
  field("API key of this server", keyInput),
  make("p", { class: "quiet" }, "The key is kept until you close this tab. A key from --admin-api-key shows all requests; other keys show only their own."),
  make("div", { class: "row" }, button("Cancel", () => keyDialog.close()), make("button", { class: "main" }, "Use key")));
const keyDialog = make("dialog", { "aria-label": "API key" }, keyForm);
document.body.append(keyDialog);

function showKeyForm(): void {
  keyInput.value = key.get();
  if (!keyDialog.open) keyDialog.showModal();
}

byId("key").addEventListener("click", showKeyForm);
show(location.hash.slice(1));
void checkHealth();
