// The list of LoRAs: sliders, search, trigger words and uploads.

import * as api from "./api.js";
import { add, button, parts } from "./dom.js";

let rows = [];

/** Reload the server's LoRAs and keep the selection. */
export async function showLoras() {
  const before = chosen();
  const data = await api.loras();
  parts.loras.hidden = false;
  parts.compare.hidden = !data.length;
  parts.compare_lora.replaceChildren(...data.map(({ id }) => new Option(id, id)));
  parts.lora_list.replaceChildren();
  rows = data.map(row);
  choose(before);
  search();
}

function row({ id: name, words = [] }) {
  const item = add(parts.lora_list, "div", "", "lora");
  const on = input(item, "checkbox", `Use ${name}`);
  add(item, "span", name, "name").title = name;
  const scale = input(item, "range", `Scale of ${name}`), shown = add(item, "output", "1");
  Object.assign(scale, { min: "-1", max: "2", step: "0.05", value: "1" });
  const triggers = add(item, "div", "", "row words");
  triggers.hidden = true;
  for (const word of words) button(triggers, word, () => insert(word), `Add ${word} to the prompt`);
  const made = { name, on, scale, shown, item, words };
  const show = () => {
    shown.textContent = scale.value;
    triggers.hidden = !on.checked || !words.length;
  };
  made.set = (lora) => {
    on.checked = Boolean(lora);
    if (lora) scale.value = lora.scale;
    show();
  };
  scale.addEventListener("input", () => {
    on.checked = true;
    show();
  });
  on.addEventListener("change", show);
  return made;
}

function input(parent, type, label) {
  const made = add(parent, "input");
  made.type = type;
  made.setAttribute("aria-label", label);
  return made;
}

function insert(word) {
  const { prompt } = parts;
  if (!prompt.value.includes(word)) prompt.value = [prompt.value.trim().replace(/,$/, ""), word].filter(Boolean).join(", ");
  prompt.focus();
}

/** Return the selected LoRAs in the API's format. */
export function chosen() {
  return rows.filter(({ on }) => on.checked).map(({ name, scale }) => ({ name, scale: Number(scale.value) }));
}

/** Set all rows and return the names that do not exist. */
export function choose(loras = []) {
  for (const each of rows) each.set(loras.find((lora) => lora.name === each.name));
  return loras.map(({ name }) => name).filter((name) => !rows.some((each) => each.name === name));
}

function search() {
  const wanted = parts.lora_search.value.toLowerCase();
  for (const { name, item, on, words } of rows) {
    item.hidden = !on.checked && ![name, ...words].some((text) => text.toLowerCase().includes(wanted));
  }
  parts.lora_search.hidden = rows.length < 2;
  parts.lora_none.hidden = !rows.length || rows.some(({ item }) => !item.hidden);
}

export async function upload(file) {
  const { id } = await api.uploadLora(file);
  await showLoras();
  rows.find(({ name }) => name === id)?.set({ scale: 1 });
  search();
}

parts.lora_search.addEventListener("input", search);
