"""How the pages look, and the few lines of script that draw their plots.

Colours are variables, so that the plots can read those of the scheme in force.
"""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { --paper: #fff; --ink: #1b1f24; --soft: #59636e; --line: #d4d9df; --ours: #fdeee2;
  --panel: #f5f6f8; --accent: #b34700; color-scheme: light; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e8eaed; --soft: #a3acb7; --line: #363c44; --ours: #3a2618;
    --panel: #1d2126; --accent: #ff9d5c; color-scheme: dark; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2rem) 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.6rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 0.5rem; padding-top: 0.6rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 0.3rem; overflow-wrap: anywhere; }
p, li { overflow-wrap: anywhere; max-width: 48rem; }
.headline { font-size: 1.15rem; border-left: 4px solid var(--accent); padding: 0.3rem 0.9rem;
  margin: 1rem 0; max-width: none; }
.asked { max-width: none; }
.facts { color: var(--soft); font-size: 0.9rem; }
.scroll { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
caption { text-align: left; color: var(--soft); padding: 0.2rem 0 0.4rem; font-size: 0.875rem; }
caption span { display: block; position: sticky; left: 0; max-width: min(48rem, 100vw - 1.5rem); }
th, td { padding: 0.35rem 0.55rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; white-space: normal;
  vertical-align: bottom; }
th:first-child, td.text, th.text { text-align: left; }
tbody th, td.text { white-space: normal; overflow-wrap: anywhere; max-width: 18rem;
  min-width: clamp(6.5rem, 12vw, 9rem); }
tbody th { position: sticky; left: 0; background: var(--paper); font-weight: 600; }
tr.ours td, tr.ours th { background: var(--ours); }
small { color: var(--soft); font-weight: 400; display: block; }
figure { margin: 1rem 0; }
figcaption { color: var(--soft); font-size: 0.875rem; max-width: 48rem; overflow-wrap: anywhere; }
.plot { width: 100%; }
.grid { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); }
details { margin: 0.6rem 0; border: 1px solid var(--line); border-radius: 6px; }
summary { cursor: pointer; padding: 0.5rem 0.8rem; background: var(--panel); border-radius: 6px; }
pre { margin: 0; padding: 0.8rem; overflow: auto; max-height: 32rem; font-size: 0.8rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { main { max-width: none; padding: 0; } figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } .scroll { overflow: visible; }
  table { font-size: 0.65rem; } th, td { padding: 0.2rem 0.25rem; } tbody th { position: static; }
  .modebar { display: none; } pre { max-height: none; } }
"""
SCRIPT: Final = """
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function themed(layout) {
  const changes = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    "font.color": css("--ink"), "hoverlabel.bgcolor": css("--panel"),
    "hoverlabel.bordercolor": css("--line"), "hoverlabel.font.color": css("--ink"),
    "legend.bgcolor": "rgba(0,0,0,0)", "modebar.bgcolor": "rgba(0,0,0,0)",
    "modebar.color": css("--soft"), "modebar.activecolor": css("--accent") };
  for (const axis of Object.keys(layout).filter(key => /^[xy]axis/.test(key))) {
    changes[axis + ".gridcolor"] = css("--line");
    changes[axis + ".linecolor"] = css("--line");
    changes[axis + ".zerolinecolor"] = css("--line");
    if (layout[axis].rangeslider) changes[axis + ".rangeslider.bgcolor"] = css("--panel");
  }
  return changes;
}
const plots = FIGURES.map((figure, i) => [document.getElementById("plot-" + i), figure]);
const repaint = () => window.Plotly && Promise.all(
  plots.map(([place, figure]) => Plotly.relayout(place, themed(figure.layout))));
async function draw() {
  if (!window.Plotly) {
    for (const [place] of plots)
      place.textContent = "This plot needs plotly.min.js in the folder of this page.";
    return;
  }
  for (const [place, figure] of plots) {
    place.replaceChildren();
    await Plotly.newPlot(place, figure.data, figure.layout,
      { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"],
        ...(innerWidth < 600 && { displayModeBar: false }) });  // it would lie on the legend
    await Plotly.relayout(place, themed(figure.layout));
  }
  document.documentElement.dataset.drawn = plots.length;
}
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("beforeprint", repaint);
addEventListener("afterprint", repaint);
"""
