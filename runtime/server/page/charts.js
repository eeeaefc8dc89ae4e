// What an answer cost and which patches survived, as small figures.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320, HEIGHT = 84, BOTTOM = 14, TOP = 12;
const WINDOW = 3; // patches a side of a merged window

export function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB"];
  let unit = 0;
  while (bytes >= 1000 && unit < 3) { bytes /= 1000; unit += 1; }
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toPrecision(3)} ${units[unit]}`;
}

// Bars of KV bytes per layer; layers that hold fewer slots than the first are marked.
export function kvPlot(facts) {
  const bytes = facts.kv_slots.map((slots) => slots * facts.kv_slot_bytes);
  const most = Math.max(...bytes, 1), step = WIDTH / bytes.length, room = HEIGHT - BOTTOM - TOP;
  const label = `KV cache after the prompt: ${size(bytes[0])} in layer 1, ${size(bytes.at(-1))} in layer ${bytes.length}`;
  const plot = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  bytes.forEach((value, index) => {
    const height = Math.max(1, (room * value) / most);
    const bar = shape("rect", {
      x: index * step + step * 0.1, y: TOP + room - height, width: step * 0.8, height,
      class: value < bytes[0] ? "bar less" : "bar",
    });
    bar.append(shape("title", {}, `layer ${index + 1}: ${size(value)}`));
    plot.append(bar);
  });
  plot.append(
    shape("line", { x1: 0, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM, class: "axis" }),
    shape("text", { x: 0, y: 9 }, `KV cache per layer, at most ${size(most)}`),
    shape("text", { x: 0, y: HEIGHT - 3 }, "layer 1"),
    shape("text", { x: WIDTH, y: HEIGHT - 3, "text-anchor": "end" }, `layer ${bytes.length}`),
  );
  return plot;
}

// The picture on a canvas as the vision tower sees it: cropped, with bars, or stretched.
export function fitted(source, image, scale = 1) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(image.width * scale);
  canvas.height = Math.round(image.height * scale);
  const across = canvas.width / source.width, down = canvas.height / source.height;
  const factor = image.fit === "pad" ? Math.min(across, down) : Math.max(across, down);
  const width = image.fit === "squash" ? canvas.width : source.width * factor;
  const height = image.fit === "squash" ? canvas.height : source.height * factor;
  const pen = canvas.getContext("2d");
  pen.drawImage(source, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
  return canvas;
}

// [layer, what left them out, the patches that enter] at each cut, the first being what entered the decoder.
function cuts(facts, grid, number) {
  if (facts.kept) return facts.kept.map((kept) => [kept.layer, kept.by, kept.patches[number] ?? []]);
  const all = [[1, "", Array.from({ length: grid * grid }, (_, index) => index)]];
  return facts.k ? [...all, [facts.k, "withdrawal", []]] : all;
}

// Picture `number` of the prompt once a cut, what has left darkened. For models whose picture is one view of patches in
// a square.
export function survivors(facts, source, image, number) {
  const list = element("div", "", { class: "cuts" });
  const merged = new Set(facts.merged?.[number] ?? []);
  for (const [layer, by, patches] of cuts(facts, image.grid, number)) {
    const canvas = fitted(source, image, Math.max(1, 240 / image.width));
    const lit = new Set();
    for (const patch of patches) {
      const reach = merged.has(patch) ? WINDOW : 1;
      for (let y = 0; y < reach; y += 1) for (let x = 0; x < reach; x += 1) lit.add(patch + y * image.grid + x);
    }
    darken(canvas, image.grid, lit);
    const count = patches.length, from = layer === 1 ? "enter" : `enter layer ${layer}`;
    const caption = `${count} image tokens ${from}${by && layer > 1 ? ` (${by})` : ""}`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", caption);
    const figure = element("figure");
    figure.append(canvas, element("figcaption", caption));
    list.append(figure);
  }
  return list;
}

function darken(canvas, grid, lit) {
  const pen = canvas.getContext("2d"), across = canvas.width / grid, down = canvas.height / grid;
  pen.fillStyle = "rgba(0, 0, 0, 0.8)";
  for (let index = 0; index < grid * grid; index += 1) {
    if (lit.has(index)) continue;
    const column = index % grid, row = Math.floor(index / grid);
    const [left, right] = [column * across, (column + 1) * across].map(Math.round);
    const [top, bottom] = [row * down, (row + 1) * down].map(Math.round);
    pen.fillRect(left, top, right - left, bottom - top);
  }
}
