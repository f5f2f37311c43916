// The image to start from, and the mask that is painted on it: with a pointer, a finger, or the keyboard.

const PAINT = "#e0348c";

export class Start {
  /** parts: the elements by id. size: what gives {width, height} of the image that is to be drawn. tell: shows words. */
  constructor(parts, size, tell) {
    this.parts = parts;
    this.size = size;
    this.painted = false;
    this.at = null; // where the keyboard's brush is
    parts.start_file.addEventListener("change", () => {
      tell(null);
      this.take(parts.start_file.files[0]).catch((error) => tell(error.message));
    });
    parts.clear_mask.addEventListener("click", () => this.clear());
    parts.remove_start.addEventListener("click", () => this.remove());
    const canvas = parts.mask;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.stroke(event);
    });
    canvas.addEventListener("pointermove", (event) => event.buttons && this.stroke(event));
    canvas.addEventListener("pointerup", () => (this.last = null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.show());
    this.strokes = document.createElement("canvas"); // what is painted; the visible canvas shows the brush too
  }

  get given() {
    return !this.parts.start.hidden && !this.parts.start_tools.hidden; // another pipeline may have no use for it
  }

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
    this.parts.start_tools.hidden = false;
    this.clear();
  }

  /** Take an image that was drawn here. */
  async takeUrl(url) {
    await this.take(new File([await (await fetch(url)).blob()], "image.png", { type: "image/png" }));
  }

  remove() {
    this.parts.start_tools.hidden = true;
    this.parts.start_file.value = "";
    this.painted = false;
  }

  clear() {
    this.strokes.getContext("2d").clearRect(0, 0, this.strokes.width, this.strokes.height);
    this.painted = false;
    this.at = this.last = null;
    this.show();
  }

  stroke(event) {
    const { mask } = this.parts, box = mask.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * mask.width;
    const y = ((event.clientY - box.top) / box.height) * mask.height;
    this.paint(this.last ?? { x, y }, { x, y });
    this.last = { x, y };
  }

  key(event) {
    const { mask, brush } = this.parts, step = (Number(brush.value) / 200) * mask.width;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    this.at ??= { x: mask.width / 2, y: mask.height / 2 };
    if (moves[event.key]) {
      const [x, y] = moves[event.key];
      this.at = { x: clamp(this.at.x + x, mask.width), y: clamp(this.at.y + y, mask.height) };
    } else if (event.key === " ") this.paint(this.at, this.at);
    else if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else return;
    event.preventDefault();
    this.show(this.at);
  }

  paint(from, to) {
    const context = this.strokes.getContext("2d");
    context.strokeStyle = PAINT;
    context.lineCap = "round";
    context.lineWidth = this.width();
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x + 0.01, to.y); // a line of no length is not drawn
    context.stroke();
    this.painted = true;
    this.show();
  }

  width() {
    return (Number(this.parts.brush.value) / 100) * this.parts.mask.width;
  }

  show(brush = null) {
    const { mask } = this.parts, context = mask.getContext("2d");
    context.clearRect(0, 0, mask.width, mask.height);
    context.drawImage(this.strokes, 0, 0);
    if (!brush) return;
    context.strokeStyle = "#000";
    context.lineWidth = Math.max(1, mask.width / 150);
    context.beginPath();
    context.arc(brush.x, brush.y, this.width() / 2, 0, 2 * Math.PI);
    context.stroke();
  }

  /** {image, mask} as PNG files of the size that is drawn; the mask is white where something is drawn, or null. */
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
