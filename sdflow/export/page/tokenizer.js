// CLIP's tokenizer: byte-pair encoding, the pair that comes first in the merges is merged first.

const WORDS = /'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+/gu;
const plain = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte < 173) || byte > 173;
let others = 0;
const LETTERS = Array.from({ length: 256 }, (_, byte) => String.fromCharCode(plain(byte) ? byte : 256 + others++));

/** What makes token ids of a text: { ids, dropped }, all of one length. dropped: how many tokens were too many.
    table: of tokenizers.json. */
export function tokenizer(table) {
  const ranks = new Map(table.merges.map((pair, rank) => [pair.join(" "), rank]));
  const vocabulary = new Map(Object.entries(table.vocabulary));
  const alone = new Map(Object.entries(table.alone));
  const marks = [...vocabulary.keys()].filter((word) => [table.start, table.end].includes(vocabulary.get(word)));
  const atMarks = new RegExp(`(${marks.map((mark) => mark.replace(/[^\w]/g, "\\$&")).join("|")})`);
  const read = (text) => {
    for (const word of alone.keys()) text = text.replaceAll(word, ` ${word} `);
    return (inLowerCase(text.normalize("NFC")).match(WORDS) ?? []).flatMap((word) =>
      alone.has(word) ? [alone.get(word)] : merged(word, ranks).map((part) => vocabulary.get(part) ?? table.unknown));
  };
  return (text) => {
    const ids = text.split(atMarks).flatMap((part, i) => (i % 2 ? [vocabulary.get(part)] : read(part)));
    const kept = [table.start, ...ids.slice(0, table.length - 2), table.end];
    const dropped = ids.length + 2 - kept.length;
    while (kept.length < table.length) kept.push(table.pad);
    return { ids: Int32Array.from(kept), dropped };
  };
}

/** Each character on its own: a string as a whole would end words in another sigma than transformers does. */
const inLowerCase = (text) => Array.from(text, (character) => character.toLowerCase()).join("");

function merged(word, ranks) {
  const parts = [...new TextEncoder().encode(word)].map((byte) => LETTERS[byte]);
  parts[parts.length - 1] += "</w>";
  for (;;) {
    let at = -1, best = Infinity;
    for (let i = 0; i + 1 < parts.length; i++) {
      const rank = ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
      if (rank < best) [best, at] = [rank, i];
    }
    if (at < 0) return parts;
    parts.splice(at, 2, parts[at] + parts[at + 1]);
  }
}
