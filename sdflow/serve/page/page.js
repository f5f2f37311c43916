// The page: form, queue and grid of images.

import * as api from "./api.js";
import { fileOf, keep, kept, parts } from "./dom.js";
import { History } from "./history.js";
import * as loras from "./loras.js";
import { Start } from "./mask.js";
import { addReferences, references } from "./references.js";
import * as fields from "./settings.js";
import { Tile } from "./tile.js";

const AT_ONCE = 4; // browsers open six connections per server, and other requests need some
const running = new Set(), queue = [];
let models = [], tiles = [];

const start = new Start(parts, fields.size);
const history = new History(use);

const model = () => models.find((each) => each.id === parts.model.value)?.sdflow;
const showModel = () => model() && fields.showModel(model());

/** Set the fields from the settings of an image. */
function use(settings) {
  if (models.some((each) => each.id === settings.model) && parts.model.value !== settings.model) {
    parts.model.value = settings.model;
    showModel();
  }
  const [width, height] = settings.size?.split("x") ?? [];
  const known = [settings.scheduler].flat().find((name) => model()?.schedulers.includes(name)) ?? "";
  const weighted = settings.weighted ?? settings.prompt_syntax === "a1111";
  fields.set({ ...settings, width, height, weighted, scheduler: known, negative_prompt: settings.negative_prompt ?? "" });
  const missing = loras.choose(settings.loras);
  problem(missing.length ? `The server does not have the LoRA ${missing.join(", ")}: upload it, or generate without it.` : null);
  fields.keepFields();
  parts.prompt.focus();
  parts.prompt.scrollIntoView({ block: "center" });
}

/** Return the API fields of the image with this number. */
function settings(index, seed) {
  const { width, height } = fields.size();
  const told = {
    model: parts.model.value,
    prompt: parts.prompt.value,
    negative_prompt: parts.negative_prompt.value || undefined,
    prompt_syntax: parts.weighted.checked ? "a1111" : undefined,
    size: `${width}x${height}`,
    steps: Number(parts.steps.value),
    guidance_scale: Number(parts.guidance_scale.value),
    scheduler: parts.scheduler.value || undefined,
    seed: (seed + index) % fields.MOST_SEED,
    loras: loras.chosen(),
    strength: start.given ? Number(parts.strength.value) : undefined,
  };
  return JSON.parse(JSON.stringify(told)); // drops undefined values
}

/** Return a tile for each image to generate. */
function wanted(files) {
  const sent = { start: files, references: references() };
  const seed = parts.seed.value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(parts.seed.value);
  const made = [];
  for (let index = 0; index < Number(parts.count.value); index++) {
    const one = settings(index, seed);
    if (!parts.compare.open || parts.loras.hidden) made.push(new Tile(one, sent, ""));
    else {
      const name = parts.compare_lora.value, others = one.loras.filter((lora) => lora.name !== name);
      for (const field of ["compare_first", "compare_second"]) {
        const scale = Number(parts[field].value);
        made.push(new Tile({ ...one, loras: [...others, { name, scale }] }, sent, `${name} at ${scale}`, name));
      }
    }
  }
  return made;
}

// ---- the queue

async function generate(event) {
  event?.preventDefault();
  if (!parts.settings.reportValidity()) return;
  problem(lacking());
  if (lacking()) return;
  fields.keepFields();
  const more = wanted(await start.files());
  tiles = [...more, ...tiles];
  parts.images.classList.toggle("pairs", more.some((tile) => tile.note));
  parts.images.prepend(...more.map((tile) => tile.item));
  if (parts.images.getBoundingClientRect().top > innerHeight) parts.images_title.scrollIntoView(); // on a phone they are below the form
  for (const tile of more) enqueue(tile);
}

/** Return the missing input of a pipeline that needs a start image or a mask, or null. */
function lacking() {
  const task = model()?.task;
  if (task === "image" && !start.given) return "This pipeline needs an image to start from: choose one.";
  if (task === "inpaint" && !(start.given && start.painted)) {
    return "This is an inpainting pipeline: choose an image to start from, and paint the part to generate.";
  }
  return null;
}

function enqueue(tile) {
  queue.push(tile);
  tile.stop.signal.addEventListener("abort", () => {
    const place = queue.indexOf(tile);
    if (place < 0) return; // already running
    queue.splice(place, 1);
    cancelled(tile);
    tell();
  });
  next();
}

function next() {
  while (queue.length && running.size < AT_ONCE) drawOne(queue.shift());
  tell();
}

async function drawOne(tile) {
  running.add(tile);
  try {
    const most = !parts.safety.hidden && parts.until_passed.checked ? Number(parts.attempts.value) : 1;
    const [drawn, attempts] = await untilPassed(tile, most);
    tile.settings.seed = drawn.seed;
    keep("seed", drawn.seed);
    const actions = { "Use settings": () => use(tile.settings) };
    if (model()?.from_images) actions["Start from it"] = () => start.takeUrl(tile.url);
    if (model()?.references) actions["Use as reference"] = () => attempt(() => refer([fileOf(tile.url)]));
    tile.finished(drawn, attempts, actions);
    if (drawn.flagged !== true) await history.add(tile.settings, drawn.url);
  } catch (error) {
    if (error.name === "AbortError") cancelled(tile);
    else {
      tile.ended(error.message, true, () => replace(tile));
      if (!(error instanceof api.Problem)) throw error;
      explain(error);
    }
  } finally {
    running.delete(tile);
    next();
  }
}

function cancelled(tile) {
  tile.ended("Cancelled.", false, () => replace(tile));
}

function replace(tile) {
  const anew = new Tile(tile.settings, tile.files, tile.note, tile.compared);
  tile.item.replaceWith(anew.item);
  tiles[tiles.indexOf(tile)] = anew;
  enqueue(anew);
}

/** Generate, and if requested, retry with the next seed until the safety checker passes the image. */
async function untilPassed(tile, most) {
  for (let attempt = 1; ; attempt++) {
    const drawn = await patiently(tile);
    if (drawn.flagged !== true || attempt >= most) return [drawn, attempt];
    tile.settings.seed = (tile.settings.seed + 1) % fields.MOST_SEED;
  }
}

/** Generate, and retry after the server's Retry-After if it is overloaded or loading. */
async function patiently(tile) {
  const { references: shown, start: files } = tile.files;
  for (;;) {
    try {
      const sent = shown.length ? { ...tile.settings, references: shown } : tile.settings;
      return await api.draw(sent, files, tile, tile.stop.signal);
    } catch (error) {
      if (!error.retryAfter || ![429, 503].includes(error.status)) throw error;
      tile.say(`${error.message} Retrying in ${error.retryAfter} s.`);
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
  for (const tile of [...queue, ...running]) tile.stop.abort();
}

// ---- display

function tell() {
  const all = tiles.length, open = running.size + queue.length, stopped = tiles.filter((tile) => tile.again).length;
  parts.cancel.disabled = !open;
  parts.tools.hidden = !all;
  parts.retry_all.hidden = !stopped;
  parts.download_all.hidden = !tiles.some((tile) => tile.url);
  parts.remove_all.disabled = Boolean(open);
  parts.last_seed.disabled = kept("seed", null) === null;
  const queued = queue.length ? `, ${queue.length} in the queue` : "";
  const ended = stopped ? `${stopped} of ${all} were not finished.` : "All are done.";
  parts.status.textContent = !all ? "No images yet." : open ? `Generating ${running.size}${queued}.` : ended;
  document.title = open ? `(${open}) sdflow` : "sdflow";
}

function problem(words) {
  parts.problem.hidden = !words;
  parts.problem.textContent = words ?? "";
}

/** Run an action and show its error, if any. */
async function attempt(action) {
  problem(null);
  try {
    await action();
  } catch (error) {
    if (error instanceof api.Problem) await explain(error);
    else problem(error.message);
  }
}

async function explain(error) {
  problem(error.message);
  if (error.status === 401) {
    parts.key_field.hidden = false;
    parts.key.focus();
  }
  const theirs = error.status >= 400 && error.status < 500; // a rejected request does not mean that the server is down
  if (!theirs && !(await api.ready())) await untilBack();
}

let waiting = false;

async function untilBack() {
  if (waiting) return;
  waiting = true;
  parts.server.textContent = "The server is not ready. This page checks again every two seconds.";
  parts.server.hidden = false;
  while (!(await api.ready())) await new Promise((done) => setTimeout(done, 2000));
  parts.server.hidden = true;
  waiting = false;
  problem(null);
  if (!models.length) await begin();
}

async function begin() {
  await attempt(async () => {
    models = await api.models();
    parts.model.replaceChildren(...models.map((each) => new Option(each.id, each.id)));
    fields.restore(models, showModel);
    await loras.showLoras();
    parts.key_field.hidden = true;
  });
}

// ---- files

async function readSettings(file) {
  const found = await fields.read(file);
  if (!found) throw new Error(`${file.name} does not contain its settings.`);
  use(found);
}

const refer = (files) => addReferences(files, model()?.references ?? 0);

/** Handle dropped files by drop target and type. */
async function dropped(event) {
  const files = [...event.dataTransfer.files], within = (part) => part.contains(event.target);
  const tensors = files.filter((file) => file.name.endsWith(".safetensors"));
  const images = files.filter((file) => !tensors.includes(file));
  for (const file of tensors) await loras.upload(file);
  if (!images.length) return;
  if (within(parts.start)) await start.take(images[0]);
  else if (within(parts.references)) await refer(images);
  else await readSettings(images[0]);
}

const chosenFile = (part, action) =>
  part.addEventListener("change", () => part.files.length && attempt(() => action([...part.files])));

// ---- event handlers

fields.listen();
parts.settings.addEventListener("submit", generate);
parts.cancel.addEventListener("click", cancelAll);
parts.model.addEventListener("change", () => {
  showModel();
  fields.keepFields();
});
parts.last_seed.addEventListener("click", () => (parts.seed.value = kept("seed", "")));
chosenFile(parts.start_file, ([file]) => start.take(file));
chosenFile(parts.lora_file, ([file]) => loras.upload(file));
chosenFile(parts.read_file, ([file]) => readSettings(file));
chosenFile(parts.reference_files, refer);
parts.retry_all.addEventListener("click", () => tiles.forEach((tile) => tile.again?.()));
parts.download_all.addEventListener("click", () => tiles.forEach((tile) => tile.url && tile.save()));
parts.remove_all.addEventListener("click", () => [...tiles].forEach((tile) => tile.remove()));
parts.images.addEventListener("removed", () => {
  tiles = tiles.filter((tile) => tile.item.isConnected);
  tell();
});
parts.key.addEventListener("change", () => {
  api.setKey(parts.key.value);
  begin();
});
document.addEventListener("keydown", (event) => {
  if (parts.viewer.open) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) parts.settings.requestSubmit();
  if (event.key === "Escape") cancelAll();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") attempt(() => dropped(event));
  });
}
window.addEventListener("unhandledrejection", (event) => problem(event.reason?.message ?? String(event.reason)));
tell();
await begin();
if (!(await api.ready())) await untilBack();
