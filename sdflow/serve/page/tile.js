// One image of the grid: preview, progress and result.

import { add, button, parts, save } from "./dom.js";
import { tell } from "./history.js";
import { view } from "./viewer.js";

export class Tile {
  /** settings: fields of the API. files: sent with them. note: prefix of the caption. compared: the LoRA in the note, if any. */
  constructor(settings, files, note, compared) {
    Object.assign(this, { settings, files, note, compared, stop: new AbortController(), image: null, again: null });
    this.item = document.createElement("li");
    this.figure = add(this.item, "figure", "", "tile");
    this.frame = add(this.figure, "div", "", "frame");
    this.frame.style.aspectRatio = settings.size.replace("x", " / ");
    this.bar = add(this.figure, "progress");
    this.bar.setAttribute("aria-label", "Progress of the image");
    this.caption = add(this.figure, "figcaption");
    this.buttons = add(this.figure, "div", "", "buttons");
    this.say("Waiting.");
    this.cancel = button(this.buttons, "Cancel", () => this.stop.abort());
  }

  say(text, wrong = false) {
    this.caption.replaceChildren();
    if (this.note) add(this.caption, "strong", this.note);
    this.caption.append(text);
    this.caption.classList.toggle("wrong", wrong);
  }

  progress(done, total) {
    this.first ??= { done, at: performance.now() }; // the first step may include loading a model
    const steps = done - this.first.done;
    const left = steps ? ((performance.now() - this.first.at) / steps) * (total - done) / 1000 : null;
    this.bar.max = total;
    this.bar.value = done;
    this.say(`Step ${done} of ${total}${left === null ? "." : `, about ${left < 10 ? left.toFixed(1) : Math.round(left)} s left.`}`);
  }

  preview(url) {
    this.show(url, "unfinished", `Preview: ${this.settings.prompt}`);
  }

  show(url, kind, alt) {
    this.image ??= add(this.frame, "img");
    Object.assign(this.image, { className: kind, alt, src: url });
  }

  /** drawn: result of `api.draw`. actions: button text -> handler. */
  finished({ url, flagged, warnings }, attempts, actions) {
    this.url = url;
    this.show(url, "finished", this.settings.prompt);
    const open = button(this.frame, "", () => view(this.image), `Full size: seed ${this.settings.seed}`);
    open.className = "open";
    open.append(this.image);
    const passed = { true: " Blocked by the safety checker.", false: " Passed the safety checker." }[flagged] ?? "";
    const loras = this.settings.loras.filter((lora) => lora.name !== this.compared);
    this.say(`${tell({ ...this.settings, loras })}.${passed}${attempts > 1 ? ` ${attempts} attempts.` : ""}`, flagged === true);
    for (const warning of warnings) add(this.caption, "p", `Warning: ${warning}`, "warning");
    this.end();
    button(this.buttons, "Save", () => this.save());
    for (const [text, action] of Object.entries(actions)) button(this.buttons, text, action);
    button(this.buttons, "Remove", () => this.remove(), `Remove the image with seed ${this.settings.seed}`);
  }

  save() {
    save(this.url, `${this.settings.seed}.png`);
  }

  /** wrong: whether it failed rather than was cancelled. */
  ended(words, wrong, again) {
    this.again = again;
    this.frame.hidden = !this.image;
    this.say(words, wrong);
    this.end();
    button(this.buttons, "Try again", again);
    button(this.buttons, "Remove", () => this.remove());
  }

  remove() {
    this.stop.abort();
    this.item.remove();
    parts.images.dispatchEvent(new Event("removed"));
  }

  end() {
    this.bar.remove();
    this.cancel.remove();
  }
}
