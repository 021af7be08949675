// A text that grows while it is shown: pieces are gathered and drawn once a frame, always as text.

const MAX_NODE_CHARS = 4096; // characters of one node: a long line is laid out in parts

export class GrowingText {
  private waiting = "";
  private frame = 0;
  private last: Text | null = null;

  constructor(readonly element: HTMLElement, private readonly drawn: () => void = () => undefined) {}

  add(text: string): void {
    this.waiting += text;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  /** Draw what is still waiting. */
  end(): void {
    cancelAnimationFrame(this.frame);
    this.draw();
  }

  private draw(): void {
    this.frame = 0;
    if (!this.waiting) return;
    if (!this.last || this.last.length > MAX_NODE_CHARS) this.element.append((this.last = document.createTextNode("")));
    this.last.appendData(this.waiting);
    this.waiting = "";
    this.drawn();
  }
}
