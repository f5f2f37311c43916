// Fetches and draws beside the page, so that the page stays responsive. Messages: see `handlers`; each is answered by one
// { done } or { failed }, and `draw` by { told } in between.

import { Engine, requireAdapter } from "./engine.js";
import { Files } from "./files.js";
import { inWords } from "./words.js";

let open = null; // what the last drawing used
let doing = new AbortController();

const handlers = {
  /** place: what an Engine is made of: base, index, device, ort, keep. wanted: of `Engine.draw`. */
  async draw({ place, wanted }) {
    doing = new AbortController();
    const { signal } = doing;
    const tell = (told) => postMessage({ told });
    if (place.device === "webgpu") await requireAdapter(place.index); // before a model is fetched that cannot run
    const key = JSON.stringify([place.base, place.device, place.keep, place.index.files]);
    if (open?.key !== key) open = { key, files: new Files(place.base, place.index.files, place.keep), engine: null };
    await open.files.fetchAll(signal, (told) => tell({ phase: "fetch", ...told }));
    signal.throwIfAborted();
    tell({ phase: "start" });
    open.engine ??= await Engine.open(place.index, open.files, place.device, place.ort, tell);
    return open.engine.draw(wanted, signal);
  },
};

onmessage = async ({ data: { call, ...given } }) => {
  if (call === "cancel") return doing.abort();
  try {
    const done = await handlers[call](given);
    postMessage({ done }, [done.pixels.buffer]);
  } catch (error) {
    const cancelled = doing.signal.aborted;
    if (!cancelled) open = null; // a device that failed once may go on failing
    postMessage({ failed: cancelled ? { cancelled } : inWords(error, "Generating", given.place.device) });
  }
};
