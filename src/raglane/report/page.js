"use strict";
// Charts: the specification of each is in a script element, as JSON.
for (const place of document.querySelectorAll(".chart")) {
  const chart = JSON.parse(document.getElementById(place.id + "-chart").textContent);
  vegaEmbed(place, chart, { renderer: "svg", actions: false, ast: false }).catch((error) => console.error(error));
}
// Pictures: only the selected one is visible.
const form = document.getElementById("pick");
if (form) {
  const show = () => {
    const data = new FormData(form);
    const selected = `${data.get("batch")}-${data.get("layout")}`;
    for (const picture of document.querySelectorAll(".picture")) picture.hidden = picture.dataset.name !== selected;
  };
  form.addEventListener("change", show);
  show();
}
// Copy buttons of commands.
for (const place of document.querySelectorAll(".command")) {
  const command = place.querySelector("code");
  const status = place.nextElementSibling;
  place.querySelector("button").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      status.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(command);
      status.textContent = "selected";
    }
  });
}
// Print with all details open.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
});
