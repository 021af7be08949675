// Light or dark: as the system has it, or as the switch says, which this browser remembers.

import { button, make } from "./dom";

const NAME = "quire.theme";
const CHOICES = ["auto", "light", "dark"] as const;
type Choice = (typeof CHOICES)[number];
const SIGNS: Record<Choice, string> = { auto: "◐", light: "○", dark: "●" };

const system = matchMedia("(prefers-color-scheme: dark)");
const listeners: (() => void)[] = [];

/** Register a function to call after every change of colours: it draws a canvas again. */
export function onTheme(redraw: () => void): void {
  listeners.push(redraw);
}

function kept(): Choice {
  try {
    const found = localStorage.getItem(NAME);
    return CHOICES.find((choice) => choice === found) ?? "auto";
  } catch {
    return "auto"; // this browser keeps nothing
  }
}

let now = kept();

function apply(): void {
  document.documentElement.dataset["theme"] = now === "auto" ? (system.matches ? "dark" : "light") : now;
  for (const redraw of listeners) redraw();
}

/** Make the switch. */
export function themeSwitch(): HTMLButtonElement {
  const made = button("", () => {
    now = CHOICES[(CHOICES.indexOf(now) + 1) % CHOICES.length] ?? "auto";
    try {
      localStorage.setItem(NAME, now);
    } catch {
      // it holds until the page is left
    }
    show();
  }, { id: "theme", class: "plain" });
  const show = (): void => {
    made.replaceChildren(`${SIGNS[now]} `, make("span", {}, now));
    made.setAttribute("aria-label", `Colours: ${now}`);
    made.title = "Colours: system, light or dark";
    apply();
  };
  show();
  return made;
}

system.addEventListener("change", apply);
