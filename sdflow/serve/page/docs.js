// Interactive API reference from /openapi.json, without third-party resources.

import * as api from "./api.js";
import { add, parts } from "./dom.js";

let document_ = null;

const resolved = (schema) => (schema?.$ref ? document_.components.schemas[schema.$ref.split("/").pop()] : schema ?? {});

/** Describe the type of a field. */
function kind(schema) {
  const one = resolved(schema);
  if (one.anyOf) return one.anyOf.filter((each) => each.type !== "null").map(kind).join(" or ");
  if (one.enum) return one.enum.map((each) => JSON.stringify(each)).join(", ");
  if (one.format === "binary") return "file";
  if (one.type === "array") return `list of ${kind(one.items)}`;
  return one.title && one.properties ? one.title : one.type ?? "anything";
}

function fields(parent, schema) {
  const table = add(add(parent, "div", "", "wide"), "table"), head = add(add(table, "thead"), "tr");
  for (const title of ["Field", "What", "About"]) add(head, "th", title).scope = "col";
  const body = add(table, "tbody");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = add(body, "tr");
    add(row, "th", (schema.required ?? []).includes(name) ? `${name} *` : name).scope = "row";
    add(row, "td", kind(field));
    const plain = field.default === undefined || field.default === null || field.default === "";
    add(row, "td", [(field.description ?? "").replaceAll("`", ""), plain ? "" : `Default: ${JSON.stringify(field.default)}.`].join(" ").trim());
  }
  return table;
}

const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

function operation(path, method, told) {
  const details = document.createElement("details"), summary = add(details, "summary");
  details.className = "operation";
  add(summary, "strong", method.toUpperCase(), "method");
  add(summary, "code", path);
  add(summary, "span", told.summary ?? "");
  const [type, content] = Object.entries(told.requestBody?.content ?? {})[0] ?? [];
  const schema = resolved(content?.schema), form = add(details, "form");
  form.setAttribute("aria-label", `Try ${method.toUpperCase()} ${path}`);
  if (schema.properties) fields(form, schema);
  const inputs = {}, files = {};
  for (const { name } of told.parameters ?? []) inputs[name] = labelled(form, name, "text");
  for (const [name, field] of Object.entries(type?.startsWith("multipart") ? schema.properties : {})) {
    if (field.format === "binary") files[name] = labelled(form, name, "file");
  }
  let body = null;
  if (schema.properties) {
    const label = add(form, "label", type.startsWith("multipart") ? "The other fields" : "The body");
    body = add(label, "textarea");
    body.spellcheck = false;
    body.value = pretty(content.example ?? schema.examples?.[0] ?? {});
    body.rows = Math.min(14, body.value.split("\n").length + 1);
  }
  const send = add(form, "button", "Try it", "primary");
  const answer = add(form, "div");
  answer.setAttribute("role", "status");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    send.disabled = true;
    try {
      await show(answer, await ask(path, method, inputs, files, body, type));
    } catch (error) {
      answer.replaceChildren();
      add(answer, "p", error.message, "problem");
    }
    send.disabled = false;
  });
  for (const [status, found] of Object.entries(told.responses)) {
    for (const [what, { example }] of Object.entries(found.content ?? {})) {
      const each = add(details, "details");
      add(each, "summary", `${status}: ${found.description} ${what === "application/json" ? "" : what}`);
      add(each, "pre", pretty(example));
    }
  }
  return details;
}

function labelled(parent, name, type) {
  const made = add(add(parent, "label", `${name} `), "input");
  made.type = type;
  return made;
}

function ask(path, method, inputs, files, body, type) {
  const whole = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(inputs[name].value));
  if (!body) return api.ask(whole, { method: method.toUpperCase() });
  let said;
  try {
    said = JSON.parse(body.value);
  } catch (error) {
    throw new Error(`The body is not valid JSON: ${error.message}`);
  }
  if (!type.startsWith("multipart")) {
    return api.ask(whole, { method: "POST", body: JSON.stringify(said), headers: { "Content-Type": type } });
  }
  const form = new FormData();
  for (const [name, value] of Object.entries(said)) form.append(name, typeof value === "object" ? JSON.stringify(value) : value);
  for (const [name, input] of Object.entries(files)) if (input.files[0]) form.append(name, input.files[0]);
  return api.ask(whole, { method: "POST", body: form });
}

/** Show images as images and other answers as text. */
async function show(place, answer) {
  const text = await answer.text();
  place.replaceChildren();
  let found = null;
  try {
    found = JSON.parse(text);
  } catch {
    add(place, "pre", text.replace(/"b64_json": "[^"]{40,}"/g, '"b64_json": "…"').slice(0, 20000)); // events or metrics
    return;
  }
  const images = [...(found.images ?? []), ...(Array.isArray(found.data) ? found.data.map((each) => each.b64_json) : [])];
  for (const [number, image] of images.filter(Boolean).entries()) {
    const shown = add(place, "img");
    shown.src = `data:image/${found.output_format ?? "png"};base64,${image}`;
    shown.alt = `Image ${number + 1} of the answer`;
  }
  const short = (_, value) => (typeof value === "string" && value.length > 400 ? `${value.slice(0, 40)}…` : value);
  add(place, "pre", `${answer.status}\n${JSON.stringify(found, short, 2)}`);
}

async function begin() {
  parts.problem.hidden = true;
  try {
    document_ = await (await api.ask("/openapi.json")).json();
  } catch (error) {
    parts.problem.textContent = error.message;
    parts.problem.hidden = false;
    parts.key_field.hidden = error.status !== 401;
    return;
  }
  parts.key_field.hidden = true;
  parts.about.textContent = document_.info.description;
  const groups = {};
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, told] of Object.entries(methods)) (groups[told.tags[0]] ??= []).push(operation(path, method, told));
  }
  parts.operations.replaceChildren();
  for (const [title, made] of Object.entries(groups)) {
    const section = add(parts.operations, "section");
    add(section, "h2", title);
    section.append(...made);
  }
}

parts.key.addEventListener("change", () => {
  api.setKey(parts.key.value);
  begin();
});
await begin();
