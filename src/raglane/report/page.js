"use strict";
// Charts: each has its data and its form beside it, as JSON.
for (const place of document.querySelectorAll(".chart")) {
  const chart = JSON.parse(document.getElementById(place.id + "-chart").textContent);
  vegaEmbed(place, chart, { renderer: "svg", actions: false, ast: false }).catch((error) => console.error(error));
}
// The pictures of batches: the one that is picked is shown.
const form = document.getElementById("pick");
if (form) {
  const show = () => {
    const picked = new FormData(form);
    const wanted = `${picked.get("batch")}-${picked.get("layout")}`;
    for (const picture of document.querySelectorAll(".picture")) picture.hidden = picture.dataset.name !== wanted;
  };
  form.addEventListener("change", show);
  show();
}
// Commands, for the clipboard.
for (const place of document.querySelectorAll(".command")) {
  const command = place.querySelector("code");
  const told = place.nextElementSibling;
  place.querySelector("button").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      told.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(command);
      told.textContent = "selected";
    }
  });
}
// On paper nothing can be opened.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
});
