// The reference images of a pipeline that edits with them.

import { add, button, dataUrl, parts, smaller } from "./dom.js";

let urls = [];

/** In base64, as the API takes them; none where the pipeline has no use for them. */
export const references = () => (parts.references.hidden ? [] : urls.map((url) => url.split(",")[1]));

export async function addReferences(files, most) {
  for (const file of files) {
    if (urls.length >= most) throw new Error(`This pipeline takes at most ${most} reference images.`);
    const url = await dataUrl(file);
    await smaller(url).catch(() => {
      throw new Error(`${file.name} is not an image that this browser can read.`);
    });
    urls.push(url);
  }
  parts.reference_files.value = "";
  show();
}

function show() {
  parts.reference_list.replaceChildren();
  for (const [number, url] of urls.entries()) {
    const item = add(parts.reference_list, "li"), image = add(item, "img");
    image.src = url;
    image.alt = `Reference image ${number + 1}`;
    button(item, "Remove", () => {
      urls = urls.filter((_, index) => index !== number);
      show();
    }, `Remove reference image ${number + 1}`);
  }
}
