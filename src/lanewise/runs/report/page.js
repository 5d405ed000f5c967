"use strict";
// Draws the charts of the page, and writes their numbers into tables.
const data = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("controls");
const COLORS = ["#3b82f6", "#f97316", "#10a37f", "#d946ef", "#eab308", "#ef4444", "#06b6d4", "#8b5cf6"];
const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
const AXES = {step: "steps", samples: "samples", time: "seconds since the first start"};

// Plotly takes some of HTML's tags in texts, which may be a stranger's.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shows = (run) => form.elements[`run-${run}`]?.checked ?? true;

function placesOf(line) {
  const axis = form.elements.axis.value;
  if (axis === "time") return line.times;
  const batch = axis === "samples" ? data.runs[line.run].batch ?? 1 : 1;
  return line.steps.map((step) => step * batch);
}

function titleOf(line) {
  return data.runs.length > 1 ? `${data.runs[line.run].name}: ${line.name}` : line.name;
}

function tracesOf(chart) {
  const lines = chart.lines.filter((line) => shows(line.run));
  const names = [...new Set(chart.lines.map((line) => line.name))];
  if (chart.kind === "bars") {
    return lines.map((line, place) => ({
      type: "bar", name: plain(line.name), x: line.labels.map(plain), y: line.values,
      legendgroup: line.name, showlegend: lines.findIndex((other) => other.name === line.name) === place,
      marker: {color: COLORS[names.indexOf(line.name) % COLORS.length]},
    }));
  }
  const isOne = data.runs.length === 1;
  return lines.map((line) => {
    const number = names.indexOf(line.name);
    const color = COLORS[(isOne ? number : line.run) % COLORS.length];
    const isPlaced = chart.kind === "moments";
    return {
      type: "scatter", name: plain(titleOf(line)),
      x: isPlaced ? line.times : placesOf(line),
      y: isPlaced ? line.times.map(() => plain(data.runs[line.run].name)) : line.values,
      mode: isPlaced || line.values.length < 2 ? "markers" : "lines",
      text: isPlaced ? line.texts.map(plain) : undefined,
      hovertemplate: isPlaced ? "%{text}<extra></extra>" : undefined,
      connectgaps: false,
      line: {color, width: 1.8 + 2.5 * numAbove(line, lines), dash: isOne ? "solid" : DASHES[number % DASHES.length]},
      marker: {color: isPlaced ? COLORS[number % COLORS.length] : color, size: 9,
        symbol: isPlaced ? ["circle", "x", "diamond", "star"][number % 4] : "circle"},
    };
  });
}

// A line below an equal one is wider, so that both are seen.
function numAbove(line, lines) {
  const equal = (other) => other.name === line.name && String(other.values) === String(line.values);
  return lines.filter((other) => other.run > line.run && equal(other)).length;
}

// Plotly gives a line of one value an axis from one below to one above it, where 0.001 is 0.
function isConstant(chart) {
  return new Set(chart.lines.filter((line) => shows(line.run)).flatMap((line) => line.values ?? []).filter((value) => value !== null)).size === 1;
}

function layoutOf(chart) {
  const axis = {gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true};
  const isLine = chart.kind === "lines";
  const placed = chart.kind === "moments" ? AXES.time : isLine ? AXES[form.elements.axis.value] : "";
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", barmode: "stack", autosize: true,
    font: {color: style("--text"), family: "system-ui, sans-serif", size: 12},
    margin: {l: 50, r: 10, t: 10, b: 40}, showlegend: true, legend: {orientation: "h", y: -0.32},
    xaxis: {...axis, title: {text: placed}},
    yaxis: {...axis, rangemode: isConstant(chart) ? "tozero" : "normal", title: {text: plain(chart.unit)}, type: isLine && form.elements.log.checked ? "log" : chart.kind === "moments" ? "category" : undefined},
  };
}

function draw(chart) {
  const options = {displayModeBar: false, responsive: true};
  Plotly.react(document.getElementById(`plot-${chart.id}`), tracesOf(chart), layoutOf(chart), options);
}

function cell(row, kind, text, isNumber) {
  const made = row.appendChild(document.createElement(kind));
  made.textContent = text ?? "";
  if (isNumber) made.className = "number";
  if (kind === "th") made.scope = "col";
}

function fill(table, chart) {
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  const body = table.createTBody();
  const lines = chart.lines.filter((line) => shows(line.run));
  if (chart.kind === "moments") {
    for (const name of ["run", "when", "what"]) cell(head, "th", name);
    const rows = lines.flatMap((line) => line.times.map((time, number) => [time, line, number]));
    for (const [, line, number] of rows.sort((one, other) => one[0] - other[0])) {
      const row = body.insertRow();
      for (const text of [data.runs[line.run].name, line.dates[number], line.texts[number]]) cell(row, "td", text);
    }
    return;
  }
  const isBars = chart.kind === "bars";
  cell(head, "th", isBars ? "process" : "step", !isBars);
  for (const line of lines) cell(head, "th", titleOf(line), true);
  const rows = new Map();
  lines.forEach((line, column) => line.values.forEach((value, number) => {
    const place = isBars ? line.labels[number] : line.steps[number];
    if (!rows.has(place)) rows.set(place, []);
    rows.get(place)[column] = value;
  }));
  const places = [...rows.keys()];
  if (!isBars) places.sort((one, other) => one - other);
  for (const place of places) {
    const row = body.insertRow();
    cell(row, "td", place, !isBars);
    for (let column = 0; column < lines.length; column += 1) cell(row, "td", rows.get(place)[column], true);
  }
}

for (const chart of data.charts) {
  const details = document.getElementById(`numbers-${chart.id}`);
  details.addEventListener("toggle", () => details.open && fill(details.querySelector("table"), chart));
}
// All of them, not as they come into sight: a picture of the whole page scrolls nowhere.
for (const chart of data.charts) draw(chart);

function drawAgain() {
  for (const chart of data.charts) draw(chart);
  for (const chart of data.charts) {
    const details = document.getElementById(`numbers-${chart.id}`);
    if (details.open) fill(details.querySelector("table"), chart);
  }
}
// On paper there is no dark.
addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printing");
  for (const chart of data.charts) draw(chart);
});
addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  drawAgain();
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", drawAgain);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
document.documentElement.dataset.ready = "yes";
