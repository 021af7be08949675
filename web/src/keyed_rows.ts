// Rows of a table that stay the same elements while their numbers change: focus and clicks survive.

import { make } from "./dom";

export interface Row {
  key: string;
  first: () => HTMLElement; // of a new row
  cells: (string | number)[]; // a number from 0 to 1 is a bar
  isPrompt?: boolean; // how the bar is coloured
}

export class KeyedRows {
  private readonly rows = new Map<string, HTMLTableRowElement>();
  private readonly end: HTMLTableRowElement;

  /** wide: the cell, counted without the first, whose text may be long. */
  constructor(readonly body: HTMLTableSectionElement, columns: number, private readonly wide = -1) {
    this.end = make("tr", {}, make("td", { colspan: columns, class: "quiet" }));
    body.append(this.end);
  }

  /** Show these rows, and below them a remark, if there is one. */
  show(rows: Row[], remark: string): void {
    const keys = new Set(rows.map((row) => row.key));
    for (const [key, element] of this.rows) {
      if (keys.has(key)) continue;
      element.remove();
      this.rows.delete(key);
    }
    rows.forEach((row, i) => {
      const element = this.rows.get(row.key) ?? this.begin(row);
      row.cells.forEach((cell, at) => fill(element.cells[at + 1], cell, row.isPrompt ?? false));
      if (this.body.children[i] !== element) this.body.insertBefore(element, this.body.children[i] ?? null);
    });
    const cell = this.end.cells[0];
    if (cell && cell.textContent !== remark) cell.textContent = remark;
    this.end.hidden = !remark;
  }

  private begin(row: Row): HTMLTableRowElement {
    const cells = row.cells.map((_, at) => make("td", { class: at === this.wide ? "wide" : undefined }));
    const element = make("tr", {}, make("td", {}, row.first()), ...cells);
    this.rows.set(row.key, element);
    return element;
  }
}

function fill(cell: HTMLTableCellElement | undefined, value: string | number, isPrompt: boolean): void {
  if (!cell) return;
  if (typeof value === "string") {
    if (cell.textContent !== value) cell.textContent = value;
    return;
  }
  let bar = cell.querySelector("progress");
  if (!bar) cell.append((bar = make("progress", { max: 1 })));
  bar.value = value;
  bar.classList.toggle("prompt", isPrompt);
  bar.setAttribute("aria-label", isPrompt ? "of the prompt" : "of max_tokens");
}
