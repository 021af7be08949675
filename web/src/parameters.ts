// Sampling parameters: a field each, kept in this browser. An empty one shows the model's default and
// is not sent.

import { field, make } from "./dom";

interface Spec {
  name: string;
  label: string;
  hint: string;
  min?: number;
  max?: number;
  step: number;
}

const SPECS: Spec[] = [
  { name: "temperature", label: "Temperature", hint: "0 always selects the most probable token", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", hint: "sample from the most probable tokens with this total probability", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", hint: "sample from this many most probable tokens; 0 for all", min: 0, step: 1 },
  { name: "max_tokens", label: "Max tokens", hint: "maximum length of the answer", min: 1, step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "above 1 makes repetition less likely", min: 0.1, max: 2, step: 0.05 },
  { name: "seed", label: "Seed", hint: "the same seed gives the same answer", step: 1 },
];

/** Fields for sampling parameters. name: under which they are kept; defaults: what stands in them at
 * first, because the view wants it and not the model. */
export class Parameters {
  readonly element: HTMLElement;
  private readonly inputs = new Map<string, HTMLInputElement>();

  constructor(private readonly name: string, defaults: Record<string, number> = {}) {
    const kept = this.kept() ?? defaults;
    this.element = make("div", { class: "fields" });
    for (const spec of SPECS) {
      const input = make("input", { type: "number", step: spec.step, min: spec.min, max: spec.max, name: spec.name, placeholder: "default", onchange: () => this.keep() });
      input.value = String(kept[spec.name] ?? "");
      this.inputs.set(spec.name, input);
      this.element.append(field(spec.label, input, spec.hint));
    }
  }

  /** Return what was given. */
  get values(): Record<string, number> {
    const given = [...this.inputs].filter(([, input]) => input.value !== "" && input.checkValidity());
    return Object.fromEntries(given.map(([name, input]) => [name, Number(input.value)]));
  }

  /** Show what the model takes where nothing is given. */
  showDefaults(defaults: Record<string, number>): void {
    for (const [name, input] of this.inputs) input.placeholder = name in defaults ? `default ${defaults[name]}` : "default";
  }

  private kept(): Record<string, number> | null {
    try {
      return JSON.parse(localStorage.getItem(this.name) ?? "null") as Record<string, number> | null;
    } catch {
      return null;
    }
  }

  private keep(): void {
    try {
      localStorage.setItem(this.name, JSON.stringify(this.values));
    } catch {
      // there is no room: they hold until the page is left
    }
  }
}
