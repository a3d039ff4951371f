"use strict";
// Numbers as megamind_ray/units.py writes them. A test holds the two against each other.

function fixed(value, digits) {
  // Ties go to the even digit, as in Python; toFixed rounds them up. A tie is exact in binary, so this finds all of them.
  const scaled = value * 10 ** digits;
  const below = Math.floor(scaled);
  if (Number.isInteger(value * 8) && scaled - below === 0.5) {
    return ((below % 2 ? below + 1 : below) / 10 ** digits).toFixed(digits);
  }
  return value.toFixed(digits);
}

function formatBytes(bytes) {
  if (bytes < 0) return "-" + formatBytes(-bytes);
  if (bytes < 1024) return `${fixed(bytes, 0)} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    bytes /= 1024;
    if (Number(fixed(bytes, 2)) < 1024) return `${fixed(bytes, 2)} ${unit}`;
  }
  return `${fixed(bytes / 1024, 2)} PiB`;
}

function formatRate(bytesPerSecond) {
  for (const [unit, scale] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]]) {
    if (bytesPerSecond >= scale) return `${fixed(bytesPerSecond / scale, 2)} ${unit}`;
  }
  return `${fixed(bytesPerSecond, 0)} B/s`;
}

function formatDuration(seconds) {
  if (seconds < 1) return `${fixed(seconds * 1e3, 1)} ms`;
  if (seconds < 120) return `${fixed(seconds, 2)} s`;
  const whole = Number(fixed(seconds, 0));
  const minutes = Math.floor(whole / 60);
  if (minutes < 120) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function formatCount(number) {
  return String(number).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

function formatValue(value, unit) {
  if (unit === "bytes/s") return formatRate(value);
  if (unit === "bytes") return formatBytes(value);
  return `${Number(value.toPrecision(6))} ${unit}`;
}

// A moment, in microseconds, as exact as `step`; in the unit that suits `largest`, so that a whole axis has one unit.
function formatMoment(us, step, largest) {
  const [unit, scale] = largest >= 1e6 ? ["s", 1e6] : largest >= 1e3 ? ["ms", 1e3] : ["µs", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  return `${(us / scale).toFixed(digits)} ${unit}`;
}

// Where lines of the grid stand: round numbers, about one in `apart` pixels.
function gridLines(begin, end, width, apart) {
  const rough = Math.max(1, ((end - begin) * apart) / Math.max(1, width));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const lines = [];
  for (let at = Math.ceil(begin / step) * step; at <= end; at += step) lines.push(at);
  return { step, lines };
}
