"use strict";
// The data of the page, decoded, and the rows that it is drawn in.

const HEAD = 26;
const BAND_GAP = 3;
const LANE = 8;
const THIN_LANE = 5; // where there are many tracks

function decode(data) {
  for (const timeline of data.timelines) {
    timeline.byTrack = new Map();
    for (const track of timeline.tracks) {
      let at = 0;
      track.begin = Float64Array.from(track.begin, (step) => (at += step));
      track.end = track.begin.map((begin, index) => begin + track.length[index]);
      timeline.byTrack.set(track.track, track);
    }
    timeline.byCurve = new Map(timeline.curves.map((curve) => [curve.curve, curve]));
  }
  return data;
}

// Rows from top to bottom. A row has bands, one for each timeline that is shown.
function layRows(data, shown, open) {
  const rows = [];
  let y = 0;
  const add = (row, heights) => {
    row.y = y;
    let at = y + BAND_GAP;
    row.bands = heights.map(([timeline, height]) => {
      const band = { timeline, y: at, height };
      at += height + BAND_GAP;
      return band;
    });
    row.height = row.shape === "head" ? HEAD : at - y;
    y += row.height;
    rows.push(row);
  };
  if (shown.some((timeline) => timeline.marks.length)) {
    add({ shape: "marks", label: "Faults and events" }, [[null, 16]]);
  }
  data.sections.forEach((section, index) => {
    add({ shape: "head", label: section.title, section: index, note: noteOf(section) }, []);
    if (section.shape === "spans") {
      if (open[index]) {
        const lane = section.rows.length > 4 ? THIN_LANE : LANE;
        for (const track of section.rows) {
          add({ shape: "spans", label: data.tracks[track], track }, bandsOf(shown, track, lane));
        }
      } else {
        const height = Math.max(18, Math.min(96, section.rows.length * 3));
        add(
          { shape: "strips", label: `all ${section.rows.length}`, tracks: section.rows },
          shown.map((timeline) => [timeline, height]),
        );
      }
      return;
    }
    const curves = open[index] ? section.rows : [];
    if (section.sum !== null) addCurve(section.sum);
    curves.forEach(addCurve);
    if (!open[index] && section.sum === null) section.rows.forEach(addCurve);
  });
  return { rows, height: y + BAND_GAP };

  function addCurve(curve) {
    const limits = shown.map((timeline) => timeline.byCurve.get(curve)?.limit ?? null).filter((limit) => limit !== null);
    const peaks = shown.map((timeline) => (timeline.byCurve.get(curve)?.value ?? []).reduce((a, b) => Math.max(a, b), 0));
    const { name, unit } = data.curves[curve];
    add({ shape: "curve", label: name, curve, unit, limits, peak: Math.max(...peaks), top: Math.max(1e-9, ...peaks, ...limits) }, [
      [null, 46],
    ]);
  }
}

function bandsOf(shown, track, lane) {
  return shown.map((timeline) => {
    const lanes = timeline.byTrack.get(track)?.lanes ?? 0;
    return [timeline, Math.max(16, Math.min(10 * lane, lanes * lane))];
  });
}

function noteOf(section) {
  const rows = section.rows.length;
  return rows > 1 ? `${rows} ${section.shape === "spans" ? "tracks" : "places"}` : "";
}

function rowAt(rows, y) {
  let low = 0;
  let high = rows.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rows[middle].y <= y) low = middle;
    else high = middle - 1;
  }
  return rows[low] ?? null;
}

// The span of a track nearest to a moment, within a tolerance; in one lane, or in any where `lane` is null.
function spanAt(track, lane, at, tolerance, hidden, kinds) {
  let best = null;
  let distance = tolerance;
  for (let index = 0; index < track.begin.length && track.begin[index] <= at + tolerance; index++) {
    if ((lane !== null && track.lane[index] !== lane) || hidden.has(kinds[track.kind[index]])) continue;
    const away = Math.max(track.begin[index] - at, at - track.end[index], 0);
    if (away <= distance) {
      distance = away;
      best = index;
    }
  }
  return best;
}

function valueAt(curve, at) {
  let low = 0;
  let high = curve.at.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (curve.at[middle] <= at) low = middle + 1;
    else high = middle;
  }
  return low ? curve.value[low - 1] : 0;
}
