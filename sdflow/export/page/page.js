// The form, what is said of progress, and the image. Fetching and drawing happen in worker.js.

import { requireAdapter, runtimeFolder } from "./engine.js";
import { Files, deleteKept, keptBytes, missing } from "./files.js";
import { Problem, inWords, spellBytes } from "./words.js";

const PATIENCE = 2000; // for work to end by itself when it is cancelled, before its worker is
const FORMAT = 1;
const NAMES = { text: "text encoder", denoiser: "denoiser", decoder: "image decoder", checker: "safety checker" };

const asked = new URLSearchParams(location.search);
const element = (id) => document.getElementById(id);
const number = (id) => Number(element(id).value);
const device = () => document.querySelector("[name=device]:checked").value;
const say = (text) => { element("said").textContent = text; };

let index, base, worker = null, running = null;

async function start() {
  if (!isSecureContext) throw new Problem("Browsers allow WebGPU on secure pages only.", "Open the page with https:// or on localhost.");
  base = new URL(asked.get("model") ?? "./", location.href);
  if (!base.pathname.endsWith("/")) base.pathname += "/";
  index = await readIndex();
  fill();
  element("settings").disabled = false;
  await tellKept().catch(show); // where nothing can be stored, visitors can still untick that
  say("Ready");
  if (device() === "webgpu") await requireAdapter(index).catch(show);
}

async function readIndex() {
  const answer = await fetch(new URL("pipeline.json", base), { cache: "no-cache" }).catch((error) => {
    throw new Problem(`${base.host} does not answer: ${error.message}`, "Check the address, and that the server allows this page to read its files (CORS).");
  });
  if (!answer.ok) throw missing("pipeline.json", answer.status);
  const found = await answer.json();
  if (found.format_version !== FORMAT) throw new Problem(`pipeline.json has format ${found.format_version}, and this page reads format ${FORMAT}.`, "Export the pipeline again.");
  return found;
}

function fill() {
  const { latents, schedule, guidance, size } = index;
  document.title = element("name").textContent = index.name;
  const total = Object.values(index.files).reduce((sum, { bytes }) => sum + bytes, 0);
  element("about").textContent = `${index.family}, ${index.float16 ? "float16" : "float32"}, ${spellBytes(total)}. Everything runs in this browser.`;
  for (const side of ["width", "height"]) {
    const granularity = latents.pixels * latents.multiple;
    Object.assign(element(side), { min: granularity, step: granularity, max: 4096, value: size[side] });
  }
  const counts = Object.keys(schedule.tables).map(Number);
  Object.assign(element("steps"), { min: Math.min(...counts), max: Math.max(...counts), value: schedule.steps });
  element("guidance").value = guidance.scale;
  if (!guidance.rows) for (const each of document.querySelectorAll(".guided")) each.hidden = true;
  element("guidance").parentElement.hidden = !guidance.rows && !index.graphs.text.inputs.includes("guidance_scale");
  element("prompt").value = asked.get("prompt") ?? "";
  if (asked.get("device") === "wasm") document.querySelector("[value=wasm]").checked = true;
  Object.assign(element("image"), { width: size.width, height: size.height });
}

const files = () => new Files(base, index.files, element("keep").checked);

/** What the button promises, and what is kept. */
async function tellKept() {
  const all = await keptBytes();
  element("kept").textContent = all ? `${spellBytes(all)} stored in this browser` : "No files stored in this browser";
  element("delete").disabled = !all || running !== null;
  const { there, total } = await (element("keep").checked ? files().there() : { there: 0, total: 0 });
  element("draw").textContent = there < total ? `Download ${spellBytes(total - there)} and generate` : "Generate";
  element("draw").disabled = running !== null;
}

function show(error) {
  const { message, remedy } = error.message !== undefined && error.remedy !== undefined ? error : inWords(error, "Loading", device());
  element("problem_message").textContent = message;
  element("problem_remedy").textContent = remedy;
  element("problem").hidden = false;
}

function progress(part) {
  element("progress").hidden = part === null;
  if (part !== null) element("progress").value = part;
}

/** What is being done, in words. */
const phases = {
  fetch({ waiting, done, total }, rate) {
    if (waiting) return say("Waiting for another tab that is downloading these files");
    progress(done / total);
    say(`Downloading ${spellBytes(done)} of ${spellBytes(total)}${rate(done)}`);
  },
  start() { progress(0); say("Starting ONNX Runtime Web"); },
  load({ graph, done, total }) { progress(total ? done / total : 0); say(`Loading the ${NAMES[graph]}: ${spellBytes(done)} of ${spellBytes(total)}`); },
  text() { progress(0); say("Encoding the prompt"); },
  step({ step, steps }, rate, pace) { progress(step / steps); say(`Step ${step + 1} of ${steps}${pace(step)}`); },
  decode() { progress(1); say("Decoding the image"); },
};

/** What tells bytes per second and seconds per step, from when it first saw any. */
function meters() {
  let first = null, began = null;
  return [
    (done) => {
      first ??= { done, at: performance.now() };
      const seconds = (performance.now() - first.at) / 1000;
      return seconds > 1 ? `, ${spellBytes((done - first.done) / seconds)} per second` : "";
    },
    (step) => {
      if (step === 0) began = performance.now();
      return step === 0 ? "" : `, ${((performance.now() - began) / 1000 / step).toFixed(2)} s per step`;
    },
  ];
}

/** One drawing, in the worker. Resolves with `done` or `failed`. */
function inWorker(given) {
  worker ??= new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  const [rate, pace] = meters();
  return new Promise((resolve) => {
    running = { end: resolve };
    worker.onmessage = ({ data }) => {
      if (data.told) phases[data.told.phase](data.told, rate, pace);
      else resolve(data);
    };
    worker.onerror = (event) => resolve({ failed: inWords(event, "The page's worker", device()) });
    worker.postMessage({ call: "draw", ...given });
  });
}

function endWorker() {
  worker?.terminate();
  worker = null;
}

async function draw() {
  const keep = element("keep").checked;
  const place = { base: base.href, index, device: device(), ort: runtimeFolder(asked.get("ort"), index.onnxruntime_web, location.href), keep };
  const wanted = { prompt: element("prompt").value, negative: element("negative").value };
  for (const id of ["seed", "steps", "width", "height", "guidance"]) wanted[id] = number(id);
  say("Starting");
  element("problem").hidden = true;
  element("cancel").disabled = false;
  for (const id of ["settings", "draw", "delete"]) element(id).disabled = true;
  if (keep) navigator.storage?.persist?.(); // so that the browser does not delete the files by itself
  const { done, failed } = await inWorker({ place, wanted });
  running = null;
  progress(null);
  element("cancel").disabled = true;
  element("settings").disabled = false;
  if (done) await showImage(done, wanted);
  else if (failed.cancelled) say("Cancelled");
  else {
    say("Failed");
    show(failed);
    endWorker(); // with what it holds of memory
  }
  await tellKept();
}

async function showImage({ pixels, width, height, notes, seconds }, { prompt, seed, steps }) {
  const canvas = element("image");
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(new ImageData(pixels, width, height), 0, 0);
  canvas.setAttribute("aria-label", prompt);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve));
  const save = element("save");
  URL.revokeObjectURL(save.href);
  Object.assign(save, { href: URL.createObjectURL(blob), download: `${seed}.png`, hidden: false });
  element("caption").textContent = [`Seed ${seed}, ${steps} steps, ${seconds.toFixed(1)} s.`, ...notes].join(" ");
  say("Done");
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) draw().catch(show);
});
element("cancel").addEventListener("click", () => {
  const { end } = running, ended = worker;
  element("cancel").disabled = true;
  say("Cancelling");
  ended.postMessage({ call: "cancel" });
  setTimeout(() => {
    if (running?.end !== end) return;
    endWorker(); // a step on the processor hears nothing until it ends
    end({ failed: { cancelled: true } });
  }, PATIENCE);
});
element("delete").addEventListener("click", async () => {
  endWorker();
  element("problem").hidden = true;
  try {
    await deleteKept();
    say("Deleted");
  } catch (error) {
    say("Failed");
    show(error);
  }
  await tellKept().catch(show);
});
element("random").addEventListener("click", () => { element("seed").value = crypto.getRandomValues(new Uint32Array(1))[0]; });
element("keep").addEventListener("change", () => {
  element("problem").hidden = true;
  tellKept().catch(show);
});
for (const each of document.querySelectorAll("[name=device]")) each.addEventListener("change", () => {
  element("problem").hidden = true;
  if (device() === "webgpu") requireAdapter(index).catch(show);
});

start().catch((error) => { say("Failed"); show(error); });
