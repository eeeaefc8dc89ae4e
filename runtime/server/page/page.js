// The page of vtx-serve: a picture, a question, and the answers under one setting or two.

import { element, kvPlot, size, survivors } from "./charts.js";

const MAX_SIDE = 1600; // pixels of what is sent; the model takes less
const byId = (id) => document.getElementById(id);
const panes = [0, 1].map((number) => ({
  setting: byId(`setting-${number}`), pane: byId(`pane-${number}`), messages: [],
}));
const EXAMPLES = {
  "example-choices": ["yes", "no", "unsure"],
  "example-object": {
    type: "object",
    properties: { shape: { enum: ["circle", "square", "triangle"] }, count: { type: "integer", minimum: 0, maximum: 99 } },
    required: ["shape", "count"], additionalProperties: false,
  },
};
let models = [], picture = null, pictureUrl = "", running = null, camera = null;

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
  byId("model").replaceChildren(...models.map((model) => element("option", model.id, { value: model.id })));
  chooseModel();
}

const model = () => models.find((one) => one.id === byId("model").value);

function depths() {
  const { ks, gates } = model().vtx;
  return ["none", ...[...ks].sort((a, b) => b - a), ...(gates.length ? ["auto"] : [])];
}

function chooseModel() {
  const facts = model().vtx;
  byId("reductions").replaceChildren(...["none", ...facts.reductions].map((spec) => element("option", "", { value: spec })));
  panes.forEach(({ setting }, number) => {
    const range = setting.querySelector("input[type=range]"), own = depths().indexOf(facts.default_k ?? "none");
    range.max = depths().length - 1;
    range.disabled = depths().length < 2;
    range.value = number === 0 ? own : 0;
    setting.querySelector("input[type=text]").value = number === 0 ? facts.reductions[0] ?? "none" : "none";
    showDepth(setting);
  });
  newChat();
}

function showDepth(setting) {
  const range = setting.querySelector("input[type=range]"), k = depths()[range.value];
  setting.querySelector("output").textContent = k;
  range.setAttribute("aria-valuetext", `K ${k}`);
}

function chosen(setting) {
  const reduce = setting.querySelector("input[type=text]").value.trim() || "none";
  return { k: depths()[setting.querySelector("input[type=range]").value], reduce };
}

// --- the picture ---

async function take(blob) {
  try {
    setPicture(await createImageBitmap(blob));
  } catch {
    say("this file cannot be read as a picture", true);
  }
}

function setPicture(bitmap) {
  picture = bitmap;
  const shown = byId("preview");
  shown.hidden = byId("remove").hidden = !bitmap;
  byId("hint").hidden = Boolean(bitmap);
  if (bitmap) {
    const factor = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
    shown.width = Math.round(bitmap.width * factor);
    shown.height = Math.round(bitmap.height * factor);
    shown.getContext("2d").drawImage(bitmap, 0, 0, shown.width, shown.height);
    shown.setAttribute("aria-label", `The picture, ${bitmap.width} by ${bitmap.height} pixels`);
    pictureUrl = shown.toDataURL("image/png");
  }
  newChat();
}

async function toggleCamera() {
  const video = byId("video");
  if (!camera) {
    try {
      camera = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      say(`no camera: ${error.message}`, true);
      return;
    }
    video.srcObject = camera;
    video.hidden = false;
    byId("preview").hidden = byId("hint").hidden = true;
    byId("camera").textContent = "Take the picture";
    await video.play();
    return;
  }
  const bitmap = await createImageBitmap(video);
  camera.getTracks().forEach((track) => track.stop());
  camera = null;
  video.hidden = true;
  byId("camera").textContent = "Camera";
  setPicture(bitmap);
}

// --- asking ---

function newChat() {
  stop();
  for (const one of panes) {
    one.messages = [];
    one.pane.replaceChildren();
  }
}

function stop() {
  running?.abort();
}

function turnOf(pane, question, { k, reduce }) {
  const turn = element("div", "", { class: "turn" });
  const text = element("p", "", { class: "text", "aria-live": "polite" });
  turn.append(element("h2", question), element("p", `K ${k}, reduce ${reduce}`, { class: "setting" }), text);
  pane.append(turn);
  return { turn, text };
}

function messageOf(question, first) {
  const image = first && picture ? [{ type: "image_url", image_url: { url: pictureUrl } }] : [];
  return { role: "user", content: [...image, { type: "text", text: question }] };
}

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

async function askOne(one, question, signal, reuse) {
  const setting = chosen(one.setting), { turn, text } = turnOf(one.pane, question, setting);
  const messages = [...one.messages, messageOf(question, !one.messages.length)];
  let finish = "";
  try {
    const guided = form(), asked = { model: model().id, messages, ...setting, ...guided, reuse };
    const body = { ...asked, stream: true, stream_options: { include_usage: true } };
    const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      text.textContent += event.choices[0]?.delta.content ?? "";
      finish = event.choices[0]?.finish_reason ?? finish;
      if (!event.usage) continue;
      const { choices } = event.usage.vtx;
      if (choices || guided.response_format) turn.append(parsed(text.textContent, finish, choices));
      turn.append(...figures(event.usage.vtx, one.messages.length === 0));
    }
    one.messages = [...messages, { role: "assistant", content: text.textContent }];
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.append(element("p", stopped ? "stopped; this turn does not count" : error.message, { class: "wrong" }));
    if (stopped) throw error;
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

function figures(facts, first) {
  const times = facts.timings_ms;
  const list = listed([
    ["first token", `${times.first_token.toFixed(0)} ms${facts.reused_image ? " (image cached)" : ""}`],
    ["tokens per second", times.decode_per_token ? (1000 / times.decode_per_token).toFixed(1) : "one token"],
    ["KV cache", size(facts.kv_bytes)],
    ["image tokens at the end", `${facts.vision_tokens_kept.at(-1) ?? 0} of ${facts.vision_tokens}`],
  ]);
  const image = model().vtx.image, parts = [list, kvPlot(facts)];
  if (picture && first && image.layout === "single" && facts.vision_tokens) parts.push(survivors(facts, picture, image));
  return parts;
}

async function ask() {
  const question = byId("question").value.trim();
  if (!question || running || !model()) return;
  const asked = byId("compare").checked ? panes : panes.slice(0, 1);
  running = new AbortController();
  byId("ask").disabled = true;
  byId("stop").disabled = false;
  say("answering");
  try {
    // One after the other and each from scratch, so that times compare.
    for (const one of asked) await askOne(one, question, running.signal, asked.length === 1);
    byId("question").value = "";
    say("");
  } catch {
    say("stopped");
  } finally {
    running = null;
    byId("ask").disabled = false;
    byId("stop").disabled = true;
  }
}

// --- the page ---

function compare() {
  const both = byId("compare").checked;
  panes[1].setting.hidden = panes[1].pane.hidden = !both;
  newChat();
}

byId("model").addEventListener("change", chooseModel);
byId("key").addEventListener("change", loadModels);
byId("file").addEventListener("change", (event) => event.target.files[0] && take(event.target.files[0]));
byId("camera").addEventListener("click", toggleCamera);
byId("remove").addEventListener("click", () => setPicture(null));
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
  setting.querySelector("input[type=range]").addEventListener("input", () => showDepth(setting));
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
});
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file) take(file);
});
const drop = byId("picture");
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
}
loadModels();
