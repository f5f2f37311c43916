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
  return (text) => {
    for (const word of alone.keys()) text = text.replaceAll(word, ` ${word} `);
    const ids = [];
    for (const word of text.normalize("NFC").toLowerCase().match(WORDS) ?? []) {
      if (alone.has(word)) ids.push(alone.get(word));
      else ids.push(...merged(word, ranks).map((part) => vocabulary.get(part) ?? table.unknown));
    }
    const kept = [table.start, ...ids.slice(0, table.length - 2), table.end];
    const dropped = ids.length + 2 - kept.length;
    while (kept.length < table.length) kept.push(table.pad);
    return { ids: Int32Array.from(kept), dropped };
  };
}

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
