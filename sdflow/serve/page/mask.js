// The start image and the mask painted on it by mouse, touch or keyboard.

import { fileOf } from "./dom.js";

const PAINT = "#e0348c", MOST_UNDONE = 30;

export class Start {
  /** parts: elements by id. size: returns {width, height} of the image to generate. */
  constructor(parts, size) {
    Object.assign(this, { parts, size, painted: false, erasing: false, before: [] });
    this.at = null; // position of the keyboard's brush
    parts.clear_mask.addEventListener("click", () => this.clear());
    parts.remove_start.addEventListener("click", () => this.remove());
    parts.undo.addEventListener("click", () => this.undo());
    parts.erase.addEventListener("click", () => this.erase(!this.erasing));
    parts.zoom.addEventListener("input", () => this.zoom());
    const canvas = parts.mask;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.remember();
      this.stroke(event);
    });
    canvas.addEventListener("pointermove", (event) => (event.buttons & 1 ? this.stroke(event) : this.show(this.place(event))));
    canvas.addEventListener("pointerup", () => this.lift());
    canvas.addEventListener("pointerleave", () => this.show());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.show());
    this.strokes = document.createElement("canvas"); // without the brush, which the visible canvas shows
  }

  get given() {
    return !this.parts.start.hidden && !this.parts.start_tools.hidden; // hidden if the pipeline does not support it
  }

  /** Throws Error if the file is not an image. */
  async take(file) {
    if (!file) return;
    const { start_image: image, mask } = this.parts;
    if (image.src) URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(file);
    try {
      await image.decode();
    } catch {
      this.remove();
      throw new Error(`${file.name} is not an image that this browser can read.`);
    }
    for (const canvas of [mask, this.strokes]) {
      canvas.width = image.naturalWidth;
      canvas.height = image.naturalHeight;
    }
    this.context = this.strokes.getContext("2d", { willReadFrequently: true });
    this.parts.start_tools.hidden = false;
    this.parts.zoom.value = 1;
    this.zoom();
    this.erase(false);
    this.clear();
    this.before = [];
    this.lift();
  }

  /** Use a generated image. */
  async takeUrl(url) {
    await this.take(fileOf(url));
    this.parts.start.scrollIntoView({ block: "nearest" });
  }

  remove() {
    this.parts.start_tools.hidden = true;
    this.parts.start_file.value = "";
    this.painted = false;
  }

  erase(on) {
    this.erasing = on;
    this.parts.erase.setAttribute("aria-pressed", on);
  }

  zoom() {
    this.parts.canvas_size.style.width = `${100 * Number(this.parts.zoom.value)}%`;
  }

  // ---- undo

  remember() {
    this.before = [...this.before, this.pixels()].slice(-MOST_UNDONE);
  }

  pixels() {
    return this.context.getImageData(0, 0, this.strokes.width, this.strokes.height);
  }

  undo() {
    const last = this.before.pop();
    if (last) this.context.putImageData(last, 0, 0);
    this.lift();
  }

  clear() {
    this.remember();
    this.context.clearRect(0, 0, this.strokes.width, this.strokes.height);
    this.at = null;
    this.lift();
  }

  /** Called after a stroke. */
  lift() {
    this.last = null;
    this.painted = new Uint32Array(this.pixels().data.buffer).some(Boolean);
    this.parts.undo.disabled = !this.before.length;
    this.show();
  }

  // ---- painting

  place(event) {
    const { mask } = this.parts, box = mask.getBoundingClientRect();
    return { x: ((event.clientX - box.left) / box.width) * mask.width, y: ((event.clientY - box.top) / box.height) * mask.height };
  }

  stroke(event) {
    const at = this.place(event);
    this.paint(this.last ?? at, at);
    this.last = at;
  }

  key(event) {
    const { mask, brush } = this.parts, step = (Number(brush.value) / 200) * mask.width;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    this.at ??= { x: mask.width / 2, y: mask.height / 2 };
    if (moves[event.key]) {
      const [x, y] = moves[event.key];
      this.at = { x: clamp(this.at.x + x, mask.width), y: clamp(this.at.y + y, mask.height) };
    } else if (event.key === " ") {
      this.remember();
      this.paint(this.at, this.at);
      this.lift();
    } else if (event.key.toLowerCase() === "z" && (event.ctrlKey || event.metaKey)) this.undo();
    else if (event.key.toLowerCase() === "e") this.erase(!this.erasing);
    else if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else return;
    event.preventDefault();
    this.show(this.at);
  }

  paint(from, to) {
    const { context } = this;
    context.globalCompositeOperation = this.erasing ? "destination-out" : "source-over";
    context.strokeStyle = PAINT;
    context.lineCap = "round";
    context.lineWidth = this.width();
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x + 0.01, to.y); // canvas does not draw a line of length zero
    context.stroke();
    context.globalCompositeOperation = "source-over";
    this.show(to);
  }

  /** Brush width in image pixels, constant on the screen at every zoom. */
  width() {
    return ((Number(this.parts.brush.value) / 100) * this.parts.mask.width) / Number(this.parts.zoom.value);
  }

  show(brush = null) {
    const { mask } = this.parts, context = mask.getContext("2d");
    context.clearRect(0, 0, mask.width, mask.height);
    context.drawImage(this.strokes, 0, 0);
    if (!brush) return;
    context.lineWidth = Math.max(1, mask.width / 300);
    for (const [color, wider] of [["#000", 0], ["#fff", context.lineWidth]]) {
      context.strokeStyle = color;
      context.beginPath();
      context.arc(brush.x, brush.y, this.width() / 2 + wider, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  /** Return {image, mask} as PNG files of the size to generate. The mask is white where painted, null if nothing is. */
  async files() {
    if (!this.given) return null;
    const { width, height } = this.size();
    const image = await png(width, height, (context) => context.drawImage(this.parts.start_image, 0, 0, width, height));
    if (!this.painted) return { image, mask: null };
    const mask = await png(width, height, (context) => {
      context.drawImage(this.strokes, 0, 0, width, height);
      context.globalCompositeOperation = "source-in";
      context.fillStyle = "#fff";
      context.fillRect(0, 0, width, height);
      context.globalCompositeOperation = "destination-over";
      context.fillStyle = "#000";
      context.fillRect(0, 0, width, height);
    });
    return { image, mask };
  }
}

const clamp = (value, most) => Math.min(Math.max(value, 0), most);

function png(width, height, paint) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  paint(canvas.getContext("2d"));
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}
