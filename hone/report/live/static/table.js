// A table of any length: only the rows in view are in the page, and they are fetched as one scrolls.

import { h } from "./dom.js";

const PAGE = 100;
const KEPT = 40; // pages

/**
 * `columns`: [{key, title, sort, class, cell(row) -> node or text}]; `fetch(start, count)` -> {total, rows};
 * `open(row)`; `sorted(key)`.
 */
export class VirtualTable {
  constructor({ columns, fetch, open, sorted, label }) {
    Object.assign(this, { columns, fetch, open, sorted });
    this.total = 0;
    this.active = -1;
    this.pages = new Map();
    this.made = new WeakMap(); // row -> its element: a row that stays in view while one scrolls is not built again
    this.epoch = 0;
    this.body = h("div.vbody", { role: "rowgroup" });
    this.head = h("div.vhead", { role: "row", "aria-rowindex": 1 });
    this.note = h("p.empty", { hidden: true });
    this.scroller = h("div.vtable", { tabindex: 0, role: "table", "aria-label": label, "aria-colcount": columns.length },
      h("div", { role: "rowgroup" }, this.head), this.body, this.note);
    this.element = this.scroller;
    this.scroller.addEventListener("scroll", () => this.schedule(), { passive: true });
    new ResizeObserver(() => this.schedule()).observe(this.scroller);
    this.heads("");
  }

  /** What the table says while it has no rows. */
  say(text) {
    this.note.textContent = text;
  }

  heads(sort) {
    this.head.replaceChildren(...this.columns.map((column) => {
      const on = column.sort && sort.replace("-", "") === column.sort;
      const direction = on ? (sort.startsWith("-") ? "descending" : "ascending") : null;
      const title = column.sort ? h("button", { type: "button", onclick: () => this.sorted(on && sort.startsWith("-") ? column.sort : on ? "" : `-${column.sort}`) },
        column.title, h("span.arrow", { "aria-hidden": "true" }, on ? (sort.startsWith("-") ? "↓" : "↑") : "")) : column.title;
      return h("div", { role: "columnheader", class: column.class, "aria-sort": direction }, title);
    }));
  }

  get height() {
    return parseFloat(getComputedStyle(this.scroller).getPropertyValue("--row")) || 38;
  }

  /** Fetches anew; the position stays unless `top`. */
  async reload(top = true) {
    this.epoch++;
    this.pages.clear();
    if (top) { this.scroller.scrollTop = 0; this.active = -1; }
    await this.draw();
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  async draw() {
    const row = this.height;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / row) - 8);
    const count = Math.ceil(this.scroller.clientHeight / row) + 16;
    const missing = [];
    for (let page = Math.floor(first / PAGE); page <= Math.floor((first + count) / PAGE); page++) {
      if (!this.pages.has(page) && (page === 0 || page * PAGE < this.total)) missing.push(this.load(page));
    }
    this.paint(first, count, row);
    if (missing.length && (await Promise.all(missing)).some(Boolean)) this.draw();
  }

  async load(page) {
    const { epoch } = this;
    this.pages.set(page, []);
    try {
      const answer = await this.fetch(page * PAGE, PAGE);
      if (epoch !== this.epoch) return false;
      this.total = answer.total;
      this.pages.set(page, answer.rows);
      for (const old of [...this.pages.keys()].slice(0, Math.max(0, this.pages.size - KEPT))) this.pages.delete(old);
      return true;
    } catch (error) {
      if (epoch === this.epoch) this.pages.delete(page);
      if (error.name === "AbortError") return false;
      throw error;
    }
  }

  at(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  paint(first, count, height) {
    this.scroller.setAttribute("aria-rowcount", this.total + 1);
    this.note.hidden = this.total > 0;
    this.body.style.height = `${this.total * height}px`;
    const rows = [];
    for (let i = first; i < Math.min(this.total, first + count); i++) {
      const row = this.at(i);
      if (row) rows.push(this.row(row, i, height));
    }
    this.body.replaceChildren(...rows);
  }

  row(row, i, height) {
    let element = this.made.get(row);
    if (!element) {
      element = h("div.vrow", { role: "row", "aria-rowindex": i + 2, onclick: (event) => {
        if (!event.target.closest("a")) this.open(row);
      } }, this.columns.map((column) => h("div", { role: "cell", class: column.class }, column.cell(row))));
      this.made.set(row, element);
    }
    element.classList.toggle("active", i === this.active);
    element.style.transform = `translateY(${i * height}px)`;
    return element;
  }

  /** Moves the marked row; it stays in view. */
  move(by) {
    this.active = Math.max(0, Math.min(this.total - 1, this.active + by));
    const top = this.active * this.height;
    const view = this.scroller;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + 3 * this.height > view.scrollTop + view.clientHeight) view.scrollTop = top + 3 * this.height - view.clientHeight;
    this.draw();
  }

  openActive() {
    const row = this.at(this.active);
    if (row) this.open(row);
  }
}
