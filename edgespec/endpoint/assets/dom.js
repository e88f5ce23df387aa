"use strict";
// Small things that every script of a page uses. Text of models only ever becomes a text node.

const element = id => document.getElementById(id);

/** Return a new element with attributes and children. A child that is text becomes a text node. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

/** Return a number for people, with a fixed number of digits behind the point. */
const number = (value, digits = 0) => value.toLocaleString("en", {
  minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Return a button that copies what `read` returns. */
function copyButton(read, label = "Copy") {
  const button = make("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(read());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed by the browser";
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

const KEY = "edgespec-key";

/** Return the headers that carry the API key, if this tab has one. */
function keyHeaders() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: "Bearer " + key } : {};
}

/** Ask the endpoint how it is. The answer has `needs_key` if the API key is missing or wrong. No request is
 *  refused, so the console stays empty. */
async function askHealth(timeoutMs = 4000) {
  const answer = await fetch("health", { cache: "no-store", headers: keyHeaders(),
    signal: AbortSignal.timeout(timeoutMs) });
  return await answer.json();
}
