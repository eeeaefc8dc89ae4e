// The page of vtx-watch: the newest picture of each source, and the answers about it as they come.

const LOG = 20; // events of a source that stay in its list
const PICTURE_PAUSE = 200, RETRY_PAUSE = 2000; // milliseconds
const byId = (id) => document.getElementById(id);
const pause = (milliseconds) => new Promise((resolve) => { setTimeout(resolve, milliseconds); });
const cards = new Map(); // by the source's name: {state, image, answers, counts, log, tag}
const waiting = []; // for a key: functions to call once it was typed

function element(name, text = "", properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  if (text) made.textContent = text;
  return made;
}

function say(text, wrong = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("wrong", wrong);
}

async function call(path, headers = {}) {
  const key = byId("key").value;
  const response = await fetch(path, { headers: { ...headers, ...(key ? { authorization: `Bearer ${key}` } : {}) } });
  if (response.status !== 401) return response;
  byId("key-field").hidden = false;
  say("Type the API key.", true);
  await new Promise((resolve) => { waiting.push(resolve); });
  return call(path, headers);
}

// --- sources ---

function showSources({ sources, answers }) {
  for (const card of cards.values()) if (card.image.src) URL.revokeObjectURL(card.image.src);
  cards.clear();
  byId("sources").replaceChildren(...sources.map((source) => {
    const card = {
      state: element("span", source.state), image: element("img", "", { alt: `The newest picture of ${source.name}`, hidden: true }),
      answers: new Map(), counts: element("p", "", { className: "note" }), log: element("ol", "", { ariaLabel: "Last events" }), tag: "",
    };
    const list = element("dl");
    for (const question of source.questions) {
      const answer = element("dd", "-"), term = element("dt", question.ask, { title: question.name });
      const how = element("span");
      term.append(how);
      list.append(term, answer);
      card.answers.set(question.name, { answer, how });
    }
    const article = element("article"), title = element("h2", source.name);
    title.append(card.state);
    article.append(title, card.image, list, card.counts, card.log);
    cards.set(source.name, card);
    return article;
  }));
  for (const answer of answers) show(answer);
}

function showStatus({ sources, errors }) {
  for (const [name, { frames, dropped, corrupt, error }] of Object.entries(sources)) {
    const card = cards.get(name);
    if (!card) continue;
    card.counts.textContent = [`${frames} frames, ${dropped} dropped, ${corrupt} corrupt`, error].filter(Boolean).join("; ");
    card.counts.classList.toggle("wrong", corrupt > 0 || Boolean(error));
  }
  byId("errors").textContent = errors ? `${errors} errors` : "";
}

function show(event) {
  if (event.event === "status") return showStatus(event);
  const card = cards.get(event.source);
  if (!card) return;
  const time = new Date(event.time).toLocaleTimeString();
  let line = "";
  if (event.event === "answer") {
    const shown = card.answers.get(event.question);
    if (!shown) return;
    const changed = shown.answer.textContent !== event.answer;
    shown.answer.textContent = event.answer;
    shown.answer.classList.remove("wrong");
    shown.answer.title = `frame ${event.frame}, ${time}`;
    const probability = "probability" in event ? `${(100 * event.probability).toFixed(1)}%` : "";
    shown.how.textContent = [probability, event.reused ? "reused" : `${event.latency_ms} ms`].filter(Boolean).join(", ");
    if (changed) line = `${event.question}: ${event.answer}`;
  } else if (event.event === "error") {
    card.answers.get(event.question)?.answer.classList.add("wrong");
    line = `${event.question}: ${event.error}`;
  } else if (event.event === "source") {
    card.state.textContent = event.state;
    card.state.classList.toggle("wrong", event.state === "lost" || event.state === "silent");
    line = [event.state, event.error].filter(Boolean).join(": ");
  }
  if (!line) return;
  card.log.prepend(element("li", `${time} ${line}`));
  while (card.log.children.length > LOG) card.log.lastChild.remove();
}

// --- events ---

async function* received(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6)); // others are comments
    }
  } finally {
    reader.cancel().catch(() => {}); // ends the request when the events are no longer read
  }
}

async function follow() {
  for (;;) {
    try {
      const response = await call("events");
      if (!response.ok) throw new Error(`the watcher answered ${response.status}`);
      say("");
      for await (const event of received(response)) {
        if (event.event === "watched") showSources(event);
        else if (event.event === "config" && event.state === "reloaded") break; // other sources: begin again
        else if (event.event === "config") say(event.error, true);
        else show(event);
      }
    } catch (error) {
      say(`not connected: ${error.message}`, true);
      await pause(RETRY_PAUSE);
    }
    await pause(PICTURE_PAUSE);
  }
}

// --- pictures: one request at a time, however many sources there are ---

async function refresh(name, card) {
  const response = await call(`pictures/${encodeURIComponent(name)}`, card.tag ? { "if-none-match": card.tag } : {});
  if (response.status !== 200) return; // the same picture, or none that can be read
  card.tag = response.headers.get("etag");
  const old = card.image.src;
  card.image.src = URL.createObjectURL(await response.blob());
  card.image.hidden = false;
  if (old) URL.revokeObjectURL(old);
}

async function watch() {
  for (;;) {
    for (const [name, card] of document.hidden ? [] : [...cards]) await refresh(name, card).catch(() => {}); // `follow` says so
    await pause(PICTURE_PAUSE);
  }
}

byId("key").addEventListener("change", () => { for (const resolve of waiting.splice(0)) resolve(); });
follow();
watch();
