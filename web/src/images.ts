// Images that wait for the next message: chosen, dropped or pasted, shown small, each removable.

import { button, make, say } from "./dom";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MAX_IMAGES = 16; // of a message; a server takes as many by default
const MAX_SIDE = 2048; // pixels, to which larger images are scaled down
const MAX_BYTES = 1 << 20; // of a file that is sent as it is
const QUALITY = 0.9; // of a JPEG file that is scaled down

export class ImageTray {
  readonly element = make("div", { class: "images", role: "list", "aria-label": "Images to send", hidden: true });
  readonly button = button("Image", () => this.input.click(), { class: "plain", hidden: true, title: "Add images; you can also drop or paste them" });
  readonly input = make("input", { type: "file", accept: TYPES.join(), multiple: true, hidden: true, "aria-label": "Add images", onchange: () => void this.add([...(this.input.files ?? [])]) });
  private urls: string[] = [];
  private isOn = false;

  /** place: where images are dropped; box: where they are pasted. changed: called after each change. */
  constructor(place: HTMLElement, private readonly box: HTMLElement, private readonly changed: () => void) {
    place.addEventListener("dragover", (event) => {
      if (!this.isOn || !event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      place.classList.add("dropping");
    });
    place.addEventListener("dragleave", () => place.classList.remove("dropping"));
    place.addEventListener("drop", (event) => {
      place.classList.remove("dropping");
      this.take(event, event.dataTransfer);
    });
    box.addEventListener("paste", (event) => this.take(event, event.clipboardData));
  }

  /** Offer images, or not: what a model without a vision tower takes. */
  allow(isOn: boolean): void {
    this.isOn = isOn;
    this.button.hidden = !isOn;
    if (!isOn) this.clear();
  }

  get isEmpty(): boolean {
    return !this.urls.length;
  }

  /** Return the images as data URLs, and forget them. */
  taken(): string[] {
    const { urls } = this;
    this.clear();
    return urls;
  }

  private clear(): void {
    this.urls = [];
    this.draw();
  }

  private take(event: Event, data: DataTransfer | null): void {
    const files = [...(data?.files ?? [])];
    if (!this.isOn || !files.length) return;
    event.preventDefault();
    void this.add(files);
  }

  private async add(files: File[]): Promise<void> {
    this.input.value = ""; // so that the same file can be chosen again
    say("");
    for (const file of files) {
      if (this.urls.length >= MAX_IMAGES) {
        say(`A message may have at most ${MAX_IMAGES} images.`);
        break;
      }
      try {
        this.urls.push(await urlOf(file));
      } catch {
        say(`${file.name} cannot be read as an image. Use PNG, JPEG, WebP, GIF or BMP.`);
      }
    }
    this.draw();
    this.box.focus();
  }

  private draw(): void {
    this.element.replaceChildren(...this.urls.map((url, i) => {
      const name = `Image ${i + 1}`;
      const remove = button("×", () => this.remove(i), { class: "small", "aria-label": `Remove ${name.toLowerCase()}` });
      return make("div", { role: "listitem" }, make("img", { src: url, alt: name }), remove);
    }));
    this.element.hidden = this.isEmpty;
    this.changed();
  }

  private remove(i: number): void {
    this.urls.splice(i, 1);
    this.draw();
    this.box.focus();
  }
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
