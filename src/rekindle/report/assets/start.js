// ---------------------------------------------------------------- start

function drawFigures() {
  if (!nOps) return null;
  const kind = document.querySelector("input[name=axis]:checked").value;
  return Promise.all([drawTimeline(kind), drawMap(kind), drawActivations(kind)]);
}
for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", drawFigures);
let wasNarrow = isNarrow();
window.addEventListener("resize", () => {
  if (isNarrow() !== wasNarrow) { wasNarrow = isNarrow(); drawFigures(); }
});
tableIn("operators", "", "rows", OPERATORS);
if (data.decisions) tableIn("decisions", "decision-", "decided", decisionTables(data.decisions));
Promise.resolve(drawFigures()).then(() => { document.documentElement.dataset.ready = "yes"; });
