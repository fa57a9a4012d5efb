// What differs between two texts, word by word.

import { h } from "./dom.js";

/** Words compared in full; of longer texts, only what lies between their common beginning and end, up to this many. */
const MOST = 3000;

/** [["same" | "out" | "in", text], ...]; "out" is only in the first, "in" only in the second. */
export function compare(first, second) {
  const a = first.match(/\s+|[^\s]+/g) ?? [];
  const b = second.match(/\s+|[^\s]+/g) ?? [];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const parts = [];
  push(parts, "same", a.slice(0, head));
  middle(parts, a.slice(head, a.length - tail), b.slice(head, b.length - tail));
  push(parts, "same", a.slice(a.length - tail));
  return parts;
}

function middle(parts, a, b) {
  if (!a.length || !b.length || a.length > MOST || b.length > MOST) {
    push(parts, "out", a);
    push(parts, "in", b);
    return;
  }
  // lengths of the longest common subsequence of a[i:] and b[j:]
  const width = b.length + 1;
  const table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  let i = 0;
  let j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) { push(parts, "same", [a[i]]); i++; j++; }
    else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) push(parts, "out", [a[i++]]);
    else push(parts, "in", [b[j++]]);
  }
  push(parts, "out", a.slice(i));
  push(parts, "in", b.slice(j));
}

function push(parts, kind, words) {
  const text = words.join("");
  if (!text) return;
  if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += text;
  else parts.push([kind, text]);
}

/** Both texts beside each other, with what only one of them has marked. */
export function sideBySide(first, second, titles) {
  const parts = compare(first, second);
  const side = (kind, tag, title) => h("div", null, title,
    h("pre.answer", null, parts.filter(([is]) => is === "same" || is === kind).map(([is, text]) => (is === "same" ? text : h(tag, null, text)))));
  return h("div.sides", null, side("out", "del", titles[0]), side("in", "ins", titles[1]));
}
