// Attachments that wait for the next message, images and text files: chosen, dropped or pasted, each
// removable.

import type { Message, TextFile } from "./conversations";
import { button, make, say, short } from "./dom";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_IMAGES = 16; // of a message; a server takes as many by default
const MAX_SIDE = 2048; // pixels, to which larger images are scaled down
const MAX_BYTES = 1 << 20; // of a file that is sent as it is
const QUALITY = 0.9; // of a JPEG file that is scaled down
const MAX_FILES = 8; // text files of a message
const MAX_FILE_BYTES = 256 << 10;

export class AttachmentTray {
  readonly element = make("div", { class: "images", role: "list", "aria-label": "Attachments to send", hidden: true });
  readonly button = button("Attach", () => this.input.click(), { class: "plain" });
  readonly input = make("input", { type: "file", multiple: true, hidden: true, "aria-label": "Add attachments", onchange: () => void this.add([...(this.input.files ?? [])]) });
  private urls: string[] = [];
  private files: TextFile[] = [];
  private takesImages = false;

  /** place: where files are dropped; box: where they are pasted. changed: called after each change. */
  constructor(place: HTMLElement, private readonly box: HTMLElement, private readonly changed: () => void) {
    place.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      place.classList.add("dropping");
    });
    place.addEventListener("dragleave", () => place.classList.remove("dropping"));
    place.addEventListener("drop", (event) => {
      place.classList.remove("dropping");
      this.take(event, event.dataTransfer);
    });
    box.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    this.allow(false);
  }

  /** Offer images, or text files alone for a model without a vision tower. */
  allow(images: boolean): void {
    this.takesImages = images;
    this.button.title = images ? "Add images or text files; you can also drop or paste them" : "Add text files; you can also drop or paste them. This model does not read images";
    if (images) this.input.removeAttribute("accept");
    else {
      this.input.accept = "text/*,.md,.json,.jsonl,.csv,.log,.py,.ts,.js,.c,.h,.cpp,.rs,.go,.java,.sh,.sql,.toml,.yaml,.yml,.ini,.tex";
      if (!this.urls.length) return;
      this.urls = [];
      this.draw();
    }
  }

  get isEmpty(): boolean {
    return !this.urls.length && !this.files.length;
  }

  /** Return the attachments as fields of a message, and forget them. */
  taken(): Pick<Message, "images" | "files"> {
    const { urls, files } = this;
    this.urls = [];
    this.files = [];
    this.draw();
    return { ...(urls.length ? { images: urls } : {}), ...(files.length ? { files } : {}) };
  }

  private take(event: Event, data: DataTransfer | null): void {
    const files = [...(data?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    void this.add(files);
  }

  private async add(files: File[]): Promise<void> {
    this.input.value = ""; // so that the same file can be chosen again
    const problems: string[] = [];
    for (const file of files) {
      try {
        if (file.type.startsWith("image/")) await this.addImage(file);
        else await this.addText(file);
      } catch (error) {
        problems.push(error instanceof AttachmentError ? error.message : `${file.name} cannot be read.`);
      }
    }
    say([...new Set(problems)].join(" "));
    this.draw();
    this.box.focus();
  }

  private async addImage(file: File): Promise<void> {
    if (!this.takesImages) throw new AttachmentError(`${file.name} is an image, and this model does not read images.`);
    if (this.urls.length >= MAX_IMAGES) throw new AttachmentError(`A message may have at most ${MAX_IMAGES} images.`);
    try {
      this.urls.push(await urlOf(file));
    } catch {
      throw new AttachmentError(`${file.name} cannot be read as an image. Use PNG, JPEG, WebP, GIF or BMP.`);
    }
  }

  private async addText(file: File): Promise<void> {
    if (this.files.length >= MAX_FILES) throw new AttachmentError(`A message may have at most ${MAX_FILES} text files.`);
    if (file.size > MAX_FILE_BYTES) throw new AttachmentError(`${file.name} has ${short(file.size / 1024)} KB; the limit of a text file is ${MAX_FILE_BYTES / 1024} KB.`);
    let text: string;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      throw new AttachmentError(`${file.name} is not text in UTF-8.`);
    }
    this.files.push({ name: file.name, text });
  }

  private draw(): void {
    const item = (name: string, shown: HTMLElement, remove: () => void): HTMLElement => {
      const act = (): void => {
        remove();
        this.draw();
        this.box.focus();
      };
      return make("div", { role: "listitem" }, shown, button("×", act, { class: "small", "aria-label": `Remove ${name}` }));
    };
    this.element.replaceChildren(
      ...this.urls.map((url, i) => item(`image ${i + 1}`, make("img", { src: url, alt: `Image ${i + 1}` }), () => this.urls.splice(i, 1))),
      ...this.files.map(({ name }, i) => item(name, make("span", { class: "file code" }, name), () => this.files.splice(i, 1))));
    this.element.hidden = this.isEmpty;
    this.changed();
  }
}

/** A file that is refused, with its reason. */
class AttachmentError extends Error {}

/** Show the text files of a message, closed. */
export function shownFiles(files: TextFile[]): HTMLElement {
  return make("div", { class: "files" }, ...files.map(({ name, text }) => make("details", {}, make("summary", {}, make("bdi", { class: "code" }, name)), make("pre", { tabindex: 0, dir: "auto" }, text))));
}

/** Show the images of a message. One that the browser had no room to keep is named. */
export function shownImages(urls: string[]): HTMLElement {
  const all = urls.map((url, i) => url ? make("img", { src: url, alt: `Image ${i + 1}` }) : make("span", { class: "quiet" }, `Image ${i + 1} is no longer stored`));
  return make("div", { class: "images" }, ...all);
}

/** Return a file as a data URL, scaled down if it is large. Throws for what is no image. */
async function urlOf(file: File): Promise<string> {
  if (!TYPES.includes(file.type)) throw new Error("no image");
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_BYTES) return readAsUrl(file);
  const canvas = make("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  const context = canvas.getContext("2d");
  if (!context) throw new Error("no canvas");
  context.fillStyle = "#fff"; // behind what is transparent, which JPEG has not
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function readAsUrl(file: File): Promise<string> {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(String(reader.result));
    reader.onerror = () => failed(reader.error ?? new Error("not read"));
    reader.readAsDataURL(file);
  });
}
