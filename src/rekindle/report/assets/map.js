// ---------------------------------------------------------------- where everything lies
// All rectangles of one role are one filled trace, so that thousands stay fluid. What covers too little of
// the screen is left out, until one zooms in. Which piece is pointed at is found here, not by plotly.

const LEAST_AREA = 0.25; // pixels
const gap = (side) => Math.min(Math.max(0.15 * (side - 2.5), 0), 0.4); // pixels left free, where there is room
const REACH = 3; // pixels by which one may miss a rectangle
const map = data.map;
const mapBox = document.getElementById("map");
const mapState = { rects: [], kinds: [] };

function pieceName(piece) {
  const [isEnding, text] = map.names[map.name[piece]];
  return isEnding ? ops.name[opAt(shown, map.start[piece])] + text : text;
}
const pieceBytes = (piece) => map.size[piece] * map.unit_bytes;
const pieceAddress = (piece) => map.offset[piece] * map.unit_bytes;
const isAgain = (piece) => copyAt(shown, map.start[piece]) > 0;
const isTwin = (a, b) => a !== b && map.name[a] === map.name[b]
  && opAt(shown, map.start[a]) === opAt(shown, map.start[b]); // two copies of one storage

// The part of the axes in view, and how many pixels a unit of each has.
function mapView() {
  const { xaxis, yaxis } = mapBox.layout, place = mapBox.querySelector(".nsewdrag").getBoundingClientRect();
  const [x0, x1] = xaxis.range, [y0, y1] = yaxis.range;
  return { x0, x1, y0, y1, place, perX: place.width / (x1 - x0), perY: place.height / (y1 - y0) };
}

function rectangles(view) {
  const filled = mapState.kinds.map(() => ({ x: [], y: [] }));
  const left = { pieces: 0, bytes: 0, area: 0, allArea: 0 };
  mapState.rects.forEach((rect, piece) => {
    if (rect.x1 < view.x0 || rect.x0 > view.x1 || rect.y1 < view.y0 || rect.y0 > view.y1 || !map.size[piece]) return;
    const wide = (rect.x1 - rect.x0) * view.perX, high = (rect.y1 - rect.y0) * view.perY;
    const area = (Math.min(rect.x1, view.x1) - Math.max(rect.x0, view.x0)) * view.perX
      * (Math.min(rect.y1, view.y1) - Math.max(rect.y0, view.y0)) * view.perY; // what is in view
    left.allArea += area;
    if (wide * high < LEAST_AREA) {
      left.pieces += 1;
      left.area += area;
      left.bytes += pieceBytes(piece);
      return;
    }
    const { x, y } = filled[rect.kind], [beside, below] = [gap(wide) / view.perX, gap(high) / view.perY];
    x.push(rect.x0 + beside, rect.x0 + beside, rect.x1 - beside, rect.x1 - beside, null);
    y.push(rect.y0 + below, rect.y1 - below, rect.y1 - below, rect.y0 + below, null);
  });
  return { filled, left };
}

function tellLeftOut(left) {
  const many = left.pieces === 1 ? "1 piece" : `${left.pieces.toLocaleString("en")} pieces`;
  document.getElementById("map-left-out").textContent = left.pieces
    ? `Too small to be drawn at this scale: ${many}; their sizes add up to ${bytes(left.bytes)}, and they `
      + `would cover ${percent(left.area / left.allArea)} of the coloured area.` : "";
}

function refillMap() {
  const { filled, left } = rectangles(mapView());
  filled.forEach((each, kind) => {
    if (each.x.length) mapState.kinds[kind].isSeen = true;
    else if (mapState.kinds[kind].isSeen) each.x = each.y = [null]; // keeps its place in the legend
  });
  hideLabel();
  tellLeftOut(left);
  return Plotly.restyle(mapBox, { x: filled.map((each) => each.x), y: filled.map((each) => each.y) });
}

function drawMap(kind) {
  if (!map) return null;
  const x = axis(kind, shown), unit = unitOf(map.arena_bytes);
  mapState.kinds = [];
  const numbers = {};
  map.roles.forEach((role, number) => [false, true].forEach((again) => {
    if (!map.role.some((each, piece) => each === number && isAgain(piece) === again)) return;
    numbers[`${number} ${again}`] = mapState.kinds.length;
    mapState.kinds.push({ ...role, again });
  }));
  mapState.rects = map.start.map((start, piece) => ({
    x0: x.start(start), x1: x.start(map.end[piece] + 1),
    y0: pieceAddress(piece) / unit[0], y1: (pieceAddress(piece) + pieceBytes(piece)) / unit[0],
    kind: numbers[`${map.role[piece]} ${isAgain(piece)}`],
  }));
  const traces = mapState.kinds.map((each) => ({
    type: "scatter", mode: "none", fill: "toself", hoverinfo: "skip", x: [], y: [],
    name: each.again ? `${each.label}, computed again` : each.label, fillcolor: each.colour,
    ...(each.again ? { fillpattern: { shape: "/", size: 5, solidity: 0.3, bgcolor: each.colour, fgcolor: "#fff" } } : {}),
  }));
  const { shapes, labels } = bands(shown, x, 0);
  const bound = map.bound_bytes / unit[0], top = map.arena_bytes / unit[0];
  const across = (y, style) => shapes.push({
    type: "line", layer: "above", xref: "paper", yref: "y", x0: 0, x1: 1, y0: y, y1: y, line: { color: "#1c2530", ...style },
  });
  across(bound, { width: 1.2, dash: "dot" });
  if (top > bound) across(top, { width: 1 });
  labels.push({
    text: `arena ${bytes(map.arena_bytes)}`, showarrow: false, xref: "paper", yref: "y", x: 0, y: top,
    xanchor: "left", yanchor: "bottom", font: { size: 12, color: "#1c2530" },
  });
  hideLabel();
  const drawn = Plotly.newPlot(mapBox, traces, {
    font, height: isNarrow() ? 460 : 560, margin: { l: 52, r: 12, t: isNarrow() ? 30 : 50, b: 60 }, hovermode: false,
    paper_bgcolor: "#fff", plot_bgcolor: "#fff",
    xaxis: { title: { text: x.title, standoff: 8 }, range: [0, x.end], zeroline: false, gridcolor: "#e3e8ee" },
    yaxis: { title: { text: `address, ${unit[1]}` }, range: [0, top * 1.08 || 1], zeroline: false, gridcolor: "#e3e8ee" },
    legend: { orientation: "h", x: 0, y: -0.14, yanchor: "top", traceorder: "normal" }, shapes, annotations: labels,
  }, config());
  return drawn.then(() => {
    mapBox.on("plotly_relayout", refillMap);
    return refillMap();
  });
}

// ---------------------------------------------------------------- pointing at the map

// How far, in pixels, a place is from a rectangle; 0 inside it.
function distance(rect, x, y, view) {
  const across = Math.max(rect.x0 - x, x - rect.x1, 0) * view.perX;
  return Math.max(across, Math.max(rect.y0 - y, y - rect.y1, 0) * view.perY);
}

function pieceAt(clientX, clientY) {
  const view = mapView(), { place } = view;
  const x = view.x0 + (clientX - place.left) / view.perX, y = view.y1 - (clientY - place.top) / view.perY;
  if (x < view.x0 || x > view.x1 || y < view.y0 || y > view.y1) return null;
  let best = null, least = REACH;
  mapState.rects.forEach((rect, piece) => {
    if (!map.size[piece] || mapBox.data[rect.kind].visible === "legendonly") return;
    const far = distance(rect, x, y, view);
    // of those that share a place for one op, the later one is on top
    if (far < least || (far === 0 && least === 0)) { best = piece; least = far; }
  });
  return best;
}

function describe(piece) {
  const first = map.start[piece], last = map.end[piece], op = opAt(shown, first);
  const unit = unitOf(map.arena_bytes), address = (at) => (at / unit[0]).toFixed(unit[0] > 1 ? 3 : 0), at = pieceAddress(piece);
  const over = map.over.find(([result]) => result === piece);
  const under = map.over.find(([, below]) => below === piece);
  const [from, to] = [shown.starts_us[first], shown.starts_us[last + 1]];
  return [
    `${map.roles[map.role[piece]].label}, ${bytes(pieceBytes(piece))}`,
    isAgain(piece) ? "computed again" : "",
    over ? `written in place over ${shorten(pieceName(over[1]), 40)}` : "",
    under ? `${shorten(pieceName(under[0]), 40)} is written over it` : "",
    `made by op ${op}, ${shorten(ops.name[op], 36)}, ${data.phases[ops.phase[op]]}`,
    `until op ${opAt(shown, last)}, ${shorten(ops.name[opAt(shown, last)], 36)}, has run`,
    `there for ${micros(to - from)}, from ${micros(from)} to ${micros(to)}`,
    `address ${address(at)} to ${address(at + pieceBytes(piece))} ${unit[1]}`,
    shorten(data.modules[ops.module[op]], 48), shorten(data.sources[ops.source[op]], 48),
  ].filter((line) => line);
}

// Puts a box around a piece; what is out of view is cut off.
function surround(box, piece, view) {
  const rect = mapState.rects[piece], home = mapBox.parentElement.getBoundingClientRect();
  const left = Math.max((rect.x0 - view.x0) * view.perX, 0), top = Math.max((view.y1 - rect.y1) * view.perY, 0);
  const right = Math.min((rect.x1 - view.x0) * view.perX, view.place.width);
  const bottom = Math.min((view.y1 - rect.y0) * view.perY, view.place.height);
  box.hidden = right < left || bottom < top;
  box.style.left = `${left + view.place.left - home.left - 2}px`;
  box.style.top = `${top + view.place.top - home.top - 2}px`;
  box.style.width = `${Math.max(right - left, 1) + 4}px`;
  box.style.height = `${Math.max(bottom - top, 1) + 4}px`;
}

function hideLabel() {
  document.getElementById("map-label").hidden = document.getElementById("map-outline").hidden = true;
  document.getElementById("map-twins").replaceChildren();
}

function pointAt(clientX, clientY) {
  const piece = pieceAt(clientX, clientY);
  if (piece === null) { hideLabel(); return; }
  const view = mapView(), home = mapBox.parentElement.getBoundingClientRect();
  const label = document.getElementById("map-label");
  label.replaceChildren(element("b", shorten(pieceName(piece), 44)), ...describe(piece).map((line) => element("span", line)));
  label.hidden = false;
  const [x, y] = [clientX - home.left, clientY - home.top];
  const { offsetWidth: wide, offsetHeight: high } = label, isBeside = x + 16 + wide <= home.width || x >= 16 + wide;
  const left = !isBeside ? x - wide / 2 : x + 16 + wide <= home.width ? x + 16 : x - 16 - wide;
  const top = isBeside ? y - high / 2 : y >= 24 + high ? y - 24 - high : y + 24;
  label.style.left = `${Math.max(Math.min(left, home.width - wide), 0)}px`;
  label.style.top = `${Math.max(isBeside ? Math.min(top, home.height - high) : top, 0)}px`;
  surround(document.getElementById("map-outline"), piece, view);
  const twins = map.start.map((_, each) => each).filter((each) => isTwin(each, piece)).map((each) => {
    const box = element("div", undefined, "outline twin");
    surround(box, each, view);
    return box;
  });
  document.getElementById("map-twins").replaceChildren(...twins);
}

if (map) {
  mapBox.addEventListener("pointermove", (event) => { if (!event.buttons) pointAt(event.clientX, event.clientY); });
  mapBox.addEventListener("pointerdown", hideLabel);
  mapBox.addEventListener("pointerup", (event) => pointAt(event.clientX, event.clientY)); // a tap
  mapBox.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hideLabel(); });
}
