// Errors in words: what happened, and what to do.

/** An error whose message says what happened. remedy: what to do. */
export class Problem extends Error {
  constructor(message, remedy = "") {
    super(message);
    this.remedy = remedy;
  }
}

/** Bytes as text, in decimal units. */
export function spellBytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (count >= size) return `${Number((count / size).toPrecision(3))} ${unit}`;
  return `${count} B`;
}

const MEMORY = /out of memory|outofmemory|bad_alloc|alloc\w* failed|failed to (?:allocate|create .*buffer)|array buffer length|memory access out of bounds|exceeds the max\w* \w*buffer/i;
const KERNEL = /(?:could not find an implementation for|no kernel\S* (?:for|found for)|not implemented)\W*([\w.]*)/i;

/** Any error as { message, remedy }. doing: what was being done. device: webgpu or wasm. */
export function inWords(error, doing, device) {
  if (error instanceof Problem) return { message: error.message, remedy: error.remedy };
  const text = error instanceof Error ? error.message : [error?.constructor?.name, error?.message].filter(Boolean).join(": ");
  if (error?.name === "QuotaExceededError") return fullDisk();
  if (MEMORY.test(text) || (error instanceof RangeError && /buffer|memory|length/i.test(text))) return outOfMemory(device, text);
  const kernel = KERNEL.exec(text);
  if (kernel) {
    return {
      message: `ONNX Runtime Web cannot run this model on ${device === "webgpu" ? "WebGPU" : "the processor"}: ${text}`,
      remedy: "Export the pipeline from a build for another target.",
    };
  }
  return { message: `${doing} failed: ${text}`, remedy: device === "webgpu" ? "Try again; the processor may still work: choose it under Device." : "" };
}

export function fullDisk() {
  return {
    message: "The browser has no more room for this page's files.",
    remedy: "Free space on the disk, delete the kept files below, or untick “Keep the files in this browser”.",
  };
}

function outOfMemory(device, text) {
  const where = device === "webgpu" ? "graphics device" : "browser";
  return {
    message: `The ${where} ran out of memory. It says: ${text}`,
    remedy: `Take a smaller image, close other tabs and programs, or reload the page${device === "webgpu" ? "" : "; the processor has at most 4 GB here, so large models need WebGPU"}.`,
  };
}
