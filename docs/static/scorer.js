// The order of the search: names of the library that match exactly first, those with the shortest path before others.
// Of pages with the same score those that explain how something is done come first, and those for developers last,
// unless the title of a section is what was searched.
var Scorer = {
  score: ([page, title, anchor, , score, , kind]) => {
    if (kind === "object") return score - title.split(".").length;
    if (page.startsWith("api/names/")) return score - 12; // which the object of its name finds
    if (/^(recipes|start|install|training|tasks|data-formats|deploy|streams|works-with|weights)$/.test(page)) return score + 2;
    if (!anchor && /^(project\/|changelog$|style$|methods$|how-it-works$|performance$)/.test(page)) return score - 12;
    return score;
  },
  objNameMatch: 40,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
