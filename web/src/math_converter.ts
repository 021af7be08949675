// Converts TeX to MathML; a file of its own, which the page loads when an answer has a formula.

import temml from "temml/temml.js";

const MAX_EXPANSIONS = 200; // of macros, which a formula may define
const MAX_SIZE_EM: [number, number] = [10, 50]; // of a length in a formula, and of a rule

window.quireMath = (source, into, isBlock) => {
  const options = { displayMode: isBlock, throwOnError: true, trust: false, maxExpand: MAX_EXPANSIONS, maxSize: MAX_SIZE_EM };
  const made = document.createElement("span");
  temml.render(source, made, options);
  for (const element of made.querySelectorAll("[href], [src]")) element.remove();
  into.replaceChildren(...made.childNodes);
};
