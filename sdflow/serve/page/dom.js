// What the parts of the page share: the elements by id, making elements, and values kept in this browser.

export const parts = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));

export function add(parent, name, text = "", kind = "") {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

/** label: what is read out, where the text is not enough. */
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
    return otherwise; // what another program put there, or storage that is off
  }
}

/** Whether there was room for it. */
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

/** A file from a data URL: a content security policy may not let `fetch` read one. */
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

/** A small version of an image, as a data URL. Raises Error for what is no image. */
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
