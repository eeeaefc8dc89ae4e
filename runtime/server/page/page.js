// The page of vtx-serve: pictures, a question, and the answers under one setting or two.

import { element, kvPlot, size, survivors } from "./charts.js";
import { recall, remember } from "./history.js";

const MAX_SIDE = 1600; // pixels of what is sent; the model takes less
const LIVE_SIDE = 800; // of a camera's frame that is asked about live
const OTHER = "another spec";
const SAMPLING = ["temperature", "top_p", "seed", "max_tokens"];
const byId = (id) => document.getElementById(id);
const panes = [0, 1].map((number) => ({
  setting: byId(`setting-${number}`), pane: byId(`pane-${number}`), messages: [], turns: [], sent: 0,
}));
const EXAMPLES = {
  "example-choices": ["yes", "no", "unsure"],
  "example-object": {
    type: "object",
    properties: { shape: { enum: ["circle", "square", "triangle"] }, count: { type: "integer", minimum: 0, maximum: 99 } },
    required: ["shape", "count"], additionalProperties: false,
  },
};
let models = [], running = null, camera = null;
let pictures = []; // {url, video, shown} of this chat; those that a pane has not sent go with its next question

// --- talking to the server ---

function headers() {
  const key = byId("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function call(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options });
  if (response.ok) return response;
  if (response.status === 401) byId("key-field").hidden = false;
  const told = await response.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answered ${response.status}`);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) { // others are comments
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function say(text, wrong = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("wrong", wrong);
}

// --- models and settings ---

async function loadModels() {
  try {
    models = (await (await call("v1/models")).json()).data;
  } catch (error) {
    say(error.message, true);
    return;
  }
  say("");
  byId("model").replaceChildren(...models.map((one) => element("option", one.id, { value: one.id })));
  chooseModel();
  await restore();
}

const model = () => models.find((one) => one.id === byId("model").value);

function depths() {
  const { ks, gates } = model().vtx;
  return ["none", ...[...ks].sort((a, b) => b - a), ...(gates.length ? ["auto"] : [])];
}

function chooseModel() {
  const facts = model().vtx;
  byId("file").accept = facts.videos ? "image/*,video/*" : "image/*";
  panes.forEach(({ setting }, number) => {
    const range = setting.querySelector("input[type=range]"), own = depths().indexOf(facts.default_k ?? "none");
    range.max = depths().length - 1;
    range.disabled = depths().length < 2;
    range.value = number === 0 ? own : 0;
    const specs = [...new Set(["none", ...facts.reductions]), OTHER], menu = setting.querySelector("select");
    menu.replaceChildren(...specs.map((spec) => element("option", spec, { value: spec })));
    menu.value = number === 0 ? facts.reductions[0] ?? "none" : "none";
    showSetting(setting);
  });
  clear();
}

function showSetting(setting) {
  const range = setting.querySelector("input[type=range]"), k = depths()[range.value];
  const spec = setting.querySelector("select").value;
  setting.querySelector("output").textContent = k;
  range.setAttribute("aria-valuetext", `K ${k}`);
  setting.querySelector("input[type=text]").hidden = spec !== OTHER;
  setting.querySelector(".note").textContent = spec === OTHER ? "" : model().vtx.methods[spec] || "No image token leaves before K.";
}

function chosen(setting) {
  const spec = setting.querySelector("select").value, typed = setting.querySelector("input[type=text]").value.trim();
  const reduce = spec === OTHER ? typed || "none" : spec;
  return { k: depths()[setting.querySelector("input[type=range]").value], reduce };
}

function choose(setting, { k, reduce }) {
  const menu = setting.querySelector("select"), known = [...menu.options].some((option) => option.value === reduce);
  setting.querySelector("input[type=range]").value = Math.max(0, depths().indexOf(k));
  menu.value = known ? reduce : OTHER;
  setting.querySelector("input[type=text]").value = known ? "" : reduce;
  showSetting(setting);
}

const sampling = () => Object.fromEntries(
  SAMPLING.filter((name) => byId(name).value !== "").map((name) => [name, Number(byId(name).value)]));

// --- pictures and videos ---

async function take(files) {
  for (const file of files) {
    try {
      if (file.type.startsWith("video/")) {
        if (!model()?.vtx.videos) throw new Error("this model takes no videos");
        addPicture({ url: await dataUrl(file), video: true });
      } else {
        addPicture(still(await createImageBitmap(file), MAX_SIDE));
      }
    } catch (error) {
      say(error instanceof DOMException ? `${file.name} cannot be read as a picture` : error.message, true);
    }
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function still(source, side, type = "image/png") {
  const width = source.videoWidth ?? source.width, height = source.videoHeight ?? source.height;
  const factor = Math.min(1, side / Math.max(width, height)), shown = document.createElement("canvas");
  shown.width = Math.round(width * factor);
  shown.height = Math.round(height * factor);
  shown.getContext("2d").drawImage(source, 0, 0, shown.width, shown.height);
  return { url: shown.toDataURL(type, 0.92), video: false, shown };
}

function addPicture(picture) {
  pictures.push(picture);
  showPictures();
  save();
}

function removePicture(number) {
  pictures.splice(number, 1);
  if (panes.some((one) => number < one.sent)) newChat(); // the chat is about it
  showPictures();
  save();
}

function showPictures() {
  byId("preview").replaceChildren(...pictures.map(({ url, video, shown }, number) => {
    const item = element("li"), name = `${video ? "Video" : "Picture"} ${number + 1}`;
    const view = video ? element("video", "", { src: url, controls: "", "aria-label": name }) : shown;
    if (!video) {
      view.setAttribute("role", "img");
      view.setAttribute("aria-label", `${name}, ${view.width} by ${view.height} pixels`);
    }
    const remove = element("button", "×", { type: "button", "aria-label": `Remove ${name.toLowerCase()}` });
    remove.addEventListener("click", () => removePicture(number));
    item.append(view, remove);
    return item;
  }));
  byId("preview").hidden = !pictures.length || Boolean(camera);
  byId("hint").hidden = Boolean(pictures.length || camera);
}

async function toggleCamera() {
  const video = byId("video");
  if (camera) {
    stop();
    camera.getTracks().forEach((track) => track.stop());
    camera = null;
  } else {
    try {
      camera = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      say(`no camera: ${error.message}`, true);
      return;
    }
    video.srcObject = camera;
    await video.play();
  }
  video.hidden = byId("snap").hidden = byId("live-note").hidden = !camera;
  byId("camera").textContent = camera ? "Camera off" : "Camera";
  showPictures();
}

async function snap() {
  addPicture(still(byId("video"), MAX_SIDE));
  await toggleCamera();
}

// --- the chat ---

function clear() {
  stop();
  for (const one of panes) {
    Object.assign(one, { messages: [], turns: [], sent: 0 });
    one.pane.replaceChildren();
  }
}

function newChat() {
  clear();
  save();
}

function stop() {
  running?.abort();
}

function save() {
  remember({
    model: byId("model").value, question: byId("question").value, compare: byId("compare").checked,
    settings: panes.map(({ setting }) => chosen(setting)), sampling: sampling(),
    pictures: pictures.map(({ url, video }) => ({ url, video })),
    panes: panes.map(({ messages, turns, sent }) => ({ messages, turns, sent })),
  });
}

// What the page held before it was loaded again. Messages keep their pictures as numbers.
async function restore() {
  const kept = await recall();
  if (!kept || !models.some((one) => one.id === kept.model)) return;
  byId("model").value = kept.model;
  chooseModel();
  byId("question").value = kept.question;
  byId("compare").checked = kept.compare;
  panes[1].setting.hidden = panes[1].pane.hidden = !kept.compare;
  for (const [name, value] of Object.entries(kept.sampling)) byId(name).value = value;
  byId("sampling").open = Object.keys(kept.sampling).length > 0;
  pictures = await Promise.all(kept.pictures.map(async (one) => {
    if (one.video) return one;
    const image = new Image();
    image.src = one.url;
    await image.decode();
    return { ...still(image, MAX_SIDE), url: one.url };
  }));
  showPictures();
  panes.forEach((one, number) => {
    Object.assign(one, kept.panes[number]);
    choose(one.setting, kept.settings[number]);
    for (const turn of one.turns) one.pane.append(turnOf(turn).node);
  });
}

// A turn as it is shown: {question, k, reduce, text, finish, guided, facts, wrong, pictures}.
function turnOf(turn) {
  const node = element("div", "", { class: "turn" });
  const text = element("p", turn.text, { class: "text", "aria-live": "polite" });
  node.append(element("h2", turn.question), element("p", `K ${turn.k}, reduce ${turn.reduce}`, { class: "setting" }), text);
  node.append(...outcome(turn));
  return { node, text };
}

function outcome({ text, finish, guided, facts, wrong, pictures: seen, frame }) {
  const parts = [];
  if (facts) {
    if (facts.choices || guided) parts.push(parsed(text, finish, facts.choices));
    parts.push(...figures(facts, frame ? [frame] : pictures.slice(0, seen)));
  }
  if (wrong) parts.push(element("p", wrong, { class: "wrong" }));
  return parts;
}

function messageOf(question, attached) {
  const parts = attached.map(({ url, video }) => (
    video ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text: question }] };
}

// Messages are kept with the numbers of their pictures, which are sent in their place.
const whole = ({ role, content, from = 0, to = 0 }) => (
  role === "user" ? messageOf(content, pictures.slice(from, to)) : { role, content });

function form() {
  const text = byId("answer-form").value.trim();
  if (!text) return {};
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`the form of the answer is not JSON: ${error.message}`);
  }
  if (Array.isArray(given)) return { guided_choice: given };
  return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: given } } };
}

function parsed(text, finish, choices) {
  if (finish !== "stop") return element("p", "The answer was cut, so it is not complete.", { class: "wrong" });
  if (choices) return listed(Object.entries(choices).map(([choice, odds]) => [choice, `${(100 * odds).toFixed(1)}%`]));
  const value = JSON.parse(text), pairs = value && typeof value === "object" ? Object.entries(value) : [["value", value]];
  return listed(pairs.map(([name, one]) => [name, typeof one === "string" ? one : JSON.stringify(one)]));
}

// Have `messages` answered into `turn`, whose text grows in `shown`.
async function answer(turn, shown, messages, extra, signal) {
  const guided = form();
  turn.guided = Boolean(guided.response_format);
  const asked = { model: model().id, messages, k: turn.k, reduce: turn.reduce, ...sampling(), ...guided, ...extra };
  const body = { ...asked, stream: true, stream_options: { include_usage: true } };
  const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    turn.text += event.choices[0]?.delta.content ?? "";
    shown.textContent = turn.text;
    turn.finish = event.choices[0]?.finish_reason ?? turn.finish;
    turn.facts = event.usage?.vtx ?? turn.facts;
  }
}

async function askOne(one, question, signal, reuse) {
  const message = { role: "user", content: question, from: one.sent, to: pictures.length };
  const turn = { question, ...chosen(one.setting), text: "", pictures: pictures.length };
  const { node, text } = turnOf(turn);
  one.pane.append(node);
  try {
    await answer(turn, text, [...one.messages, message].map(whole), { reuse }, signal);
    one.messages.push(message, { role: "assistant", content: turn.text });
    one.sent = message.to;
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.wrong = stopped ? "stopped; this turn does not count" : error.message;
    if (stopped) throw error;
  } finally {
    node.append(...outcome(turn));
    one.turns.push(turn);
    save();
  }
}

// Ask about each new frame of the camera until stopped; the newest whole answer is shown.
async function askLive(question, signal) {
  const asked = byId("compare").checked ? panes : panes.slice(0, 1);
  const places = asked.map(({ pane }) => pane.appendChild(element("div")));
  for (let number = 1, began = performance.now(); !signal.aborted; number += 1) {
    const frame = still(byId("video"), LIVE_SIDE, "image/jpeg");
    for (const [index, one] of asked.entries()) {
      const turn = { question, ...chosen(one.setting), text: "", frame };
      await answer(turn, element("p"), [messageOf(question, [frame])], {}, signal);
      const { node } = turnOf(turn), rate = (1000 * number) / (performance.now() - began);
      node.querySelector(".setting").textContent += `; frame ${number}, ${rate.toFixed(1)} a second`;
      places[index].replaceChildren(node);
    }
  }
}

function listed(pairs) {
  const list = element("dl");
  for (const [name, value] of pairs) {
    const group = element("div");
    group.append(element("dt", name), element("dd", value));
    list.append(group);
  }
  return list;
}

function figures(facts, seen) {
  const times = facts.timings_ms;
  const list = listed([
    ["first token", `${times.first_token.toFixed(0)} ms${facts.reused_image ? " (image cached)" : ""}`],
    ["tokens per second", times.decode_per_token ? (1000 / times.decode_per_token).toFixed(1) : "one token"],
    ["KV cache", size(facts.kv_bytes)],
    ["image tokens at the end", `${facts.vision_tokens_kept.at(-1) ?? 0} of ${facts.vision_tokens}`],
  ]);
  const image = model().vtx.image, views = seen.map((one) => one.shown), parts = [list, kvPlot(facts)];
  const drawn = image.layout === "single" && facts.vision_tokens && views.length && views.every(Boolean);
  if (drawn) parts.push(...views.map((view, number) => survivors(facts, view, image, number)));
  return parts;
}

async function ask() {
  const question = byId("question").value.trim();
  if (!question || running || !model()) return;
  running = new AbortController();
  byId("ask").disabled = true;
  byId("stop").disabled = false;
  say("answering");
  try {
    if (camera) {
      await askLive(question, running.signal);
    } else {
      const asked = byId("compare").checked ? panes : panes.slice(0, 1);
      // One after the other and each from scratch, so that times compare.
      for (const one of asked) await askOne(one, question, running.signal, asked.length === 1);
      byId("question").value = "";
      save();
    }
    say("");
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  } finally {
    running = null;
    byId("ask").disabled = false;
    byId("stop").disabled = true;
  }
}

// --- the page ---

function compare() {
  panes[1].setting.hidden = panes[1].pane.hidden = !byId("compare").checked;
  newChat();
}

byId("model").addEventListener("change", () => { chooseModel(); save(); });
byId("key").addEventListener("change", loadModels);
byId("file").addEventListener("change", async (event) => {
  await take(event.target.files);
  event.target.value = "";
});
byId("camera").addEventListener("click", toggleCamera);
byId("snap").addEventListener("click", snap);
byId("compare").addEventListener("change", compare);
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", newChat);
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
for (const [id, example] of Object.entries(EXAMPLES)) {
  byId(id).addEventListener("click", () => { byId("answer-form").value = JSON.stringify(example, null, 1); });
}
for (const { setting } of panes) {
  setting.addEventListener("input", () => { showSetting(setting); save(); });
}
byId("sampling").addEventListener("input", save);
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((one) => /^(image|video)\//.test(one.type));
  if (files.length) take(files);
});
const drop = byId("picture");
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files);
  });
}
loadModels();
