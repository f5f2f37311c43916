// One image of the grid at full size.

import { parts } from "./dom.js";

let shown = null;

const images = () => [...parts.images.querySelectorAll("img.finished")];

export function view(image) {
  shown = image;
  const all = images(), place = all.indexOf(image);
  parts.viewer_image.src = image.src;
  parts.viewer_image.alt = image.alt;
  parts.viewer_about.textContent = `${image.naturalWidth}x${image.naturalHeight}, ${place + 1} of ${all.length}`;
  parts.viewer_previous.disabled = place <= 0;
  parts.viewer_next.disabled = place + 1 >= all.length;
  if (!parts.viewer.open) parts.viewer.showModal();
}

function move(by) {
  const all = images(), next = all[all.indexOf(shown) + by];
  if (next) view(next);
}

parts.viewer_previous.addEventListener("click", () => move(-1));
parts.viewer_next.addEventListener("click", () => move(1));
parts.viewer_close.addEventListener("click", () => parts.viewer.close());
parts.viewer_actual.addEventListener("click", () => {
  const actual = parts.viewer.classList.toggle("actual");
  parts.viewer_actual.setAttribute("aria-pressed", actual);
});
parts.viewer.addEventListener("click", (event) => event.target === parts.viewer && parts.viewer.close());
parts.viewer.addEventListener("keydown", (event) => {
  if (parts.viewer.classList.contains("actual")) return; // arrows move the image
  if (event.key === "ArrowLeft") move(-1);
  if (event.key === "ArrowRight") move(1);
});
