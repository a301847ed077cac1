"use strict";
// Draws the page's figures and its table from the JSON that is embedded in it.

const data = JSON.parse(document.getElementById("data").textContent);
const ops = data.ops;
const nOps = ops.name.length;
const plain = data.plain;
const shown = data.planned || plain; // the run that the timeline shows
const isNarrow = () => window.innerWidth < 600;

// ---------------------------------------------------------------- units, as on the command line

function scaled(value, base, units) {
  let at = 0;
  while (Math.abs(Number(value.toPrecision(3))) >= 1000 && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  const rounded = Number(value.toPrecision(3));
  const text = rounded === 0 || Math.abs(rounded) >= 1000 ? value.toFixed(0) : value.toPrecision(3);
  return text + units[at];
}
function bytes(count) {
  return Math.abs(count) < 1024 ? count + " B" : scaled(count / 1024, 1024, [" KiB", " MiB", " GiB", " TiB"]);
}
const micros = (us) => scaled(us, 1000, [" µs", " ms", " s"]);
const count = (n) => (n < 1000 ? String(n) : scaled(n / 1000, 1000, ["k", "M", "G", "T", "P"]));
function percent(share) {
  if (share > 0 && share < 0.005) return "<1%";
  return (share * 100).toFixed(0) + "%";
}
const ratio = (value) => (value === null ? "" : String(Number(value.toPrecision(3))));
// What the figures show may hold a few tags of HTML: names must not.
const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
function shorten(text, width) {
  if (text.length <= width) return text;
  const head = Math.floor((width - 1) / 3);
  return text.slice(0, head) + "…" + text.slice(text.length - (width - 1 - head));
}

// ---------------------------------------------------------------- axes

const unitOf = (most) => [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "bytes"]]
  .find(([size]) => most >= size || size === 1);
const byteUnit = unitOf(Math.max(plain.peak.bytes, shown.peak.bytes));
const timeUnit = shown.step_us >= 1e6 ? [1e6, "s"] : shown.step_us >= 1000 ? [1000, "ms"] : [1, "µs"];

// A run is the step as it goes, plain or planned: at position i runs op opAt(run, i).
const opAt = (run, position) => (run.ops ? run.ops[position] : position);
const copyAt = (run, position) => (run.copies ? run.copies[position] : 0);
const lengthOf = (run) => run.live_bytes.length;
const drawn = (run) => run.positions || run.live_bytes.map((_, index) => index);

function axis(kind, run) {
  // start(i): where position i starts on the axis; the one after the last is the step's end
  const n = lengthOf(run);
  if (kind === "op") return { start: (position) => position, title: "op, in the order they run", end: n };
  const at = (position) => run.starts_us[position] / timeUnit[0];
  return { start: at, title: "time in the step, " + timeUnit[1], end: at(n) };
}

function bands(run, x, yBottom) {
  const shapes = [], labels = [];
  for (const [phase, first, last] of run.bands) {
    const [from, to] = [x.start(first), x.start(last + 1)];
    shapes.push({
      type: "rect", layer: "below", xref: "x", yref: "paper", x0: from, x1: to, y0: yBottom, y1: 1,
      fillcolor: data.band_colours[phase], line: { width: 0 },
    });
    if (from > 0) shapes.push({
      type: "line", layer: "above", xref: "x", yref: "paper", x0: from, x1: from, y0: 0, y1: 1,
      line: { color: "#55606d", width: 1, dash: "dot" },
    });
    if ((to - from) / x.end > (isNarrow() ? 0.18 : 0.07)) labels.push({
      text: phase, showarrow: false, xref: "x", yref: "paper", x: (from + to) / 2, y: 1,
      yanchor: "bottom", font: { size: 13, color: "#55606d" },
    });
  }
  return { shapes, labels };
}

const font = { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: 12, color: "#1c2530" };
const config = () => ({
  responsive: true, displaylogo: false, doubleClick: "reset", displayModeBar: isNarrow() ? false : "hover",
  modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],
});

// ---------------------------------------------------------------- memory over the step

function hover(run, position) {
  const op = opAt(run, position), again = copyAt(run, position) ? ", computed again" : "";
  const roles = run.stack
    .map((role) => [role.label, Array.isArray(role.bytes) ? role.bytes[position] : role.bytes])
    .filter((role) => role[1] > 0)
    .sort((a, b) => b[1] - a[1])
    .slice(0, 4)
    .map((role) => `   ${role[0]} ${bytes(role[1])}`);
  const lines = [
    `<b>${safe(shorten(ops.name[op], 44))}</b>${again}`,
    `op ${op}, ${data.phases[ops.phase[op]]}, ${micros(ops.time_us[op])}`,
    `<b>${bytes(run.live_bytes[position])}</b> in use:`, ...roles,
    safe(shorten(data.modules[ops.module[op]], 44)), safe(shorten(data.sources[ops.source[op]], 44)),
  ];
  return lines.filter((line) => line).join("<br>");
}

const most = (amounts) => (Array.isArray(amounts) ? amounts.reduce((a, b) => Math.max(a, b), 0) : amounts);
const held = (values) => values.concat(values.slice(-1)); // each op's bytes last until the next
const positions = drawn(shown);
const hovers = positions.map((position) => hover(shown, position));

function plainOutline(kind, x) {
  // op by op, a plain op stands where the planned step runs the captured op
  const place = [];
  shown.live_bytes.forEach((_, position) => { if (!copyAt(shown, position)) place[opAt(shown, position)] = position; });
  const at = drawn(plain), own = axis("time", plain);
  return {
    type: "scatter", mode: "lines", name: "plain step", hoverinfo: "skip",
    x: kind === "op" ? at.map((op) => place[op]).concat([x.end]) : at.map(own.start).concat([own.end]),
    y: held(at.map((op) => plain.live_bytes[op] / byteUnit[0])),
    line: { width: 1.5, color: "#55606d", dash: "dash", shape: "hv" },
  };
}

function drawTimeline(kind) {
  const x = axis(kind, shown);
  const xs = positions.map(x.start).concat([x.end]);
  const highest = Math.max(plain.peak.bytes, shown.peak.bytes) / byteUnit[0];
  const traces = shown.stack.map((role) => ({
    type: "scatter", mode: "lines", stackgroup: "memory", name: role.label, x: xs,
    y: held(positions.map((at) => (Array.isArray(role.bytes) ? role.bytes[at] : role.bytes) / byteUnit[0])),
    line: { width: 0, shape: "hv" }, fillcolor: role.colour, hoverinfo: "skip",
    showlegend: most(role.bytes) > 0.002 * shown.peak.bytes, // thinner than a line: nothing to name
  }));
  if (data.planned) traces.push(plainOutline(kind, x));
  traces.push({
    type: "scatter", mode: "lines", name: "all", showlegend: false, x: xs,
    y: held(positions.map((at) => shown.live_bytes[at] / byteUnit[0])),
    line: { width: 1, color: "#1c2530", shape: "hv" },
    text: held(hovers), hovertemplate: "%{text}<extra></extra>",
  });
  const { shapes, labels } = bands(shown, x, 0);
  const top = shown.peak.bytes / byteUnit[0];
  const at = shown.peak.position, name = ops.name[opAt(shown, at)] || "";
  const peakX = (x.start(at) + x.start(at + 1)) / 2;
  const isRight = peakX > x.end / 2;
  labels.push({
    text: `<b>peak ${bytes(shown.peak.bytes)}</b><br>${safe(shorten(name, isNarrow() ? 22 : 40))}`,
    x: peakX, y: top, xref: "x", yref: "y", showarrow: true, arrowhead: 2, arrowsize: 1,
    ax: isRight ? -26 : 26, ay: -30, xanchor: isRight ? "right" : "left", align: isRight ? "right" : "left",
    bgcolor: "rgba(255,255,255,.85)", bordercolor: "#1c2530", borderpad: 3,
  });
  const budget = (data.budget_bytes || 0) / byteUnit[0];
  if (budget && budget <= highest * 1.2) {
    shapes.push({
      type: "line", layer: "above", xref: "paper", yref: "y", x0: 0, x1: 1, y0: budget, y1: budget,
      line: { color: "#1c2530", width: 1.2, dash: "dot" },
    });
    labels.push({
      text: `budget ${bytes(data.budget_bytes)}`, showarrow: false, xref: "paper", yref: "y", x: 1, y: budget,
      xanchor: "right", yanchor: "bottom", font: { size: 12, color: "#1c2530" },
    });
  }
  return Plotly.newPlot("timeline", traces, {
    font, height: isNarrow() ? 440 : 480, margin: { l: 52, r: 12, t: isNarrow() ? 30 : 50, b: 60 }, hovermode: "x",
    hoverdistance: -1, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    hoverlabel: { align: "left", bgcolor: "#fff", bordercolor: "#55606d", font: { color: "#1c2530" } },
    xaxis: { title: { text: x.title, standoff: 8 }, range: [0, x.end], zeroline: false, gridcolor: "#e3e8ee" },
    yaxis: { title: { text: byteUnit[1] }, range: [0, highest * 1.25 || 1], gridcolor: "#e3e8ee", fixedrange: true },
    legend: { orientation: "h", x: 0, y: -0.16, yanchor: "top", traceorder: "normal" }, shapes, annotations: labels,
  }, config());
}

// ---------------------------------------------------------------- activations

function drawActivations(kind) {
  const rows = data.activations;
  const box = document.getElementById("activation-section");
  if (!rows.length) { box.hidden = true; return null; }
  const x = axis(kind, plain);
  const from = rows.map((row) => x.start(row.from + 1)); // idle from the end of the last forward use
  const narrow = isNarrow();
  const trace = {
    type: "bar", orientation: "h", y: rows.map((_, index) => index), base: from,
    x: rows.map((row, index) => Math.max(x.start(row.to) - from[index], 0)),
    marker: {
      color: rows.map((row) => row.bytes / 2 ** 20),
      colorscale: [[0, "#fbe3b3"], [0.5, "#e69f00"], [1, "#7a4300"]], showscale: !narrow, cmin: 0, cmax: Math.max(...rows.map((row) => row.bytes)) / 2 ** 20,
      colorbar: { title: { text: "MiB" }, thickness: 12, len: 0.5, y: 1, yanchor: "top" },
    },
    text: rows.map((row) =>
      `<b>${safe(shorten(row.name, 44))}</b>, ${bytes(row.bytes)}<br>${safe(row.dtype)} ${row.shape.join("×")}<br>`
      + `idle ${micros(row.idle_us)}<br>last forward use: op ${row.from}, ${safe(shorten(ops.name[row.from], 34))}<br>`
      + `first backward use: op ${row.to}, ${safe(shorten(ops.name[row.to], 34))}<br>`
      + `${safe(shorten(row.module, 48))}<br>${safe(shorten(row.source, 48))}`),
    textposition: "none", hovertemplate: "%{text}<extra></extra>",
  };
  const { shapes, labels } = bands(plain, x, 0);
  return Plotly.newPlot("activations", [trace], {
    font, height: Math.max(220, 90 + rows.length * 14), bargap: 0.25, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    margin: { l: narrow ? 12 : 262, r: 12, t: narrow ? 30 : 50, b: 50 }, hovermode: "closest",
    hoverlabel: { align: "left", bgcolor: "#fff", bordercolor: "#55606d", font: { color: "#1c2530" } },
    xaxis: { title: { text: x.title, standoff: 8 }, range: [0, x.end], zeroline: false, gridcolor: "#e3e8ee" },
    yaxis: {
      range: [rows.length - 0.5, -0.5], fixedrange: true, showgrid: false, zeroline: false, showticklabels: !narrow,
      tickvals: rows.map((_, index) => index), tickfont: { size: 11 },
      ticktext: rows.map((row) => safe(row.label)),
    },
    shapes, annotations: labels,
  }, config());
}

// ---------------------------------------------------------------- tables
// A column is its title, the row's key and, for numbers, how they are shown. One without that is text.

const OPERATORS = {
  kinds: {
    rows: data.operators,
    columns: [
      ["operator", "label"], ["calls", "ops", String], ["time", "time_us", micros], ["share", "share", percent],
      ["average", "mean_us", micros], ["FLOPs", "flops", count], ["moved", "moved_bytes", bytes],
      ["FLOPs/B", "intensity", ratio],
    ],
    sort: ["time_us", -1],
  },
  ops: {
    rows: ops.name.map((name, op) => ({
      index: op, name, phase: data.phases[ops.phase[op]], module: data.modules[ops.module[op]],
      source: data.sources[ops.source[op]], target: data.targets[ops.target[op]], time_us: ops.time_us[op],
      workspace_bytes: ops.workspace_bytes[op], flops: ops.flops[op], moved_bytes: ops.moved_bytes[op],
      live_bytes: plain.live_bytes[op],
    })),
    columns: [
      ["#", "index", String], ["op", "name"], ["phase", "phase"], ["time", "time_us", micros], ["in use", "live_bytes", bytes],
      ["scratch", "workspace_bytes", bytes], ["FLOPs", "flops", count], ["moved", "moved_bytes", bytes],
      ["module", "module"], ["source", "source"], ["operator", "target"],
    ],
    sort: ["time_us", -1],
  },
};
function decisionTables(rows) {
  const columns = [
    ["", "verb"], ["bytes", "bytes", bytes], ["time added", "added_us", (us) => (us === null ? "" : micros(us))],
    ["made by", "operator"], ["module", "module"], ["why", "reason"], ["name", "name"], ["source", "source"],
  ];
  const table = (verb) => ({
    rows: verb === "all" ? rows : rows.filter((row) => row.verb === verb), columns, sort: ["bytes", -1],
    style: (column, row) => (column === "reason" ? "wrap" : column === "verb" ? row.verb : ""),
  });
  return { all: table("all"), drop: table("drop"), keep: table("keep") };
}
const AT_ONCE = 100;

function compare(a, b) {
  if (a === null || b === null) return a === b ? 0 : a === null ? -1 : 1;
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}
function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Draws one of several tables into a place, with its search box and the radio buttons that choose.
function tableIn(place, prefix, radio, tables) {
  const find = (id) => document.getElementById(prefix + id);
  const radios = [...document.querySelectorAll(`input[name=${radio}]`)];
  const state = { table: radios.find((input) => input.checked).value, query: "", all: false };
  function draw() {
    const table = tables[state.table];
    const [key, direction] = table.sort;
    const query = state.query.toLowerCase();
    const found = table.rows.filter((row) => !query || table.columns.some(
      ([, column, show]) => !show && row[column].toLowerCase().includes(query)));
    found.sort((a, b) => direction * compare(a[key], b[key]));
    const rows = state.all ? found : found.slice(0, AT_ONCE);
    const heads = element("tr");
    for (const [title, column, show] of table.columns) {
      const head = element("th", undefined, show ? "number" : "");
      if (column === key) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      const button = element("button", title);
      button.type = "button";
      button.addEventListener("click", () => {
        table.sort = column === key ? [key, -direction] : [column, show ? -1 : 1];
        draw();
      });
      head.append(button);
      heads.append(head);
    }
    const body = document.createDocumentFragment();
    for (const row of rows) {
      const line = element("tr");
      for (const [, column, show] of table.columns) {
        const style = show ? "number" : table.style ? table.style(column, row) : "";
        const cell = element("td", show ? show(row[column]) : row[column], style);
        if (!show) cell.title = row[column];
        line.append(cell);
      }
      body.append(line);
    }
    document.querySelector(`#${place} thead`).replaceChildren(heads);
    document.querySelector(`#${place} tbody`).replaceChildren(body);
    find("shown").textContent = `${rows.length} of ${found.length} rows shown.`;
    find("more").hidden = rows.length === found.length;
  }
  for (const input of radios) {
    input.addEventListener("change", () => { state.table = input.value; state.all = false; draw(); });
  }
  find("search").addEventListener("input", (event) => { state.query = event.target.value; draw(); });
  find("more").addEventListener("click", () => { state.all = true; draw(); });
  draw();
}
