// One image of the grid: its preview, how far it is, what became of it.

import { tell } from "/page/history.js";

export class Tile {
  /** settings: as the API names them. note: what stands before them; compared: of which LoRA that tells, if of any. */
  constructor(settings, note, compared) {
    this.settings = settings;
    this.compared = compared;
    this.stop = new AbortController();
    this.item = document.createElement("li");
    this.figure = add(this.item, "figure", "tile");
    this.frame = add(this.figure, "div", "frame");
    this.frame.style.aspectRatio = settings.size.replace("x", " / ");
    this.image = null;
    this.bar = add(this.figure, "progress");
    this.bar.setAttribute("aria-label", "How far the image is");
    this.caption = add(this.figure, "figcaption");
    this.buttons = add(this.figure, "div", "buttons");
    this.note = note;
    this.say("It waits.");
    this.cancel = this.button("Cancel", () => this.stop.abort());
  }

  button(text, action) {
    const made = add(this.buttons, "button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", action);
    return made;
  }

  say(text, wrong = false) {
    this.caption.replaceChildren();
    if (this.note) add(this.caption, "strong").textContent = this.note;
    this.caption.append(text);
    this.caption.classList.toggle("wrong", wrong);
  }

  progress(done, total) {
    this.bar.max = total;
    this.bar.value = done;
    this.say(`Step ${done} of ${total}.`);
  }

  preview(url) {
    this.show(url, "unfinished", `Not finished yet: ${this.settings.prompt}`);
  }

  show(url, kind, alt) {
    this.image ??= add(this.frame, "img");
    this.image.className = kind;
    this.image.alt = alt;
    this.image.src = url;
  }

  /** actions: text -> what a button with that text does. */
  finished(url, flagged, attempts, actions) {
    this.url = url;
    this.show(url, "finished", this.settings.prompt);
    const passed = { true: " The safety checker holds it back.", false: " The safety checker passed it." }[flagged] ?? "";
    this.say(`${tell({ ...this.settings, loras: this.settings.loras.filter((lora) => lora.name !== this.compared) })}.${passed}${attempts > 1 ? ` Drawn ${attempts} times.` : ""}`, flagged === true);
    this.end();
    const save = add(this.buttons, "a");
    save.href = url;
    save.download = `${this.settings.seed}.png`;
    save.textContent = "Save";
    for (const [text, action] of Object.entries(actions)) this.button(text, action);
  }

  failed(words, again) {
    this.say(words, true);
    this.end();
    this.button("Try again", again);
  }

  end() {
    this.bar.remove();
    this.cancel.remove();
  }
}

function add(parent, name, kind = "") {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}
