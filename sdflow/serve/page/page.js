// The page: its fields, what they ask of the server, and where the answers go.

import * as api from "/page/api.js";
import { History } from "/page/history.js";
import { Start } from "/page/mask.js";
import { Tile } from "/page/tile.js";

const parts = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
const KEPT = "sdflow.fields";
const running = new Set();
let models = [];

const start = new Start(parts, size, problem);
const history = new History(parts, use);

function size() {
  return { width: Number(parts.width.value), height: Number(parts.height.value) };
}

const model = () => models.find((each) => each.id === parts.model.value)?.sdflow;

// ---- the fields

function showModel() {
  const found = model();
  if (!found) return;
  const [width, height] = found.size.split("x");
  const defaults = found.defaults.text ?? Object.values(found.defaults)[0];
  for (const name of ["width", "height"]) parts[name].min = parts[name].step = found.multiple;
  set({ width, height, steps: defaults.steps, guidance_scale: defaults.guidance_scale });
  const options = [new Option("the pipeline's own", ""), ...found.schedulers.map((name) => new Option(name, name))];
  parts.scheduler.replaceChildren(...options);
  parts.start.hidden = !found.from_images;
  parts.safety.hidden = !found.checker;
  parts.verdict.textContent = `${found.family} for ${found.target}, ${found.verdict}`;
  parts.verdict.classList.toggle("good", Boolean(found.verified));
}

function showLoras(found) {
  parts.loras.hidden = !found.length;
  parts.compare_lora.replaceChildren(...found.map((name) => new Option(name, name)));
  parts.lora_list.replaceChildren(
    ...found.map((name) => {
      const row = document.createElement("div");
      row.className = "lora";
      const on = input("checkbox", `Use ${name}`), scale = input("range", `Scale of ${name}`);
      Object.assign(scale, { min: "-1", max: "2", step: "0.05", value: "1" });
      Object.assign(row.dataset, { name });
      const label = document.createElement("span"), shown = document.createElement("output");
      label.className = "name";
      label.textContent = label.title = name;
      shown.textContent = "1";
      scale.addEventListener("input", () => {
        shown.textContent = scale.value;
        on.checked = true;
      });
      row.append(on, label, scale, shown);
      return row;
    }),
  );
}

function input(type, label) {
  const made = document.createElement("input");
  made.type = type;
  made.setAttribute("aria-label", label);
  return made;
}

const loraRows = () => [...parts.lora_list.children].map((row) => ({ name: row.dataset.name, on: row.children[0], scale: row.children[2], shown: row.children[3] }));

function chosenLoras() {
  return loraRows().filter(({ on }) => on.checked).map(({ name, scale }) => ({ name, scale: Number(scale.value) }));
}

function set(values) {
  for (const [name, value] of Object.entries(values)) if (parts[name]) parts[name].value = value;
}

/** Put the settings of an image of the history into the fields. */
function use(settings) {
  if (models.some((each) => each.id === settings.model) && parts.model.value !== settings.model) {
    parts.model.value = settings.model;
    showModel();
  }
  const [width, height] = settings.size.split("x");
  set({ ...settings, width, height, scheduler: settings.scheduler ?? "", negative_prompt: settings.negative_prompt ?? "" });
  for (const { name, on, scale, shown } of loraRows()) {
    const found = (settings.loras ?? []).find((lora) => lora.name === name);
    on.checked = Boolean(found);
    if (found) shown.textContent = scale.value = found.scale;
  }
  parts.prompt.focus();
  parts.prompt.scrollIntoView({ block: "center" });
}

/** What the fields say, as the API names it, for the image of this number. */
function settings(index, seed) {
  const { width, height } = size();
  const told = {
    model: parts.model.value,
    prompt: parts.prompt.value,
    negative_prompt: parts.negative_prompt.value || undefined,
    size: `${width}x${height}`,
    steps: Number(parts.steps.value),
    guidance_scale: Number(parts.guidance_scale.value),
    scheduler: parts.scheduler.value || undefined,
    seed: (seed + index) % 2 ** 32,
    loras: chosenLoras(),
  };
  if (start.given) told.strength = Number(parts.strength.value);
  return JSON.parse(JSON.stringify(told)); // without what is undefined
}

/** The images that the fields ask for, as a tile takes them. */
function wanted() {
  const seed = parts.seed.value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(parts.seed.value);
  const made = [];
  for (let index = 0; index < Number(parts.count.value); index++) {
    const one = settings(index, seed);
    if (!parts.compare.open || parts.loras.hidden) made.push({ settings: one, note: "" });
    else {
      const name = parts.compare_lora.value, others = one.loras.filter((lora) => lora.name !== name);
      for (const field of ["compare_first", "compare_second"]) {
        const scale = Number(parts[field].value);
        made.push({ settings: { ...one, loras: [...others, { name, scale }] }, note: `${name} at ${scale}`, compared: name });
      }
    }
  }
  return made;
}

// ---- drawing

async function drawAll(event) {
  event?.preventDefault();
  if (!parts.settings.reportValidity()) return;
  problem(lacking());
  if (lacking()) return;
  localStorage.setItem(KEPT, JSON.stringify({ prompt: parts.prompt.value, negative_prompt: parts.negative_prompt.value }));
  const files = await start.files();
  const tiles = wanted().map(({ settings, note, compared }) => new Tile(settings, note, compared));
  parts.images.replaceChildren(...tiles.map((tile) => tile.item));
  parts.images.classList.toggle("pairs", tiles.some((tile) => tile.note));
  for (const tile of running) tile.stop.abort();
  if (parts.images.getBoundingClientRect().top > innerHeight) parts.images_title.scrollIntoView(); // below the form, on a phone
  await Promise.all(tiles.map((tile) => drawOne(tile, files)));
}

/** What a pipeline that only goes on from images, or only draws into them, still needs; null where nothing is. */
function lacking() {
  const task = model()?.task;
  if (task === "image" && !start.given) return "This pipeline goes on from an image: choose one to start from.";
  if (task === "inpaint" && !(start.given && start.painted)) {
    return "This pipeline draws into an image: choose one to start from, and paint on it what is to be drawn.";
  }
  return null;
}

async function drawOne(tile, files) {
  running.add(tile);
  tell();
  try {
    const [drawn, attempts] = await untilPassed(tile, files);
    tile.settings.seed = drawn.seed;
    const again = { "Use these again": () => use(tile.settings) };
    if (model()?.from_images) again["Start from it"] = () => start.takeUrl(tile.url);
    tile.finished(drawn.url, drawn.flagged, attempts, again);
    if (drawn.flagged !== true) await history.add(tile.settings, drawn.url);
  } catch (error) {
    const words = error.name === "AbortError" ? "Cancelled." : error.message;
    tile.failed(words, () => replace(tile, files));
    if (error instanceof api.Problem) await explain(error);
    else if (error.name !== "AbortError") throw error;
  } finally {
    running.delete(tile);
    tell();
  }
}

function replace(tile, files) {
  const anew = new Tile(tile.settings, tile.note, tile.compared);
  tile.item.replaceWith(anew.item);
  return drawOne(anew, files);
}

/** Draw, and where it is asked for, again with the next seed until the safety checker passes it. */
async function untilPassed(tile, files) {
  const most = !parts.safety.hidden && parts.until_passed.checked ? Number(parts.attempts.value) : 1;
  for (let attempt = 1; ; attempt++) {
    const drawn = await patiently(tile, files);
    if (drawn.flagged !== true || attempt >= most) return [drawn, attempt];
    tile.settings.seed = (tile.settings.seed + 1) % 2 ** 32;
  }
}

/** Draw; where the server has too much to do or is loading, wait as long as it says and ask again. */
async function patiently(tile, files) {
  for (;;) {
    try {
      return await api.draw(tile.settings, files, tile, tile.stop.signal);
    } catch (error) {
      if (!error.retryAfter || ![429, 503].includes(error.status)) throw error;
      tile.say(`${error.message} It is asked again in ${error.retryAfter} s.`);
      await pause(error.retryAfter * 1000, tile.stop.signal);
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((done, failed) => {
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      failed(signal.reason);
    });
  });
}

function cancelAll() {
  for (const tile of running) tile.stop.abort();
}

// ---- what is told

function tell() {
  parts.cancel.disabled = !running.size;
  const all = parts.images.children.length;
  const drawn = parts.images.querySelectorAll(".finished").length;
  parts.status.textContent = !all ? "Nothing is drawn yet." : drawn === all ? "All are done." : `${drawn} of ${all} are drawn.`;
}

function problem(words) {
  parts.problem.hidden = !words;
  parts.problem.textContent = words ?? "";
}

async function explain(error) {
  problem(error.message);
  if (error.status === 401) {
    parts.key_field.hidden = false;
    parts.key.focus();
  }
  const theirs = error.status >= 400 && error.status < 500; // what the server refuses does not mean that it is gone
  if (!theirs && !(await api.ready())) await untilBack();
}

let waiting = false;

async function untilBack() {
  if (waiting) return;
  waiting = true;
  parts.server.textContent = "The server does not draw at the moment. This page looks every two seconds whether it is back.";
  parts.server.hidden = false;
  while (!(await api.ready())) await new Promise((done) => setTimeout(done, 2000));
  parts.server.hidden = true;
  waiting = false;
  problem(null);
  if (!models.length) await begin();
}

async function begin() {
  try {
    models = await api.models();
    parts.model.replaceChildren(...models.map((each) => new Option(each.id, each.id)));
    showModel();
    showLoras(await api.loras());
    problem(null);
    parts.key_field.hidden = true;
  } catch (error) {
    if (!(error instanceof api.Problem)) throw error;
    await explain(error);
  }
}

// ---- the wiring

parts.settings.addEventListener("submit", drawAll);
parts.cancel.addEventListener("click", cancelAll);
parts.model.addEventListener("change", showModel);
parts.strength.addEventListener("input", () => (parts.strength_value.textContent = parts.strength.value));
parts.strength_value.textContent = parts.strength.value;
parts.key.addEventListener("change", () => {
  api.setKey(parts.key.value);
  begin();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) parts.settings.requestSubmit();
  if (event.key === "Escape") cancelAll();
});
window.addEventListener("unhandledrejection", (event) => problem(event.reason?.message ?? String(event.reason)));
try {
  set(JSON.parse(localStorage.getItem(KEPT) ?? "{}"));
} catch {
  localStorage.removeItem(KEPT);
}
await begin();
if (!(await api.ready())) await untilBack();
