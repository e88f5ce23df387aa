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
