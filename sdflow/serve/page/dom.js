// Helpers for the page: elements by id, creating elements, and local storage.

export const parts = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

export function add(parent, name, text = "", kind = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

/** label: for screen readers, if the text is not enough. */
export function button(parent, text, action, label = "") {
  const made = add(parent, "button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

export function kept(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`sdflow.${name}`)) ?? otherwise;
  } catch {
    return otherwise; // not our value, or storage is disabled
  }
}

/** Store a value. Returns whether there was room. */
export function keep(name, value) {
  try {
    localStorage.setItem(`sdflow.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function save(url, name) {
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
}

/** Convert a data URL to a file without `fetch`, which a content security policy may block. */
export function fileOf(url, name = "image.png") {
  const [head, encoded] = url.split(",");
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  return new File([bytes], name, { type: head.slice(5).split(";")[0] });
}

export function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(new Error(`${file.name} cannot be read.`)));
    reader.readAsDataURL(file);
  });
}

/** Return a thumbnail as a data URL. Throws Error if the file is not an image. */
export async function smaller(url, side = 144) {
  const image = new Image(), canvas = document.createElement("canvas");
  image.src = url;
  await image.decode();
  const scale = Math.min(1, side / Math.max(image.naturalWidth, image.naturalHeight));
  canvas.width = Math.max(1, Math.round(image.naturalWidth * scale));
  canvas.height = Math.max(1, Math.round(image.naturalHeight * scale));
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.8);
}
