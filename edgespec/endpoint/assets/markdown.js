// Markdown of a model as elements. Everything becomes a text node inside one of a few elements, so
// no text can become a script, a style or a request. A link needs http or https; pictures are not
// fetched. Where the origins of tokens are shown, each text node is cut at the borders of tokens.

const LINK = /^\[((?:[^\[\]\\]|\\.)*)\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+["'(][^"')]*["')])?\s*\)/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/;

/** Return `address` if it is a web address that a page may link to, else null. */
function webAddress(address) {
  if (!URL.canParse(address)) return null;
  const { protocol, href } = new URL(address);
  return protocol === "http:" || protocol === "https:" ? href : null;
}

/** Text with the place of each of its parts in the source. `parts` are [begin in text, begin in source]. */
class Inline {
  constructor(lines) {
    this.text = "";
    this.parts = [];
    for (const line of lines) {
      if (this.text) this.text += "\n";
      this.parts.push([this.text.length, line.at]);
      this.text += line.text;
    }
  }
  source(index) {
    let found = this.parts[0];
    for (const part of this.parts) if (part[0] <= index) found = part;
    return found[1] + index - found[0];
  }
}

/** Draws a markdown text into an element, again and again while it grows. Finished blocks stay. */
class MarkdownView {
  constructor(target) {
    this.target = target;
    this.keys = [];
  }

  /** `runs` are the tokens as [origin, characters], or null: the text is not coloured. */
  draw(text, runs = null) {
    this.runs = runs === null ? null : new Runs(runs);
    const blocks = readBlocks(linesOf(text));
    const mode = runs === null ? "plain" : "coloured";
    blocks.forEach((block, index) => {
      const first = block.from.at, last = block.to.at + block.to.text.length;
      const key = `${mode} ${block.kind} ${first} ${text.slice(first, last)}`;
      if (this.keys[index] === key && index < blocks.length - 1) return;
      const drawn = this.block(block), before = this.target.children[index];
      if (before) before.replaceWith(drawn);
      else this.target.append(drawn);
      this.keys[index] = key;
    });
    while (this.target.children.length > blocks.length) this.target.lastChild.remove();
    this.keys.length = blocks.length;
  }

  block(block) {
    switch (block.kind) {
      case "heading": return this.inline(make("h" + block.level), block.lines);
      case "code": return this.code(block);
      case "rule": return make("hr");
      case "quote": return this.within(make("blockquote"), block.blocks);
      case "table": return this.table(block);
      case "list": {
        const list = make(block.ordered ? "ol" : "ul", block.ordered && block.start !== 1 ? { start: block.start } : {});
        for (const item of block.items) {
          const entry = make("li");
          // A tight item has its text without a paragraph.
          item.forEach((inner, place) => {
            if (inner.kind === "paragraph" && place === 0) this.inline(entry, inner.lines);
            else entry.append(this.block(inner));
          });
          list.append(entry);
        }
        return list;
      }
      default: return this.inline(make("p"), block.lines);
    }
  }

  within(parent, blocks) {
    parent.append(...blocks.map(one => this.block(one)));
    return parent;
  }

  code(block) {
    const code = make("code"), inline = new Inline(block.lines);
    this.put(code, inline, 0, inline.text.length);
    return make("div", { class: "code" },
      make("div", { class: "row" }, make("span", {}, block.language || "text"), copyButton(() => inline.text)),
      make("pre", { tabindex: "0" }, code));
  }

  table(block) {
    const row = (cells, tag) => make("tr", {}, ...cells.map((cell, index) =>
      this.inline(make(tag, { class: block.sides[index] || null }), [cell])));
    return make("div", { class: "table", tabindex: "0" }, make("table", {},
      make("thead", {}, row(block.head, "th")), make("tbody", {}, ...block.rows.map(one => row(one, "td")))));
  }

  inline(parent, lines) {
    if (lines.length) {
      const inline = new Inline(lines);
      this.span(parent, inline, 0, inline.text.length);
    }
    return parent;
  }

  /** Draw the text from `begin` to `end` with its emphasis, code and links. */
  span(parent, inline, begin, end) {
    const text = inline.text;
    let plain = begin, index = begin;
    const flush = to => { if (to > plain) this.put(parent, inline, plain, to); };
    const wrap = (made, from, to, next) => {
      flush(index);
      this.span(made, inline, from, to);
      parent.append(made);
      plain = index = next;
    };
    while (index < end) {
      const sign = text[index];
      if (sign === "\\" && index + 1 < end && /[!-/:-@[-`{-~]/.test(text[index + 1])) {
        flush(index);
        plain = index + 1;
        index += 2;
        continue;
      }
      if (sign === "\n") {
        flush(index);
        parent.append(make("br"));
        plain = ++index;
        continue;
      }
      if (sign === "`") {
        const ticks = /^`+/.exec(text.slice(index, end))[0];
        let close = index + ticks.length;
        for (;;) {
          close = text.indexOf(ticks, close);
          if (close < 0 || close + ticks.length > end) { close = -1; break; }
          if (text[close + ticks.length] !== "`" && text[close - 1] !== "`") break;
          close += 1;
        }
        if (close > 0) {
          flush(index);
          const code = make("code");
          this.put(code, inline, index + ticks.length, close);
          parent.append(code);
          plain = index = close + ticks.length;
        } else index += ticks.length;
        continue;
      }
      if (sign === "*" || sign === "_") {
        const double = text[index + 1] === sign, width = double ? 2 : 1;
        const close = closingMark(text, index, end, sign.repeat(width));
        if (close > 0) {
          wrap(make(double ? "strong" : "em"), index + width, close, close + width);
          continue;
        }
        index += width;
        continue;
      }
      if (sign === "[") {
        const found = LINK.exec(text.slice(index, end));
        const address = found && webAddress(found[2]);
        if (address) {
          wrap(linkTo(address), index + 1, index + 1 + found[1].length, index + found[0].length);
          continue;
        }
      }
      if (sign === "h" && !/\w/.test(text[index - 1] || "")) {
        const found = ADDRESS.exec(text.slice(index, end));
        const address = found && webAddress(found[0]);
        if (address) {
          flush(index);
          const link = linkTo(address);
          this.put(link, inline, index, index + found[0].length);
          parent.append(link);
          plain = index = index + found[0].length;
          continue;
        }
      }
      index += 1;
    }
    flush(end);
  }

  /** Append a part of the text as text nodes, in the colours of its tokens if they are shown. */
  put(parent, inline, begin, end) {
    if (this.runs === null) {
      parent.append(inline.text.slice(begin, end));
      return;
    }
    while (begin < end) {
      const at = inline.source(begin), run = this.runs.find(at);
      // A part of the text and a token end in different places.
      let stop = begin + 1;
      while (stop < end && inline.source(stop) === at + stop - begin && at + stop - begin < run.end) stop += 1;
      parent.append(tokenPart(run.origin, inline.text.slice(begin, stop), run.begin === at));
      begin = stop;
    }
  }
}

const ORIGINS = {
  "prediction": "Drafted from the text that the request predicts, accepted by the target",
  "device model": "Drafted by this device's model, accepted by the target",
  "device lookup": "Drafted on this device by lookup in earlier text, accepted by the target",
  "server": "Drafted by the verifier itself, accepted by the target",
  "target": "Chosen by the target; no draft of it was accepted",
  "local": "Written by a model of this device, because no verifier could be reached",
  "unknown": "Sent again after a broken link; its origin is not known",
};

/** Return a part of a token in the colour of its origin. White space gets no line. */
const tokenPart = (origin, text, isBegin = false) => make("span", { title: ORIGINS[origin] || origin,
  class: `t ${origin.replaceAll(" ", "-")}${text.trim() ? "" : " blank"}${isBegin ? " begin" : ""}` }, text);

/** Tokens by their place in the text. `runs` are [origin, characters] in order. */
class Runs {
  constructor(runs) {
    this.runs = [];
    let end = 0;
    for (const [origin, length] of runs) {
      if (length) this.runs.push({ origin, begin: end, end: end += length });
    }
  }
  find(at) {
    let low = 0, high = this.runs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.runs[middle].end <= at) low = middle + 1;
      else high = middle;
    }
    return this.runs[low] || { origin: "unknown", begin: 0, end: Infinity };
  }
}

const linkTo = address => make("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" });

/** Return where the mark that was opened at `index` is closed, or -1. */
function closingMark(text, index, end, mark) {
  const inner = index + mark.length, before = text[index - 1] || " ";
  if (inner >= end || /\s/.test(text[inner])) return -1;
  if (mark[0] === "_" && /\w/.test(before)) return -1;
  for (let close = text.indexOf(mark, inner + 1); close > 0 && close + mark.length <= end; close = text.indexOf(mark, close + 1)) {
    const next = text[close + mark.length] || " ";
    if (/\s/.test(text[close - 1]) || text[close - 1] === "\\") continue;
    if (mark[0] === "_" && /\w/.test(next)) continue;
    if (mark.length === 1 && (next === mark || text[close - 1] === mark)) continue;
    return close;
  }
  return -1;
}

function linesOf(text) {
  const lines = [];
  let at = 0;
  for (const line of text.split("\n")) {
    lines.push({ text: line.endsWith("\r") ? line.slice(0, -1) : line, at });
    at += line.length + 1;
  }
  return lines;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12;

const cut = (line, length) => ({ text: line.text.slice(length), at: line.at + length });

/** Return the blocks of some lines. Each has `from` and `to`, its first and last line. */
function readBlocks(lines, depth = 0) {
  const blocks = [];
  let index = 0;
  const add = (block, from, to) => blocks.push({ ...block, from: lines[from], to: lines[to] });
  while (index < lines.length) {
    const begin = index, line = lines[index];
    if (!line.text.trim()) { index += 1; continue; }
    const fence = FENCE.exec(line.text);
    if (fence) {
      const inside = [];
      for (index += 1; index < lines.length; index += 1) {
        const closing = lines[index].text.trim();
        if (closing.startsWith(fence[1]) && !closing.replaceAll(fence[1][0], "")) break;
        inside.push(lines[index]);
      }
      add({ kind: "code", language: fence[2], lines: inside }, begin, Math.min(index, lines.length - 1));
      index += 1;
      continue;
    }
    const heading = HEADING.exec(line.text);
    if (heading) {
      const text = heading[2], at = line.text.indexOf(text, heading[1].length);
      add({ kind: "heading", level: heading[1].length, lines: [{ text, at: line.at + Math.max(at, 0) }] }, begin, begin);
      index += 1;
      continue;
    }
    if (RULE.test(line.text)) {
      add({ kind: "rule" }, begin, begin);
      index += 1;
      continue;
    }
    if (QUOTE.test(line.text) && depth < MAX_DEPTH) {
      const inside = [];
      for (; index < lines.length && QUOTE.test(lines[index].text); index += 1) {
        inside.push(cut(lines[index], QUOTE.exec(lines[index].text)[0].length));
      }
      add({ kind: "quote", blocks: readBlocks(inside, depth + 1) }, begin, index - 1);
      continue;
    }
    if (ITEM.test(line.text) && depth < MAX_DEPTH) {
      index = readList(lines, index, depth, add);
      continue;
    }
    if (line.text.includes("|") && index + 1 < lines.length && DIVIDER.test(lines[index + 1].text) && lines[index + 1].text.includes("-")) {
      index = readTable(lines, index, add);
      continue;
    }
    const inside = [];
    for (; index < lines.length; index += 1) {
      const text = lines[index].text;
      if (!text.trim()) break;
      if (index > begin && (FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text))) break;
      const indent = text.length - text.trimStart().length;
      inside.push({ text: text.trim(), at: lines[index].at + indent });
    }
    add({ kind: "paragraph", lines: inside }, begin, index - 1);
  }
  return blocks;
}

function readList(lines, begin, depth, add) {
  const first = ITEM.exec(lines[begin].text), ordered = /\d/.test(first[2]), indent = first[1].length;
  const items = [];
  let index = begin, width = 0, inside = null;
  for (; index < lines.length; index += 1) {
    const { text } = lines[index], item = ITEM.exec(text);
    const margin = text.length - text.trimStart().length;
    if (item && item[1].length < indent + 2 && item[1].length >= indent - 1 && /\d/.test(item[2]) === ordered
        && (inside === null || item[1].length < Math.max(width, 2))) {
      width = item[0].length;
      inside = [cut(lines[index], width)];
      items.push(inside);
    } else if (!text.trim()) {
      const next = lines.slice(index + 1).find(one => one.text.trim());
      const goesOn = next && (next.text.length - next.text.trimStart().length >= Math.min(width, 2) + indent
        || (ITEM.test(next.text) && /\d/.test(ITEM.exec(next.text)[2]) === ordered));
      if (!goesOn) break;
      inside.push(lines[index]);
    } else if (margin >= indent + 2 || (margin > 0 && margin >= width)) {
      inside.push(cut(lines[index], Math.min(margin, width)));
    } else if (inside[inside.length - 1].text.trim() && !item && !FENCE.test(text) && !HEADING.test(text) && !QUOTE.test(text) && !RULE.test(text)) {
      inside.push(cut(lines[index], margin));
    } else break;
  }
  add({ kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1,
    items: items.map(one => readBlocks(one, depth + 1)) }, begin, index - 1);
  return index;
}

function readTable(lines, begin, add) {
  const cells = line => {
    const found = [];
    let from = 0, code = false;
    const { text } = line;
    const end = text.trimEnd().endsWith("|") ? text.trimEnd().length - 1 : text.length;
    const start = text.length - text.trimStart().length + (text.trimStart().startsWith("|") ? 1 : 0);
    from = start;
    for (let index = start; index <= end; index += 1) {
      if (text[index] === "`") code = !code;
      if (index === end || (text[index] === "|" && text[index - 1] !== "\\" && !code)) {
        const raw = text.slice(from, index), margin = raw.length - raw.trimStart().length;
        found.push({ text: raw.trim(), at: line.at + from + margin });
        from = index + 1;
      }
    }
    return found;
  };
  const head = cells(lines[begin]);
  const sides = cells(lines[begin + 1]).map(({ text }) =>
    text.endsWith(":") ? (text.startsWith(":") ? "centre" : "right") : "");
  const rows = [];
  let index = begin + 2;
  for (; index < lines.length && lines[index].text.trim() && lines[index].text.includes("|"); index += 1) {
    rows.push(cells(lines[index]).slice(0, head.length));
  }
  add({ kind: "table", head, sides, rows }, begin, index - 1);
  return index;
}
