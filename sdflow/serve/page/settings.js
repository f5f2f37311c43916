// Form fields: defaults of the pipeline, persistence over reloads, and settings read from image files.

import * as api from "./api.js";
import { keep, kept, parts } from "./dom.js";

const KEPT = ["prompt", "negative_prompt", "weighted", "width", "height", "steps", "guidance_scale", "scheduler", "count", "seed", "strength"];
const SHAPES = [[1, 1], [4, 3], [3, 4], [3, 2], [2, 3], [16, 9], [9, 16]];
export const MOST_SEED = 2 ** 32;

export function set(values) {
  for (const [name, value] of Object.entries(values)) {
    const part = parts[name];
    if (!KEPT.includes(name) || value === undefined) continue;
    if (part.type === "checkbox") part.checked = Boolean(value);
    else part.value = value ?? "";
  }
  showStrength();
  showPreset();
}

export const size = () => ({ width: Number(parts.width.value), height: Number(parts.height.value) });

/** Set the fields to a pipeline's defaults. about: its entry in `/v1/models`. */
export function showModel(about) {
  const [width, height] = about.size.split("x");
  const defaults = about.defaults.text ?? Object.values(about.defaults)[0];
  for (const name of ["width", "height"]) parts[name].min = parts[name].step = about.multiple;
  parts.scheduler.replaceChildren(new Option("default", ""), ...about.schedulers.map((name) => new Option(name, name)));
  parts.preset.replaceChildren(new Option("custom", ""), ...presets(about).map(([text, value]) => new Option(text, value)));
  set({ width, height, steps: defaults.steps, guidance_scale: defaults.guidance_scale });
  parts.start.hidden = !about.from_images;
  parts.references.hidden = !about.references;
  parts.safety.hidden = !about.checker;
  parts.verdict.textContent = `${about.family} for ${about.target}, ${about.verdict}`;
  parts.verdict.classList.toggle("good", Boolean(about.verified));
}

/** Return sizes with about the pipeline's own number of pixels: [["3:2 (624x416)", "624x416"]]. */
function presets({ size, multiple, max_pixels: most }) {
  const own = Number(size.split("x")[0]), found = new Map();
  for (const [across, down] of SHAPES) {
    const side = own / Math.sqrt(across * down);
    const [width, height] = [across, down].map((part) => Math.max(multiple, Math.round((part * side) / multiple) * multiple));
    const value = `${width}x${height}`;
    if (!found.has(value) && (!most || width * height <= most)) found.set(value, `${across}:${down} (${value})`);
  }
  return [...found].map(([value, text]) => [text, value]);
}

function showPreset() {
  parts.preset.value = `${parts.width.value}x${parts.height.value}`;
  if (!parts.preset.value) parts.preset.value = "";
}

function showStrength() {
  parts.strength_value.textContent = parts.strength.value;
}

/** Restore the fields after a reload, with the previous pipeline if it still exists. */
export function restore(models, choose) {
  const before = kept("fields", {});
  if (models.some((each) => each.id === before.model)) parts.model.value = before.model;
  choose();
  const there = [...parts.scheduler.options].some((option) => option.value === before.scheduler);
  set({ ...before, scheduler: there ? before.scheduler : "" });
}

export function keepFields() {
  const values = KEPT.map((name) => [name, parts[name].type === "checkbox" ? parts[name].checked : parts[name].value]);
  keep("fields", { model: parts.model.value, ...Object.fromEntries(values) });
}

/** Return the page's settings from an image file's metadata, or null. sdflow's own metadata is preferred. */
export async function read(file) {
  const { items, parameters: webui } = await api.imageText(file);
  try {
    return await settingsIn(items, webui);
  } catch (error) {
    if (error instanceof api.Problem) throw error;
    return null; // another program's metadata of the same name
  }
}

async function settingsIn(items, webui) {
  if (items.sdflow) {
    const said = JSON.parse(items.sdflow);
    if (typeof said.prompt !== "string") return null; // a contact sheet has several prompts
    return { ...said, model: said.pipeline, size: said.size?.join("x"), scheduler: said.scheduler_name, weighted: said.prompt_syntax === "a1111" };
  }
  if (webui.Steps) {
    const loras = [...webui.Prompt.matchAll(/<lora:([^:<>]+)(?::([^<>]*))?>/g)];
    return {
      prompt: webui.Prompt.replace(/<lora:[^<>]*>/g, "").trim(),
      negative_prompt: webui["Negative prompt"],
      loras: loras.map(([, name, scale]) => ({ name, scale: Number(scale ?? 1) })),
      steps: webui.Steps, guidance_scale: webui["CFG scale"], seed: webui.Seed, size: webui.Size, strength: webui["Denoising strength"],
      scheduler: await schedulerOf(webui.Sampler, webui["Schedule type"]),
      weighted: true,
    };
  }
  if (items.invokeai_metadata) {
    const said = JSON.parse(items.invokeai_metadata);
    return { ...said, prompt: said.positive_prompt, guidance_scale: said.cfg_scale, size: `${said.width}x${said.height}`, scheduler: undefined, loras: [] };
  }
  return null;
}

/** Return sdflow's names for a webui sampler and schedule type: one for diffusion, one for flow matching. */
async function schedulerOf(name, label = "Automatic") {
  const sampler = (await api.webuiList("samplers")).find((each) => each.name === name);
  const type = (await api.webuiList("schedulers")).find((each) => each.label === label)?.name;
  const spacing = type === "automatic" ? sampler?.options.scheduler : type === "uniform" ? "" : type;
  return sampler?.aliases.map((alias) => [alias, spacing].filter(Boolean).join("_"));
}

export function listen() {
  parts.strength.addEventListener("input", showStrength);
  parts.preset.addEventListener("change", () => {
    const [width, height] = parts.preset.value.split("x");
    if (height) set({ width, height });
  });
  for (const name of ["width", "height"]) parts[name].addEventListener("input", showPreset);
  parts.random_seed.addEventListener("click", () => (parts.seed.value = ""));
  parts.settings.addEventListener("change", keepFields);
  parts.settings.addEventListener("input", keepFields);
  parts.settings.addEventListener("click", () => setTimeout(keepFields));
  showStrength();
}
