// Reference images of a pipeline that supports them.

import { add, button, dataUrl, parts, smaller } from "./dom.js";

let urls = [];

/** Return the images in base64 for the API; none if the pipeline does not support them. */
export const references = () => (parts.references.hidden ? [] : urls.map((url) => url.split(",")[1]));

export async function addReferences(files, most) {
  try {
    for (const file of files) {
      if (urls.length >= most) throw new Error(`This pipeline takes at most ${most} reference images.`);
      const url = await dataUrl(file);
      await smaller(url).catch(() => {
        throw new Error(`${file.name} is not an image that this browser can read.`);
      });
      urls.push(url);
    }
  } finally {
    parts.reference_files.value = "";
    show(); // those before a file that was refused are there
  }
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
