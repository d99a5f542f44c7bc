// The order of the search: names of the library that match exactly first, those with the shortest path before others.
var Scorer = {
  score: ([, title, , , score, , kind]) => (kind === "object" ? score - title.split(".").length : score),
  objNameMatch: 40,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
