// The model's files: fetched once, verified by size and SHA-256, and kept in the browser's own file system (OPFS) under their
// digests, so that what is the same in another model is not fetched again. A file that is cut short is gone on with.

import { Problem, fullDisk, spellBytes } from "./words.js";

const FOLDER = "sdflow", LOCK = "sdflow-files", TRIES = 4, PAUSE = 500;

/** The folder of kept files, or null where there is none and `create` is false. */
async function keptFolder(create) {
  if (!navigator.storage?.getDirectory) throw noStore();
  try {
    const root = await navigator.storage.getDirectory();
    return await root.getDirectoryHandle(FOLDER, { create });
  } catch (error) {
    if (error.name === "NotFoundError") return null;
    throw noStore();
  }
}

const noStore = () =>
  new Problem(
    "This browser does not let the page store files; private windows often do not.",
    "Use a normal window, or untick “Store files in this browser” to download them on each visit.",
  );

/** Bytes of all kept files, whichever model they belong to. */
export async function keptBytes() {
  let sum = 0;
  const folder = await keptFolder(false).catch(() => null);
  for await (const handle of folder?.values() ?? []) sum += (await handle.getFile()).size;
  return sum;
}

export async function deleteKept() {
  try {
    const root = await navigator.storage.getDirectory();
    await patiently(() => root.removeEntry(FOLDER, { recursive: true }));
  } catch (error) {
    if (error.name === "NotFoundError") return;
    throw new Problem(`The stored files could not be deleted: ${error.message}`, "Close other tabs with this page, then try again.");
  }
}

const inHex = (buffer) => [...new Uint8Array(buffer)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const digest = async (bytes) => inHex(await crypto.subtle.digest("SHA-256", bytes));

/** What needs a file for itself, which a worker that was just ended may still hold. */
async function patiently(act) {
  for (let tries = 1; ; tries++) {
    try {
      return await act();
    } catch (error) {
      if (error.name !== "NoModificationAllowedError" || tries === TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
    }
  }
}

class Kept {
  async size(sha256) {
    const folder = await keptFolder(false);
    try {
      return folder ? (await (await folder.getFileHandle(sha256)).getFile()).size : 0;
    } catch (error) {
      if (error.name === "NotFoundError") return 0;
      throw error;
    }
  }

  async read(sha256) {
    const folder = await keptFolder(true);
    return new Uint8Array(await (await (await folder.getFileHandle(sha256)).getFile()).arrayBuffer());
  }

  async remove(sha256) {
    await (await keptFolder(true)).removeEntry(sha256);
  }

  /** What takes blocks and their places; `close` leaves what it has. */
  async open(sha256) {
    const folder = await keptFolder(true);
    const handle = await folder.getFileHandle(sha256, { create: true });
    const access = await patiently(() => handle.createSyncAccessHandle());
    return {
      write: (block, at) => {
        for (let done = 0; done < block.length; ) {
          const count = access.write(block.subarray(done), { at: at + done });
          // Beyond the quota, Chromium 156 returns a negative number as an unsigned one.
          if (!(count > 0 && count <= block.length - done)) throw new DOMException("", "QuotaExceededError");
          done += count;
        }
      },
      close: (length) => {
        access.truncate(length);
        access.flush();
        access.close();
      },
    };
  }
}

class InMemory {
  #files = new Map();

  async size(sha256) { return this.#files.get(sha256)?.length ?? 0; }
  async read(sha256) { return this.#files.get(sha256); }
  async remove(sha256) { this.#files.delete(sha256); }

  async open(sha256, bytes) {
    const whole = new Uint8Array(bytes);
    whole.set(this.#files.get(sha256) ?? []);
    return {
      write: (block, at) => whole.set(block, at),
      close: (length) => this.#files.set(sha256, whole.subarray(0, length)),
    };
  }
}

/** The files of a model. base: URL of their folder. listed: name -> { bytes, sha256 }. keep: in this browser, not in memory. */
export class Files {
  constructor(base, listed, keep) {
    this.base = base;
    this.listed = listed;
    this.keep = keep;
    this.store = keep ? new Kept() : new InMemory();
  }

  /** Bytes that are there already, and of all. */
  async there() {
    let there = 0, total = 0;
    for (const { bytes, sha256 } of Object.values(this.listed)) {
      there += Math.min(await this.store.size(sha256), bytes);
      total += bytes;
    }
    return { there, total };
  }

  /** Fetch what is missing. tell: is called with { done, total, file } in bytes. */
  async fetchAll(signal, tell) {
    const { there, total } = await this.there();
    if (there === total) return;
    if (this.keep) await this.requireRoom(total - there);
    const all = async () => {
      let done = (await this.there()).there;
      for (const file of Object.keys(this.listed)) await this.fetch(file, signal, (more) => tell({ done: (done += more), total, file }));
    };
    if (!this.keep) return void (await all());
    await navigator.locks.request(LOCK, { ifAvailable: true }, (lock) => (lock ? all() : tell({ waiting: true })));
    if ((await this.there()).there < total) await navigator.locks.request(LOCK, { signal }, all);
  }

  async requireRoom(needed) {
    const { quota, usage } = await navigator.storage.estimate();
    if (needed <= quota - usage) return;
    const { remedy } = fullDisk();
    throw new Problem(`The files need ${spellBytes(needed)}, and this browser lets the page store ${spellBytes(Math.max(0, quota - usage))}.`, remedy);
  }

  /** A file's content, verified. */
  async read(file) {
    const { bytes, sha256 } = this.listed[file];
    const content = await this.store.read(sha256);
    if (content.length === bytes && (await digest(content)) === sha256) return content;
    await this.store.remove(sha256);
    throw new Problem(`${file} was damaged in this browser and has been deleted.`, "Try again to download it.");
  }

  /** Go on until the file is whole. added: is called with the bytes of each block; fewer than 0 where a file begins again. */
  async fetch(file, signal, added) {
    const { bytes, sha256 } = this.listed[file];
    let wrong = 0;
    for (let tries = 0; ; tries++) {
      const size = await this.store.size(sha256);
      let cause = null;
      if (size < bytes) cause = await this.goOn(file, size, signal, added);
      else if (tries === 0) return; // it was verified, and is again when it is read
      else if ((await digest(await this.store.read(sha256))) === sha256) return;
      else {
        await this.store.remove(sha256);
        added(-bytes);
        if (++wrong === 2) throw other(file);
      }
      if (tries === TRIES) throw new Problem(`The download of ${file} was interrupted: ${cause?.message ?? "the connection ended"}.`, "Try again: it continues where it stopped.");
      if (cause) await new Promise((resolve) => setTimeout(resolve, PAUSE * tries));
    }
  }

  /** Fetch the rest of a file. Returns the error that interrupted it, or null. */
  async goOn(file, size, signal, added) {
    const { bytes, sha256 } = this.listed[file];
    let answer;
    try {
      answer = await fetch(new URL(file, this.base), { signal, cache: "no-store", headers: size ? { Range: `bytes=${size}-` } : {} });
    } catch (error) {
      signal.throwIfAborted();
      return error;
    }
    if (answer.status >= 500) return new Error(`the server answers ${answer.status}`);
    if (!answer.ok && answer.status !== 416) throw missing(file, answer.status);
    const length = answer.headers.get("content-length");
    const plain = answer.type === "basic" && answer.status === 200 && !answer.headers.has("content-encoding");
    if (plain && length !== null && Number(length) !== bytes) throw other(file);
    const writer = await this.store.open(sha256, bytes);
    let at = answer.status === 206 ? size : 0;
    added(at - size);
    try {
      if (answer.status === 416) return null;
      for (const reader = answer.body.getReader(); ; ) {
        const { done, value } = await reader.read();
        if (done) return at < bytes ? new Error("the connection ended early") : null;
        const block = value.subarray(0, bytes - at); // too long a file is a wrong one: its digest tells
        writer.write(block, at);
        at += block.length;
        added(block.length);
        if (block.length < value.length) return void reader.cancel();
      }
    } catch (error) {
      signal.throwIfAborted();
      if (error.name === "QuotaExceededError") throw error;
      return error;
    } finally {
      writer.close(at);
    }
  }
}

const other = (file) =>
  new Problem(
    `${file} on the server is not the one that pipeline.json lists.`,
    "The folder on the server mixes two exports or is damaged: upload it again.",
  );

export const missing = (file, status) =>
  new Problem(`${file} is not on the server (${status}).`, "Upload the whole folder that sdflow export --browser wrote, or check the address.");
