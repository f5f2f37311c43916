// History of generated images with their settings, in local storage. It keeps thumbnails, so that many fit.

import { add, button, keep, kept, parts, smaller } from "./dom.js";

const MOST = 60;

export class History {
  /** use: called with the settings of an image to reuse. */
  constructor(use) {
    this.use = use;
    parts.clear_history.addEventListener("click", () => this.write([]));
    this.show();
  }

  read() {
    const found = kept("history", []);
    return Array.isArray(found) ? found : [];
  }

  async add(settings, url) {
    const entry = { settings, small: await smaller(url), at: Date.now() };
    this.write([entry, ...this.read()].slice(0, MOST));
  }

  write(entries) {
    let count = entries.length;
    while (!keep("history", entries.slice(0, count)) && count) count = Math.floor(count / 2);
    this.show();
  }

  show() {
    const entries = this.read();
    parts.history_empty.hidden = entries.length > 0;
    parts.clear_history.hidden = !entries.length;
    parts.history.replaceChildren();
    for (const entry of entries) this.item(entry);
  }

  item({ settings, small, at }) {
    const item = add(parts.history, "li"), image = add(item, "img"), text = add(item, "div");
    image.src = small;
    image.alt = "";
    add(text, "p", settings.prompt);
    add(text, "p", `${tell(settings)}, ${new Date(at).toLocaleString()}`, "hint");
    const row = add(text, "div", "", "row"), which = `${settings.prompt}, seed ${settings.seed}`;
    button(row, "Use settings", () => this.use(settings), `Use settings: ${which}`);
    button(row, "Delete", () => this.write(this.read().filter((entry) => entry.at !== at)), `Delete: ${which}`);
  }
}

/** Summarize the settings of an image in one line. */
export function tell(settings) {
  const loras = (settings.loras ?? []).map((lora) => `${lora.name} ${lora.scale}`);
  const parts = [`seed ${settings.seed}`, settings.size, `${settings.steps} steps`, `guidance ${settings.guidance_scale}`];
  return [...parts, settings.scheduler, ...loras].filter(Boolean).join(", ");
}
