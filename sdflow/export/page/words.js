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

const MEMORY = /out of memory|outofmemory|bad_alloc|alloc\w* failed|failed to (?:allocate|create .*buffer)|array buffer length|memory access out of bounds|error occurred in memory copy|exceeds the max\w* \w*buffer/i;
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
      message: `ONNX Runtime Web cannot run this model on ${device === "webgpu" ? "WebGPU" : "the CPU"}: ${text}`,
      remedy: "Export a pipeline that was built for another target.",
    };
  }
  return { message: `${doing} failed: ${text}`, remedy: device === "webgpu" ? "Try again, or choose the CPU under Device." : "" };
}

export function fullDisk() {
  return {
    message: "The browser has no more space for this page's files.",
    remedy: "Free disk space, delete the stored files, or untick “Store files in this browser”.",
  };
}

function outOfMemory(device, text) {
  const where = device === "webgpu" ? "GPU" : "browser";
  return {
    message: `The ${where} ran out of memory: ${text}`,
    remedy: `Choose a smaller image, or close other tabs and programs.${device === "webgpu" ? "" : " The CPU can use at most 4 GB here; large models need WebGPU."}`,
  };
}
