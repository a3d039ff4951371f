"use strict";
// Painting: everything here gets a context, what to draw and the view, and keeps nothing.

const APART = 80; // pixels between two lines of the grid
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

function readColours(kinds) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const colours = {};
  for (const name of ["page", "panel", "line", "grid", "text", "quiet", "accent", "fault", "limit", ...kinds]) {
    colours[name] = colour(name);
  }
  colours.label = parseInt(colour("label"), 10);
  return colours;
}

// A canvas of that size in CSS pixels, sharp on any screen.
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [columns, lines] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== columns || canvas.height !== lines) {
    canvas.width = columns;
    canvas.height = lines;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = FONT;
  return context;
}

function xOf(at, view, width) {
  return ((at - view.begin) / (view.end - view.begin)) * width;
}

function drawGrid(context, view, size, colours) {
  context.fillStyle = colours.page;
  context.fillRect(0, 0, size.width, size.height);
  context.fillStyle = colours.grid;
  for (const at of gridLines(view.begin, view.end, size.width, APART).lines) {
    context.fillRect(Math.round(xOf(at, view, size.width)), 0, 1, size.height);
  }
}

// Round moments, and the lower bound where it is in view. Labels that would overlap are left out.
function drawAxis(context, view, size, colours, bound, left) {
  context.fillStyle = colours.panel;
  context.fillRect(0, 0, left + size.width, size.height);
  context.textBaseline = "middle";
  const { step, lines } = gridLines(view.begin, view.end, size.width, APART);
  let taken = [Infinity, -Infinity];
  if (bound !== null && bound >= view.begin && bound <= view.end) {
    const text = `lower bound ${formatDuration(bound / 1e6)}`;
    const x = left + xOf(bound, view, size.width);
    const half = context.measureText(text).width / 2 + 6;
    const middle = Math.min(Math.max(x, left + half), left + size.width - half);
    taken = [middle - half, middle + half];
    context.fillStyle = colours.accent;
    context.textAlign = "center";
    context.fillText(text, middle, size.height / 2);
    context.fillRect(Math.round(x), size.height - 5, 2, 5);
  }
  context.fillStyle = colours.quiet;
  context.textAlign = "left";
  for (const at of lines) {
    const x = left + xOf(at, view, size.width);
    const text = formatMoment(at, step, view.end);
    const wide = context.measureText(text).width;
    // Right of its line; the last one left of it, where there is no more room.
    const begin = x + 4 + wide < left + size.width ? x + 4 : x - 4 - wide;
    context.fillRect(Math.round(x), size.height - 5, 1, 5);
    if (begin + wide < taken[0] || begin > taken[1]) context.fillText(text, begin, size.height / 2);
  }
}

// Merged spans are the paler the less of their time was busy; waiting is no work, and recedes.
function strengthOf(track, index, kind) {
  return (kind === "wait" ? 0.35 : 1) * (track.busy ? 0.3 + 0.7 * track.busy[index] : 1);
}

function drawSpans(context, track, band, view, width, paint) {
  const lanes = Math.max(1, track.lanes);
  const gap = band.height / lanes >= 6 ? 1 : 0;
  const height = band.height / lanes;
  for (let index = 0; index < track.begin.length && track.begin[index] <= view.end; index++) {
    const kind = paint.kinds[track.kind[index]];
    if (track.end[index] < view.begin || paint.hidden.has(kind)) continue;
    const x = Math.max(-2, xOf(track.begin[index], view, width));
    const wide = Math.min(width + 2, xOf(track.end[index], view, width)) - x;
    const y = band.y - paint.scroll + track.lane[index] * height;
    context.globalAlpha = strengthOf(track, index, kind);
    context.fillStyle = paint.colours[kind];
    // A gap between neighbours, where there is room for one; what is shorter than a pixel is still there.
    context.fillRect(x, y, wide > 3 ? wide - 1 : Math.max(0.7, wide), height - gap);
    context.globalAlpha = 1;
    // Words on a pale bar would be hard to read.
    if (wide > 54 && height >= 13 && !track.busy && kind !== "wait") drawInside(context, track, index, x, y, wide, height - gap, paint);
  }
}

function drawInside(context, track, index, x, y, wide, height, paint) {
  const kind = paint.kinds[track.kind[index]];
  const label = track.labels[track.label[index]] || kind;
  context.fillStyle = paint.inks[kind];
  context.textBaseline = "middle";
  context.textAlign = "left";
  const text = fitted(context, label, wide - 10);
  if (text) context.fillText(text, x + 5, y + height / 2 + 0.5);
}

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Math.floor((text.length * room) / context.measureText(text).width) - 1;
  return letters >= 4 ? `${text.slice(0, letters)}…` : "";
}

// Black or white, whichever is easier to read on a colour.
function inkOn(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

// Many tracks in little room: each is a strip, and thin ones blend into a shade.
function drawStrips(context, timeline, tracks, band, view, width, paint) {
  const height = band.height / tracks.length;
  tracks.forEach((number, position) => {
    const track = timeline.byTrack.get(number);
    if (!track) return;
    const y = band.y - paint.scroll + position * height;
    for (let index = 0; index < track.begin.length && track.begin[index] <= view.end; index++) {
      const kind = paint.kinds[track.kind[index]];
      if (track.end[index] < view.begin || paint.hidden.has(kind)) continue;
      const x = Math.max(-2, xOf(track.begin[index], view, width));
      context.globalAlpha = strengthOf(track, index, kind);
      context.fillStyle = paint.colours[kind];
      context.fillRect(x, y, Math.max(0.7, Math.min(width + 2, xOf(track.end[index], view, width)) - x), height);
    }
  });
  context.globalAlpha = 1;
}

function drawCurve(context, row, timelines, view, width, paint) {
  const band = row.bands[0];
  const base = band.y - paint.scroll + band.height;
  const room = band.height - 14;
  const yOf = (value) => base - (value / row.top) * room;
  timelines.forEach((timeline, position) => {
    const curve = timeline.byCurve.get(row.curve);
    if (curve) drawSteps(context, curve, timeline, { view, width, yOf, base }, position === 0, paint.colours);
  });
  context.strokeStyle = paint.colours.limit;
  context.lineWidth = 1.5;
  context.setLineDash([2, 3]);
  for (const limit of new Set(row.limits)) {
    context.beginPath();
    context.moveTo(0, yOf(limit));
    context.lineTo(width, yOf(limit));
    context.stroke();
  }
  context.setLineDash([]);
}

// The first timeline is an area with a line, others are dashed lines, so that both can be seen where they agree.
function drawSteps(context, curve, timeline, frame, first, colours) {
  const { view, width, yOf, base } = frame;
  context.beginPath();
  let y = base;
  let from = null;
  for (let index = 0; index <= curve.at.length; index++) {
    const at = index < curve.at.length ? curve.at[index] : Math.max(timeline.end, curve.at[curve.at.length - 1]);
    const x = Math.max(-2, Math.min(width + 2, xOf(at, view, width)));
    if (from === null) context.moveTo((from = x), base);
    else context.lineTo(x, y);
    y = index < curve.at.length ? yOf(curve.value[index]) : base;
    context.lineTo(x, y);
  }
  context.strokeStyle = first ? colours.accent : colours.text;
  context.lineWidth = 1.5;
  context.setLineDash(first ? [] : [5, 3]);
  context.stroke();
  context.setLineDash([]);
  if (first) {
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.18;
    context.fill();
    context.globalAlpha = 1;
  }
}

// A triangle for a fault, a dot for progress: not told apart by colour alone.
function drawMarks(context, row, timelines, view, width, paint) {
  for (const timeline of timelines) {
    for (const mark of timeline.marks) {
      const x = xOf(mark.at, view, width);
      if (x < -8 || x > width + 8) continue;
      const y = row.bands[0].y - paint.scroll + 2;
      context.fillStyle = mark.fine ? paint.colours.quiet : paint.colours.fault;
      context.beginPath();
      if (mark.fine) {
        context.arc(x, y + 6, 3, 0, 2 * Math.PI);
      } else {
        context.moveTo(x - 6, y);
        context.lineTo(x + 6, y);
        context.lineTo(x, y + 11);
      }
      context.fill();
    }
  }
}

// Through all rows, so that it can be seen what a fault held up.
function drawFaultLines(context, timelines, view, size, colours) {
  context.strokeStyle = colours.fault;
  context.lineWidth = 1;
  context.setLineDash([4, 4]);
  for (const mark of timelines.flatMap((timeline) => timeline.marks)) {
    if (mark.fine || mark.at < view.begin || mark.at > view.end) continue;
    const x = Math.round(xOf(mark.at, view, size.width)) + 0.5;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, size.height);
    context.stroke();
  }
  context.setLineDash([]);
}
