// Client of the server's API. Every failure is a Problem with a message to show.

import { dataUrl } from "./dom.js";

export class Problem extends Error {
  /** status: HTTP status, 0 without an answer. retryAfter: seconds. */
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const KEY = "sdflow.key";

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Resolve a path of the server, which may be behind a proxy's prefix. */
const at = (path) => new URL(`..${path}`, import.meta.url);

/** Fetch a successful answer. Throws Problem otherwise. */
export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(at(path), { ...options, headers: { ...headers(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer.");
  }
  if (answer.ok) return answer;
  let message = `The server answered with status ${answer.status}.`;
  try {
    const said = await answer.json();
    message = said.detail ?? said.error.message;
  } catch {
    // Not an error of this server, so there is no better message.
  }
  const retry = Number(answer.headers.get("Retry-After"));
  throw new Problem(message, answer.status, retry || null);
}

/** Return the pipelines of `/v1/models`. */
export async function models() {
  return (await (await ask("/v1/models")).json()).data;
}

/** Return the LoRAs that the server can read. */
export async function loras() {
  const { data } = await (await ask("/v1/loras")).json();
  return data.filter((lora) => !lora.error);
}

export async function uploadLora(file) {
  const form = new FormData();
  form.append("file", file);
  return (await ask("/v1/loras", { method: "POST", body: form })).json();
}

/** Return a list of A1111's API: "samplers" or "schedulers". */
export async function webuiList(name) {
  return (await ask(`/sdapi/v1/${name}`)).json();
}

/** Return the metadata in an image file: {items, parameters}. */
export async function imageText(file) {
  const body = JSON.stringify({ image: await dataUrl(file) });
  return (await ask("/sdapi/v1/png-info", { method: "POST", body, headers: { "Content-Type": "application/json" } })).json();
}

/** Whether the server is ready to generate. */
export async function ready() {
  try {
    return (await fetch(at("/readyz"))).ok;
  } catch {
    return false;
  }
}

/**
 * Generate one image. fields: those of the API. start: {image: Blob, mask: Blob or null}, or null.
 * on: {progress(done, total), preview(url)}. Returns {url, seed, flagged, warnings}. Throws Problem, or AbortError if aborted.
 */
export async function draw(fields, start, on, signal) {
  const wanted = { ...fields, n: 1, stream: true, progress: true, partial_images: 8 };
  const answer = start ? await edit(wanted, start, signal) : await generate(wanted, signal);
  for await (const event of events(answer.body)) {
    if (event.type === "error") throw new Problem(event.error.message, answer.status);
    const kind = event.type.split(".").pop();
    if (kind === "progress") on.progress(event.done, event.total);
    if (kind === "partial_image") on.preview(url(event));
    if (kind === "completed") return { url: url(event), seed: event.seed, flagged: event.flagged, warnings: event.warnings ?? [] };
  }
  throw new Problem("The server stopped before the image was finished.");
}

const url = (event) => `data:image/${event.output_format};base64,${event.b64_json}`;

function generate(fields, signal) {
  return ask("/v1/images/generations", {
    method: "POST",
    body: JSON.stringify(fields),
    headers: { "Content-Type": "application/json" },
    signal,
  });
}

function edit(fields, start, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    form.append(name, typeof value === "object" ? JSON.stringify(value) : String(value));
  }
  form.append("image", start.image, "image.png");
  if (start.mask) form.append("mask", start.mask, "mask.png");
  return ask("/v1/images/edits", { method: "POST", body: form, signal });
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The connection to the server was lost while generating.");
    }
    if (read.done) return;
    text += read.value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
    }
  }
}
