"use strict";
// What the page shows, and what people do to it.

(() => {
  const element = (id) => document.getElementById(id);
  document.documentElement.classList.remove("plain");
  const data = decode(JSON.parse(element("data").textContent));
  const whole = { begin: 0, end: Math.max(1, data.end * 1.015) };
  const AXIS = 26;
  const NARROWEST = 1; // microseconds

  let view = { ...whole };
  let shown = data.timelines;
  let open = data.sections.map((section) => section.open);
  const hidden = new Set();
  let layout = { rows: [], height: 0 };
  let colours = {};
  let inks = {};
  let brush = null;
  let pointer = null;
  let waiting = false;

  const [chart, scroll, plot, axis, tip] = ["chart", "scroll", "plot", "axis", "tip"].map(element);

  // ---- layout

  function lay() {
    layout = layRows(data, shown, open);
    element("rows").style.height = `${layout.height}px`;
    const labels = element("labels");
    const focused = document.activeElement?.dataset?.section;
    labels.replaceChildren(...layout.rows.map(labelOf));
    if (focused !== undefined) labels.querySelector(`[data-section="${focused}"]`)?.focus();
    repaint();
  }

  function labelOf(row) {
    const node = document.createElement(row.shape === "head" ? "button" : "div");
    node.style.top = `${row.y}px`;
    node.style.height = `${row.height}px`;
    node.title = row.label;
    if (row.shape === "head") {
      node.type = "button";
      node.dataset.section = row.section;
      node.setAttribute("aria-expanded", String(open[row.section]));
      node.append(textNode("i", open[row.section] ? "▾" : "▸"), row.label, textNode("small", row.note));
      node.addEventListener("click", () => {
        open[row.section] = !open[row.section];
        lay();
      });
      return node;
    }
    node.className = "row";
    node.append(textNode("span", row.label));
    if (row.shape === "curve") {
      node.append(textNode("small", `peak ${formatValue(row.peak, row.unit)}`));
      if (row.limits.length) node.append(textNode("small", `limit ${formatValue(row.limits[0], row.unit)}`));
    }
    for (const band of row.bands.length > 1 ? row.bands : []) {
      const title = textNode("small", band.timeline.title);
      title.className = "band";
      title.style.top = `${band.y - row.y}px`;
      title.style.lineHeight = `${band.height}px`;
      node.append(title);
    }
    return node;
  }

  function textNode(name, text) {
    const node = document.createElement(name);
    node.textContent = text;
    return node;
  }

  // ---- painting

  function repaint() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      paint();
    });
  }

  function paint() {
    const width = Math.max(50, scroll.clientWidth - colours.label);
    const height = Math.min(scroll.clientHeight, layout.height);
    const size = { width, height };
    drawAxis(prepare(axis, chart.clientWidth, AXIS), view, { width, height: AXIS }, colours, data.bound, colours.label);
    const context = prepare(plot, width, height);
    drawGrid(context, view, size, colours);
    const settings = { kinds: data.kinds, colours, inks, hidden, scroll: scroll.scrollTop };
    for (const row of layout.rows) {
      if (row.y + row.height < settings.scroll || row.y > settings.scroll + height) continue;
      paintRow(context, row, size, settings);
    }
    paintLines(context, size);
    const digits = gridLines(view.begin, view.end, width, APART).step / 100;
    const ends = [view.begin, view.end].map((at) => formatMoment(at, digits, view.end));
    element("range").textContent = ends.join(" to ");
  }

  function paintRow(context, row, size, settings) {
    context.fillStyle = row.shape === "head" ? colours.panel : colours.grid;
    context.fillRect(0, row.y - settings.scroll, size.width, row.shape === "head" ? row.height : 1);
    if (row.shape === "curve") drawCurve(context, row, shown, view, size.width, settings);
    if (row.shape === "marks") drawMarks(context, row, shown, view, size.width, settings);
    for (const band of row.bands) {
      if (row.shape === "strips") drawStrips(context, band.timeline, row.tracks, band, view, size.width, settings);
      const track = row.shape === "spans" ? band.timeline.byTrack.get(row.track) : null;
      if (track) drawSpans(context, track, band, view, size.width, settings);
    }
  }

  function paintLines(context, size) {
    drawFaultLines(context, shown, view, size, colours);
    if (data.bound !== null) {
      context.fillStyle = colours.accent;
      context.fillRect(Math.round(xOf(data.bound, view, size.width)), 0, 1, size.height);
    }
    if (brush) {
      context.fillStyle = colours.accent;
      context.globalAlpha = 0.2;
      context.fillRect(Math.min(brush.from, brush.to), 0, Math.abs(brush.to - brush.from), size.height);
      context.globalAlpha = 1;
    } else if (pointer) {
      context.fillStyle = colours.quiet;
      context.fillRect(Math.round(pointer.x), 0, 1, size.height);
    }
  }

  function readScheme() {
    colours = readColours(data.kinds);
    inks = Object.fromEntries(data.kinds.map((kind) => [kind, inkOn(colours[kind])]));
  }

  // ---- the view

  function look(begin, end) {
    const wide = Math.min(Math.max(end - begin, NARROWEST), whole.end - whole.begin);
    const from = Math.min(Math.max(begin, whole.begin), whole.end - wide);
    view = { begin: from, end: from + wide };
    repaint();
  }

  function zoom(factor, at = (view.begin + view.end) / 2) {
    look(at - (at - view.begin) * factor, at + (view.end - at) * factor);
  }

  function move(share) {
    const step = (view.end - view.begin) * share;
    look(view.begin + step, view.end + step);
  }

  function reset() {
    look(whole.begin, whole.end);
  }

  const timeAt = (x) => view.begin + (x / plot.clientWidth) * (view.end - view.begin);
  const isWhole = () => view.end - view.begin >= whole.end - whole.begin;

  // ---- what is under the pointer

  function showTip(x, y, clientX, clientY) {
    const row = rowAt(layout.rows, y + scroll.scrollTop);
    const found = row ? described(row, x, y + scroll.scrollTop) : null;
    tip.hidden = !found;
    if (!found) return;
    const list = document.createElement("dl");
    for (const [name, value] of found.facts) list.append(textNode("dt", name), textNode("dd", value));
    tip.replaceChildren(textNode("b", found.title), list);
    const box = tip.getBoundingClientRect();
    const left = clientX + 16 + box.width > innerWidth ? clientX - 16 - box.width : clientX + 16;
    const top = clientY + 16 + box.height > innerHeight ? clientY - 16 - box.height : clientY + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, top)}px`;
  }

  function described(row, x, y) {
    const at = timeAt(x);
    const near = ((view.end - view.begin) / plot.clientWidth) * 3;
    if (row.shape === "marks") return describedMarks(at, near * 3);
    if (row.shape === "curve") return describedCurve(row, at);
    const band = row.bands.find((candidate) => y >= candidate.y && y < candidate.y + candidate.height);
    if (!band) return null;
    const place = (y - band.y) / band.height;
    if (row.shape === "strips") {
      const track = band.timeline.byTrack.get(row.tracks[Math.floor(place * row.tracks.length)]);
      return track ? describedSpan(band.timeline, track, null, at, near) : null;
    }
    const track = band.timeline.byTrack.get(row.track);
    return track ? describedSpan(band.timeline, track, Math.floor(place * track.lanes), at, near) : null;
  }

  function describedSpan(timeline, track, lane, at, near) {
    const index = spanAt(track, lane, at, near, hidden, data.kinds);
    if (index === null) return null;
    const [begin, length, bytes] = [track.begin[index], track.length[index], track.bytes[index]];
    const count = track.count ? track.count[index] : 1;
    const facts = [["where", data.tracks[track.track]]];
    if (data.timelines.length > 1) facts.push(["timeline", timeline.title]);
    if (count > 1) facts.push(["merged", `${formatCount(count)} spans, busy ${fixed(track.busy[index] * 100, 0)}%`]);
    if (bytes) facts.push(["bytes", `${formatBytes(bytes)} (${formatCount(bytes)})`]);
    facts.push(["duration", length < 1000 ? `${length} µs` : formatDuration(length / 1e6)]);
    if (bytes && length) facts.push(["rate", formatRate((bytes * 1e6) / length)]);
    facts.push(["from", `${(begin / 1e6).toFixed(6)} s`], ["to", `${((begin + length) / 1e6).toFixed(6)} s`]);
    const label = track.labels[track.label[index]];
    return { title: label ? `${data.kinds[track.kind[index]]}: ${label}` : data.kinds[track.kind[index]], facts };
  }

  function describedCurve(row, at) {
    const facts = shown
      .filter((timeline) => timeline.byCurve.has(row.curve))
      .map((timeline) => [timeline.title, formatValue(valueAt(timeline.byCurve.get(row.curve), at), row.unit)]);
    if (row.limits.length) facts.push(["limit", formatValue(row.limits[0], row.unit)]);
    facts.push(["at", `${(Math.max(0, at) / 1e6).toFixed(6)} s`]);
    return { title: row.label, facts };
  }

  function describedMarks(at, near) {
    const marks = shown.flatMap((timeline) => timeline.marks).filter((mark) => Math.abs(mark.at - at) <= near);
    if (!marks.length) return null;
    const facts = marks.slice(0, 8).map((mark) => [`${(mark.at / 1e6).toFixed(3)} s`, `${mark.kind}: ${mark.text}`]);
    if (marks.length > 8) facts.push(["", `and ${marks.length - 8} more`]);
    return { title: marks.length > 1 ? `${marks.length} events` : "1 event", facts };
  }

  // ---- what people do

  function placeOf(event) {
    const box = plot.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  plot.addEventListener("wheel", (event) => {
    if (event.ctrlKey) return;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    // All of it is in view: the wheel scrolls the page on, instead of being caught here.
    if (isWhole() && (sideways || event.deltaY > 0)) return;
    event.preventDefault();
    if (sideways) return move((event.deltaX || event.deltaY) / plot.clientWidth);
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 400))), timeAt(placeOf(event).x));
  }, { passive: false });

  let drag = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const { x } = placeOf(event);
    drag = { x, begin: view.begin, end: view.end, pans: event.shiftKey || event.pointerType === "touch" };
    plot.setPointerCapture(event.pointerId);
    scroll.focus({ preventScroll: true });
    event.preventDefault();
  });
  plot.addEventListener("pointermove", (event) => {
    const { x, y } = placeOf(event);
    pointer = { x, y };
    if (drag?.pans) {
      const step = ((drag.x - x) / plot.clientWidth) * (drag.end - drag.begin);
      look(drag.begin + step, drag.end + step);
    } else if (drag && Math.abs(x - drag.x) > 3) {
      brush = { from: drag.x, to: Math.max(0, Math.min(plot.clientWidth, x)) };
    }
    if (drag) tip.hidden = true;
    else showTip(x, y, event.clientX, event.clientY);
    repaint();
  });
  plot.addEventListener("pointerup", () => {
    if (brush && Math.abs(brush.to - brush.from) > 4) {
      look(timeAt(Math.min(brush.from, brush.to)), timeAt(Math.max(brush.from, brush.to)));
    }
    endDrag();
  });
  const endDrag = () => {
    drag = brush = null;
    repaint();
  };
  const leave = () => {
    pointer = null;
    tip.hidden = true;
    repaint();
  };
  plot.addEventListener("pointercancel", endDrag);
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("dblclick", reset);
  scroll.addEventListener("scroll", () => {
    tip.hidden = true;
    repaint();
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const anywhere = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: reset };
    const inChart = { ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), Escape: leave };
    const act = anywhere[event.key] ?? (scroll.contains(document.activeElement) ? inChart[event.key] : undefined);
    if (!act) return;
    event.preventDefault();
    act();
  });

  element("zoom-in").addEventListener("click", () => zoom(0.5));
  element("zoom-out").addEventListener("click", () => zoom(2));
  element("reset").addEventListener("click", reset);

  // ---- choices and legend

  function pressed(node, is) {
    node.setAttribute("aria-pressed", String(is));
  }

  function offerOrigins() {
    if (data.timelines.length < 2) return;
    const choices = [["all", data.timelines], ...data.timelines.map((timeline) => [timeline.title, [timeline]])];
    const buttons = choices.map(([title, timelines]) => {
      const button = textNode("button", title === "all" && choices.length === 3 ? "both" : title);
      button.type = "button";
      pressed(button, timelines === shown);
      button.addEventListener("click", () => {
        shown = timelines;
        buttons.forEach((other) => pressed(other, other === button));
        offerLegend();
        lay();
      });
      return button;
    });
    element("origins").append(...buttons);
  }

  function offerLegend() {
    const used = new Set();
    for (const timeline of shown) for (const track of timeline.tracks) for (const kind of track.kind) used.add(kind);
    const kinds = data.kinds.filter((_, index) => used.has(index)).map((kind) => {
      const button = textNode("button", "");
      button.type = "button";
      const swatch = document.createElement("i");
      swatch.style.backgroundColor = swatch.style.borderColor = `var(--${kind})`;
      button.append(swatch, kind);
      pressed(button, !hidden.has(kind));
      button.addEventListener("click", () => {
        if (!hidden.delete(kind)) hidden.add(kind);
        swatch.style.backgroundColor = hidden.has(kind) ? "transparent" : `var(--${kind})`;
        pressed(button, !hidden.has(kind));
        repaint();
      });
      return button;
    });
    element("legend").replaceChildren(...kinds, ...linesOfLegend());
  }

  function linesOfLegend() {
    if (!data.curves.length) return [];
    const lines = shown.map((timeline, index) => [timeline.title, index ? "stroke dashed" : "stroke"]);
    if (shown.some((timeline) => timeline.curves.some((curve) => curve.limit !== null))) lines.push(["limit", "stroke limit"]);
    return lines.map(([title, shape]) => {
      const node = textNode("span", "");
      const line = document.createElement("i");
      line.className = shape;
      if (shape === "stroke") line.style.borderTopColor = "var(--accent)";
      node.append(line, title);
      return node;
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readScheme();
    repaint();
  });
  // Also the first time, once the page has a size.
  new ResizeObserver(() => {
    readScheme();
    repaint();
  }).observe(scroll);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));

  readScheme();
  offerOrigins();
  offerLegend();
  lay();
})();
