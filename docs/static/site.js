"use strict";
// A copy button on each block of code, for its lines without prompts and results.
for (const block of document.querySelectorAll(".highlight")) {
  const code = block.querySelector("pre");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const copy = code.cloneNode(true);
    for (const part of copy.querySelectorAll(".gp, .go")) part.remove();
    try {
      await navigator.clipboard.writeText(copy.textContent.trim() + "\n");
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  block.append(button);
}
