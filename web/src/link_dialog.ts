// A question before a link of an answer is opened: the whole address is shown.

import { button, make } from "./dom";

const dialog = make("dialog", { class: "outside-link", "aria-label": "Open a link" });

/** Show a link's address, and open it in a new tab if the user agrees. */
export function confirmLink(url: string): void {
  if (!dialog.isConnected) document.body.append(dialog);
  const open = make("a", { class: "button main", href: url, target: "_blank", rel: "noopener noreferrer", onclick: () => dialog.close() }, "Open in a new tab");
  const cancel = button("Cancel", () => dialog.close(), { autofocus: true });
  dialog.replaceChildren(
    make("h2", {}, "Open this link?"),
    make("p", { class: "quiet" }, "The model wrote it. It leads away from this server:"),
    make("p", {}, make("bdi", { class: "code" }, url)),
    make("div", { class: "row" }, cancel, open));
  dialog.showModal();
}
