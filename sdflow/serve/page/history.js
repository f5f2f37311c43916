// What was drawn, with its settings, kept in this browser. Images are kept small, so that many fit.

const PLACE = "sdflow.history";
const MOST = 60;

export class History {
  /** use: called with the settings of an image that are to be used again. */
  constructor(parts, use) {
    this.parts = parts;
    this.use = use;
    parts.clear_history.addEventListener("click", () => this.write([]));
    this.show();
  }

  read() {
    try {
      const found = JSON.parse(localStorage.getItem(PLACE) ?? "[]");
      return Array.isArray(found) ? found : [];
    } catch {
      return []; // what somebody else put there is not ours to show
    }
  }

  async add(settings, url) {
    const entry = { settings, small: await smaller(url), at: Date.now() };
    this.write([entry, ...this.read()].slice(0, MOST));
  }

  write(entries) {
    for (let kept = entries.length; ; kept = Math.floor(kept / 2)) {
      try {
        localStorage.setItem(PLACE, JSON.stringify(entries.slice(0, kept)));
        break;
      } catch (error) {
        if (!kept) break; // this browser keeps nothing: the page works all the same
      }
    }
    this.show();
  }

  show() {
    const { history, history_empty: empty, clear_history: clear } = this.parts, entries = this.read();
    empty.hidden = entries.length > 0;
    clear.hidden = !entries.length;
    history.replaceChildren(...entries.map((entry) => this.item(entry)));
  }

  item({ settings, small, at }) {
    const item = document.createElement("li"), text = document.createElement("div");
    const image = new Image();
    image.src = small;
    image.alt = "";
    const prompt = document.createElement("p"), told = document.createElement("p");
    prompt.textContent = settings.prompt;
    told.className = "hint";
    told.textContent = `${tell(settings)}, ${new Date(at).toLocaleString()}`;
    const again = document.createElement("button");
    again.type = "button";
    again.textContent = "Use these again";
    again.setAttribute("aria-label", `Use these again: ${settings.prompt}, seed ${settings.seed}`);
    again.addEventListener("click", () => this.use(settings));
    text.append(prompt, told, again);
    item.append(image, text);
    return item;
  }
}

/** The settings of an image in a line. */
export function tell(settings) {
  const loras = (settings.loras ?? []).map((lora) => `${lora.name} ${lora.scale}`);
  const parts = [`seed ${settings.seed}`, settings.size, `${settings.steps} steps`, `guidance ${settings.guidance_scale}`];
  return [...parts, settings.scheduler, ...loras].filter(Boolean).join(", ");
}

async function smaller(url, side = 144) {
  const image = new Image();
  image.src = url;
  await image.decode();
  const scale = side / Math.max(image.naturalWidth, image.naturalHeight);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.naturalWidth * scale));
  canvas.height = Math.max(1, Math.round(image.naturalHeight * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.8);
}
