// A table with its title, in a box that scrolls; below it stands how many rows are out of sight.

import { button, make } from "./dom";
import { KeyedRows, type Row } from "./keyed_rows";

export class ListCard {
  readonly element: HTMLElement;
  private readonly body = make("tbody");
  private readonly rows: KeyedRows;
  private readonly box: HTMLElement;
  private readonly more = make("p", { class: "quiet more", hidden: true });
  private readonly all = button("Show all rows", () => this.toggle(), { class: "small", hidden: true, "aria-expanded": "false" });
  private total = 0; // number of rows, including unlisted ones

  /** wide: the cell, counted without the first, whose text may be long. */
  constructor(title: string, columns: string[], wide = -1) {
    this.rows = new KeyedRows(this.body, columns.length, wide);
    const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
    const table = make("table", {}, make("thead", {}, head), this.body);
    this.box = make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `${title}, a table`, onscroll: () => this.showMore() }, table);
    this.element = make("section", { class: "card", "aria-label": title }, make("h2", {}, title), this.box, this.more, this.all);
    new ResizeObserver(() => this.showMore()).observe(this.box);
  }

  /** Show rows. total: number of all rows, of which these are the first. `nobody`: text for an empty list. */
  show(rows: Row[], total: number, noRows = ""): void {
    const unlisted = total - rows.length;
    this.rows.show(rows, unlisted > 0 ? `and ${unlisted} more` : total ? "" : noRows);
    this.total = total;
    this.showMore();
  }

  private toggle(): void {
    const isWhole = this.box.classList.toggle("whole");
    this.all.textContent = isWhole ? "Show fewer rows" : "Show all rows";
    this.all.setAttribute("aria-expanded", String(isWhole));
    this.showMore();
  }

  /** Say how many rows are below what is seen of the table. */
  private showMore(): void {
    const bottom = this.box.scrollTop + this.box.clientHeight + 1;
    const isLonger = this.box.scrollHeight > bottom;
    const seen = isLonger ? [...this.body.rows].filter((row) => !row.hidden && row.offsetTop + row.offsetHeight <= bottom).length : this.total;
    const text = seen < this.total ? `${this.total - seen} more below` : "";
    if (this.more.textContent !== text) this.more.textContent = text;
    this.more.hidden = !text;
    this.all.hidden = !isLonger && !this.box.classList.contains("whole");
  }
}
