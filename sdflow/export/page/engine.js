// Draws with the graphs of a folder: text, denoiser, decoder, and checker, in that order, one image at a time.

import { normals } from "./noise.js";
import { tokenizer } from "./tokenizer.js";
import { Problem, spellBytes } from "./words.js";

const MODULES = { webgpu: "ort.webgpu.min.mjs", wasm: "ort.wasm.min.mjs" };
const MOST_THREADS = 8;
const TOLERANCE = 1e-3;

const CDN = (version) => `https://cdn.jsdelivr.net/npm/onnxruntime-web@${version}/dist/`;

/** URL of the folder with ONNX Runtime Web. asked: of the page's address, or null. listed: version and folder, of pipeline.json.
    Both may come from strangers, and what is loaded runs as this page: it is from the page's own origin or the public CDN. */
export function runtimeFolder(asked, { version, folder }, page) {
  const place = asked ?? folder;
  const cdn = /^\d+\.\d+\.\d+$/.test(version) ? CDN(version) : null;
  const own = new URL(page), named = place === "cdn" ? cdn : place;
  if (named !== null && URL.canParse(named, page)) {
    const { href, protocol, origin } = new URL(named, page);
    if (href === cdn || (protocol === own.protocol && origin === own.origin)) return href;
  }
  throw new Problem(
    `ONNX Runtime Web is not loaded from ${place === "cdn" ? `version ${version} on the CDN` : place}: only this site and the public CDN's releases are allowed.`,
    "Upload ONNX Runtime Web next to this page, or use ?ort=cdn.",
  );
}

/** The adapter that WebGPU draws on. Raises a Problem where there is none, or where it cannot hold the model. */
export async function requireAdapter(index) {
  const choose = "Use a current Chrome, Edge, Safari, or Firefox on a machine with a GPU, or choose the CPU under Device.";
  if (!navigator.gpu) throw new Problem("This browser has no WebGPU.", choose);
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" }).catch(() => null);
  if (!adapter) throw new Problem("This browser supports WebGPU but found no GPU for it.", choose);
  if (index.float16 && !adapter.features.has("shader-f16")) {
    throw new Problem(
      "This GPU does not support float16 (shader-f16), which this model needs.",
      "Use another GPU, choose the CPU, or export a float32 build of the pipeline.",
    );
  }
  const most = adapter.limits.maxBufferSize;
  if (index.largest > most) {
    throw new Problem(`This GPU allows ${spellBytes(most)} in one buffer, and the model needs ${spellBytes(index.largest)}.`, "Use another GPU, or choose the CPU.");
  }
  return adapter;
}

/** index: of pipeline.json. files: Files. tell: is called with what is being done. */
export class Engine {
  #sessions = new Map();
  #fault = null;

  constructor(index, files, device, ort, tell) {
    Object.assign(this, { index, files, device, ort, tell });
  }

  /** place: URL of the folder with ONNX Runtime Web. */
  static async open(index, files, device, place, tell) {
    if (device === "webgpu") await requireAdapter(index);
    let ort;
    try {
      ort = await import(new URL(MODULES[device], place));
    } catch (error) {
      throw new Problem(`ONNX Runtime Web could not be loaded from ${place}: ${error.message}`, "Check that its files exist there and that the server sends .mjs files as JavaScript.");
    }
    ort.env.wasm.wasmPaths = place;
    // Threads need the headers that isolate a page: docs/browser.md.
    ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency, MOST_THREADS) : 1;
    if (device === "webgpu") ort.env.webgpu.powerPreference = "high-performance";
    ort.env.logLevel = "error";
    const engine = new Engine(index, files, device, ort, tell);
    if (index.attention) await engine.#tryAttention();
    return engine;
  }

  /** Fused attention is wrong on some devices, without an error: sdflow/runtime/sessions/webgpu_attention.py. */
  async #tryAttention() {
    const { rows, keys, heads, size } = this.index.attention, next = normals(0), width = heads * size;
    const given = {};
    for (const [name, count] of [["q", rows], ["k", keys], ["v", keys]]) given[name] = this.#floats(next(count * width), [1, count, width]);
    const session = await this.#create(await this.files.read("attention.onnx"));
    const found = await (await session.run(given)).attention.getData();
    await session.release();
    const wanted = attention(given.q.data, given.k.data, given.v.data, this.index.attention);
    if (!found.every((value, i) => Math.abs(value - wanted[i]) < TOLERANCE)) {
      throw new Problem(
        "ONNX Runtime Web computes attention wrongly on this device, so images would be wrong.",
        "Use another GPU, choose the CPU, or export a build without fused attention.",
      );
    }
  }

  async #create(model, more) {
    try {
      const session = await this.ort.InferenceSession.create(model, { executionProviders: [this.device], ...more });
      await this.#watch();
      return session;
    } catch (error) {
      await new Promise((resolve) => setTimeout(resolve)); // what the device says of it comes later
      throw this.#fault ?? error;
    }
  }

  async #session(name) {
    if (!this.#sessions.has(name)) {
      const { data } = this.index.graphs[name];
      const total = data.reduce((sum, { bytes }) => sum + bytes, 0);
      const externalData = [];
      let done = 0;
      for (const { path, bytes, files } of data) {
        const whole = new Uint8Array(bytes);
        let at = 0;
        for (const file of files) {
          this.tell({ phase: "load", graph: name, done, total });
          const content = await this.files.read(file);
          whole.set(content, at);
          at += content.length;
          done += content.length;
        }
        externalData.push({ path, data: whole });
      }
      this.tell({ phase: "load", graph: name, done, total });
      const model = await this.files.read(`${name}.onnx`);
      const session = await this.#create(model, { externalData });
      this.#sessions.set(name, session);
    }
    return this.#sessions.get(name);
  }

  /** Errors of the device that no call raises. */
  async #watch() {
    if (this.device !== "webgpu" || this.watched) return;
    this.watched = await this.ort.env.webgpu.device;
    this.watched.addEventListener("uncapturederror", ({ error }) => (this.#fault ??= error));
    this.watched.lost.then(({ message }) => (this.#fault ??= new Problem(`The GPU was lost: ${message}`, "Try again; if this recurs, use a smaller image.")));
  }

  /** The outputs of a graph, by name: { data, dims }. given: by name; what the graph does not read is left out. */
  async #run(name, given) {
    const session = await this.#session(name);
    const feeds = Object.fromEntries(this.index.graphs[name].inputs.map((input) => [input, given[input]]));
    const outputs = await session.run(feeds);
    const found = {};
    for (const [output, tensor] of Object.entries(outputs)) {
      found[output] = { data: await tensor.getData(), dims: tensor.dims };
      tensor.dispose();
    }
    if (this.#fault) throw this.#fault;
    return found;
  }

  #floats(values, dims) { return new this.ort.Tensor("float32", values, dims); }

  /** An image: { pixels (RGBA), width, height, notes, seconds }. wanted: prompt, negative, seed, steps, width, height, guidance. */
  async draw(wanted, signal) {
    const { latents, schedule, guidance } = this.index;
    const begun = performance.now(), notes = [];
    const shape = [latents.channels, wanted.height / latents.pixels, wanted.width / latents.pixels];
    const { timesteps, rows, draws } = await this.#schedule(schedule.tables[wanted.steps], wanted.steps);
    const weight = wanted.guidance + guidance.offset, guided = guidance.rows && weight > 1;
    this.tell({ phase: "text" });
    const conditions = await this.#conditions(wanted, guided, notes);
    const next = normals(wanted.seed), count = shape.reduce((a, b) => a * b, 1);
    const terms = Array.from({ length: 1 + draws }, () => next(count));
    await this.#session("denoiser");
    for (let step = 0; step < timesteps.length; step++) {
      signal.throwIfAborted();
      this.tell({ phase: "step", step, steps: timesteps.length });
      const input = sum(rows[step], terms);
      terms.push(await this.#predict(input, shape, timesteps[step], conditions, guided ? weight : null));
    }
    signal.throwIfAborted();
    this.tell({ phase: "decode" });
    let { images } = await this.#run("decoder", { latents: this.#floats(sum(rows.at(-1), terms), [1, ...shape]) });
    if ("checker" in this.index.graphs) {
      signal.throwIfAborted();
      const checked = await this.#run("checker", { pixels: this.#floats(images.data, images.dims) });
      images = checked.images;
      if (checked.nsfw_content_detected.data[0]) notes.push("The safety checker blacked out the image.");
    }
    const [, height, width] = images.dims;
    return { pixels: inBytes(images.data), width, height, notes, seconds: (performance.now() - begun) / 1000 };
  }

  async #conditions(wanted, guided, notes) {
    this.tokenizers ??= Object.entries(JSON.parse(new TextDecoder().decode(await this.files.read("tokenizers.json"))))
      .map(([input, table]) => [input, tokenizer(table)]);
    const tokenizers = new Map(this.tokenizers);
    const given = {
      height: new this.ort.Tensor("int64", [BigInt(wanted.height)], []),
      width: new this.ort.Tensor("int64", [BigInt(wanted.width)], []),
      guidance_scale: this.#floats([wanted.guidance], [1]),
    };
    let most = 0;
    for (const [input, { table, negative }] of Object.entries(this.index.texts)) {
      const { ids, dropped } = tokenizers.get(table)(negative ? wanted.negative : wanted.prompt);
      given[input] = new this.ort.Tensor("int32", ids, [1, ids.length]);
      most = Math.max(most, dropped);
    }
    if (most) notes.push(`A prompt is too long: its last ${most} tokens were ignored.`);
    const found = await this.#run("text", given);
    const single = this.index.guidance.rows && !guided;
    return Object.fromEntries(Object.entries(found).map(([name, value]) => [name, single ? lastRow(value) : value]));
  }

  async #predict(input, shape, timestep, conditions, weight) {
    const count = input.length, rows = weight === null ? 1 : 2;
    const latents = new Float32Array(rows * count);
    for (let row = 0; row < rows; row++) latents.set(input, row * count);
    const given = { latents: this.#floats(latents, [rows, ...shape]), timestep: this.#floats([timestep], [1]) };
    for (const [name, { data, dims }] of Object.entries(conditions)) given[name] = this.#floats(data, dims);
    const { data } = (await this.#run("denoiser", given)).prediction;
    if (weight === null) return data;
    return Float32Array.from({ length: count }, (_, i) => data[i] + weight * (data[count + i] - data[i]));
  }

  async #schedule(table, steps) {
    if (!table) throw new Problem(`The scheduler cannot make ${steps} steps.`, "Choose another number of steps.");
    const { runs, draws, begin } = table;
    const content = await this.files.read("schedules.bin");
    const numbers = new Float32Array(content.slice(begin, begin + 4 * (runs + (runs + 1) * (1 + draws + runs))).buffer);
    const width = 1 + draws + runs;
    const rows = Array.from({ length: runs + 1 }, (_, row) => numbers.subarray(runs + row * width, runs + (row + 1) * width));
    return { timesteps: numbers.subarray(0, runs), rows, draws };
  }
}

/** The sum of terms, each times its factor. Those that are not there yet have the factor 0. */
function sum(factors, terms) {
  const made = new Float32Array(terms[0].length);
  terms.forEach((term, at) => {
    const factor = factors[at];
    if (factor) for (let i = 0; i < made.length; i++) made[i] += factor * term[i];
  });
  return made;
}

/** softmax(q k^T / sqrt(size)) v for each head. */
function attention(q, k, v, { rows, keys, heads, size }) {
  const width = heads * size, made = new Float32Array(rows * width);
  for (let head = 0; head < heads; head++) {
    for (let row = 0; row < rows; row++) {
      const scores = Array.from({ length: keys }, (_, key) => {
        let score = 0;
        for (let i = head * size; i < (head + 1) * size; i++) score += q[row * width + i] * k[key * width + i];
        return score / Math.sqrt(size);
      });
      const most = Math.max(...scores), weights = scores.map((score) => Math.exp(score - most));
      const total = weights.reduce((a, b) => a + b, 0);
      weights.forEach((weight, key) => {
        for (let i = head * size; i < (head + 1) * size; i++) made[row * width + i] += (weight / total) * v[key * width + i];
      });
    }
  }
  return made;
}

function lastRow({ data, dims: [rows, ...rest] }) {
  return { data: data.slice((data.length / rows) * (rows - 1)), dims: [1, ...rest] };
}

function inBytes(values) {
  const pixels = new Uint8ClampedArray((values.length / 3) * 4).fill(255);
  for (let i = 0; i < values.length / 3; i++)
    for (let color = 0; color < 3; color++) pixels[4 * i + color] = 255 * values[3 * i + color];
  return pixels;
}
