// The chat: what is on the screen, and what happens when its user does something.

const SETTINGS = "edgespec-settings";
const SAMPLING = ["temperature", "top_p", "max_tokens", "seed"];
const OPTIONS = ["system", ...SAMPLING, "format", "schema", "tools"];
const EXAMPLES = [
  ["Explain speculative decoding", "in five sentences, with an everyday picture"],
  ["Write a Python function", "that merges two sorted lists, with a test"],
  ["Compare TCP and QUIC", "as a table with three rows"],
  ["Plan a rainy afternoon", "with two children of six and nine"],
];
const FIRST_WAIT_MS = 500, LONGEST_WAIT_MS = 5000, GIVE_UP_MS = 600000;
const SEED_BELOW = 2 ** 48, KEEP_EVERY_MS = 3000;

const store = new Conversations();
let conversation = null, running = null, settings = {}, isReady = false;

const setState = state => {
  document.documentElement.dataset.state = state;
  document.body.classList.toggle("busy", state !== "idle");
  element("send").setAttribute("aria-label", state === "idle" ? "Send" : "Stop");
};
const announce = text => { element("announce").textContent = text; };

function notify(text) {
  element("notice").hidden = !text;
  element("notice").textContent = text;
}

function showLink(text, kind = "") {
  element("state").textContent = text;
  element("state").className = "pill " + kind;
}

// --- the endpoint ---------------------------------------------------------------------------------

const pause = (ms, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

const whenVisible = signal => document.hidden ? new Promise((resolve, reject) => {
  document.addEventListener("visibilitychange", resolve, { once: true });
  signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
}) : Promise.resolve();

/** Wait until the endpoint answers, and with `needsVerifier` until a verifier is ready. Hidden tabs do not
 *  ask. Throws if `signal` aborts, and after ten minutes. */
async function waitForEndpoint(signal, needsVerifier = false) {
  const until = performance.now() + GIVE_UP_MS;
  for (let wait = FIRST_WAIT_MS; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
    await whenVisible(signal);
    try {
      const health = await askHealth();
      if (health.needs_key) { askForKey(); await keyEntered(signal); continue; }
      if (health.status === "ok") { showLink("ready", "good"); return; }
      showLink("no verifier yet", "bad");
      if (!needsVerifier && health.status === "waiting" && "version" in health) return;
      notify("No verifier answers yet. This page goes on as soon as one does.");
    } catch (error) {
      if (signal?.aborted) throw error;
      showLink("not reachable", "bad");
      notify("edgespec does not answer. The conversation is kept, and this page goes on when edgespec is back.");
    }
    if (performance.now() > until) throw new AnswerError("edgespec has not answered for ten minutes");
    await pause(wait, signal);
  }
}

let keyWaiters = [];
const keyEntered = signal => new Promise((resolve, reject) => {
  keyWaiters.push(resolve);
  signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
});

function askForKey() {
  element("ask").hidden = false;
  element("log").hidden = element("composer").hidden = true;
  notify("");
  showLink("API key required", "bad");
  element("wrong-key").textContent = sessionStorage.getItem(KEY) ? "This is not the API key of the endpoint." : "";
  sessionStorage.removeItem(KEY);
  element("key").focus();
}

element("ask").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, element("key").value);
  element("key").value = "";
  element("ask").hidden = true;
  element("log").hidden = element("composer").hidden = false;
  const waiters = keyWaiters;
  keyWaiters = [];
  waiters.forEach(resolve => resolve());
});

async function connect() {
  for (;;) {
    await waitForEndpoint();
    const answer = await fetch("v1/models", { cache: "no-store", headers: keyHeaders() }).catch(() => null);
    if (!answer?.ok) { await pause(FIRST_WAIT_MS); continue; }
    const { data } = await answer.json();
    const select = element("model");
    select.replaceChildren(...data.map(({ id, max_model_len: length }) => make("option", { value: id,
      title: length ? `context of ${number(length)} tokens` : null }, id)));
    if (data.some(({ id }) => id === settings.model)) select.value = settings.model;
    notify("");
    return;
  }
}

// --- the conversation -----------------------------------------------------------------------------

const newId = () => crypto.randomUUID ? crypto.randomUUID() : [...crypto.getRandomValues(new Uint32Array(4))].join("-");
const emptyConversation = () => ({ id: newId(), title: "", usedAt: Date.now(), messages: [] });

function showConversations() {
  element("conversations").replaceChildren(...store.list.map(one => {
    const isNow = one.id === conversation.id;
    const open = make("button", { class: "open", "aria-current": isNow ? "true" : null, onclick: () => openConversation(one) }, one.title || "New conversation");
    const remove = make("button", { class: "icon", "aria-label": `Delete “${one.title}”`, title: "Delete", onclick: () => deleteConversation(one) }, icon("M5 6h10M8 6V4h4v2M6.5 6l.7 10h5.6l.7-10"));
    const keep = make("button", { class: "icon", "aria-label": `Export “${one.title}”`, title: "Export", onclick: () => saveFile(fileName(one), one) }, icon("M10 4v8M6.5 9l3.5 3.5L13.5 9M5 16h10"));
    return make("li", { class: isNow ? "now" : null }, open, keep, remove);
  }));
}

const fileName = one => (one.title.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 40) || "conversation") + ".json";

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

function openConversation(one) {
  stop();
  conversation = one;
  document.body.classList.remove("side-open");
  element("shade").hidden = true;
  location.hash = one.messages.length ? one.id : "";
  showAll();
  element("prompt").focus();
}

async function deleteConversation(one) {
  if (!confirm(`Delete “${one.title}”? It exists in this browser only.`)) return;
  await store.delete(one.id);
  if (one.id === conversation.id) openConversation(emptyConversation());
  else showConversations();
}

async function keepConversation(one, usedAt = Date.now()) {
  one.usedAt = usedAt;
  const first = one.messages.find(({ role }) => role === "user");
  one.title ||= (first?.content || "").trim().replace(/\s+/g, " ").slice(0, 60);
  // Only the last answer keeps its timeline.
  const answers = one.messages.filter(({ role }) => role === "assistant");
  answers.slice(0, -1).forEach(answer => { answer.moments = []; });
  if (one === conversation && location.hash !== "#" + one.id) history.replaceState(null, "", "#" + one.id);
  const why = await store.save(one);
  if (why) notify(why);
  showConversations();
}

function showAll() {
  const { messages } = conversation;
  element("welcome").hidden = messages.length > 0;
  element("messages").replaceChildren(...messages.map((message, index) => new MessageView(message, index).root));
  element("messages").lastElementChild?.classList.add("last");
  element("live").replaceChildren();
  document.title = conversation.title ? `${conversation.title} – edgespec` : "edgespec";
  showLegend();
  showConversations();
  toEnd(true);
}

const log = element("log");
let follows = true;
log.addEventListener("scroll", () => {
  follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  element("to-end").hidden = follows;
});
function toEnd(always = false) {
  if (always) follows = true;
  if (follows) log.scrollTop = log.scrollHeight;
  element("to-end").hidden = follows;
}
element("to-end").addEventListener("click", () => toEnd(true));

/** A message on the screen. `update` draws what is new of an answer. */
class MessageView {
  constructor(message, index) {
    this.message = message;
    this.index = index;
    this.root = make("li", { class: `message ${message.role}` });
    if (message.role === "assistant") this.buildAnswer();
    else if (message.role === "tool") {
      this.root.append(make("div", { class: "call" }, make("small", { class: "soft" }, "Result of the call"), make("pre", { class: "mono" }, message.content)));
    } else this.showUser();
  }

  showUser() {
    this.root.replaceChildren(make("div", { class: "bubble" }, this.message.content),
      make("div", { class: "actions" }, quiet("Edit", () => this.edit()), copyButton(() => this.message.content)));
  }

  edit() {
    const field = make("textarea", { "aria-label": "Edited message", rows: "3" });
    field.value = this.message.content;
    const save = () => {
      if (!field.value.trim()) return;
      stop();
      conversation.messages.length = this.index;
      submit(field.value);
    };
    field.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); save(); }
      if (event.key === "Escape") { event.stopPropagation(); this.showUser(); }
    });
    this.root.replaceChildren(make("div", { class: "edit" }, field, make("div", { class: "row" },
      make("span", { class: "soft" }, "What follows this message is dropped."),
      quiet("Cancel", () => this.showUser()), make("button", { type: "button", class: "main", onclick: save }, "Send"))));
    field.focus();
  }

  buildAnswer() {
    this.banner = make("p", { class: "banner", role: "note", hidden: true });
    this.thoughtText = make("div", { class: "markdown" });
    this.thoughtName = make("summary", {}, "Thought");
    this.thought = make("details", { class: "thought", hidden: true }, this.thoughtName, this.thoughtText);
    this.text = make("div", { class: "markdown" });
    this.calls = make("div", {});
    this.failed = make("p", { class: "failed", role: "alert", hidden: true });
    this.figures = make("p", { class: "figures" });
    this.shares = make("div", { class: "shares", role: "img" });
    this.actions = make("div", { class: "actions" });
    this.extra = make("div", {});
    this.root.append(this.banner, this.thought, this.text, this.calls, this.failed, this.shares, this.figures, this.actions, this.extra);
    this.view = new MarkdownView(this.text);
    this.thoughtView = new MarkdownView(this.thoughtText);
    this.update();
    if (!this.isRunning) this.finish();
  }

  get isRunning() { return running !== null && running.message === this.message; }

  update() {
    const { message } = this, hasSources = element("colours").checked && message.runs.content.length > 0;
    this.view.draw(message.content, hasSources ? message.runs.content : null);
    this.thought.hidden = !message.reasoning;
    if (message.reasoning) {
      this.thoughtView.draw(message.reasoning, hasSources ? message.runs.reasoning_content : null);
      this.thoughtName.textContent = this.isRunning && !message.content ? "Thinking" : "Thought";
    }
    this.text.classList.toggle("waits", this.isRunning && !message.content);
    this.banner.hidden = !message.answeredBy;
    this.banner.textContent = message.answeredBy && `This answer was written by ${message.answeredBy}, because no verifier could be reached. It is not the text of the target.`;
    this.showCalls();
  }

  showCalls() {
    const { calls } = this.message;
    if (!calls.length) return;
    const answered = new Set(conversation.messages.filter(({ role }) => role === "tool").map(one => one.tool_call_id));
    const open = this.isRunning ? [] : calls.filter(({ id }) => !answered.has(id));
    const fields = open.map(call => make("textarea", { rows: "2", class: "mono", "aria-label": `Result of ${call.name}`, placeholder: "Result of this call, as text or JSON" }));
    this.calls.replaceChildren(...calls.map(call => make("div", { class: "call" },
      make("strong", {}, `Call of ${call.name}`), make("pre", { class: "mono" }, indented(call.arguments)), fields[open.indexOf(call)])));
    if (open.length) {
      this.calls.append(make("button", { type: "button", class: "quiet", onclick: () => {
        open.forEach((call, place) => conversation.messages.push({ role: "tool", tool_call_id: call.id, content: fields[place].value }));
        showAll();
        answer();
      } }, open.length === 1 ? "Send the result" : "Send the results"));
    }
  }

  /** Draw what an answer has when it is complete. */
  finish() {
    const { message } = this, error = message.error;
    this.text.classList.remove("waits");
    this.failed.hidden = !error;
    this.failed.textContent = error || "";
    this.showFigures();
    const isLast = this.index === conversation.messages.length - 1;
    this.actions.replaceChildren(...[copyButton(() => message.content),
      quiet("Retry", () => retry(this.index)),
      message.speed && isLast && !message.answeredBy ? quiet(message.drafts ? "Compare without drafts" : "Compare with drafts", () => compare(this)) : null,
      message.moments.length ? quiet("Timeline", event => this.toggle("timeline", event.target, () => replayOf(message))) : null,
      quiet("Raw", () => showRaw(message))].filter(Boolean));
    if (message.comparison) this.extra.append(comparisonOf(message));
  }

  toggle(name, button, build) {
    const there = this.extra.querySelector("." + name);
    if (there) there.remove();
    else this.extra.append(build());
    button.setAttribute("aria-expanded", String(!there));
    if (!there) toEnd();
  }

  showFigures() {
    const { message } = this, { usage, sources } = message;
    const shown = Object.entries(sources || {}).filter(([, count]) => count);
    const total = shown.reduce((sum, [, count]) => sum + count, 0);
    this.shares.replaceChildren(...shown.map(([origin, count]) => {
      const part = make("span", { class: origin.replaceAll(" ", "-"), title: `${number(count)} of ${number(total)} tokens: ${ORIGINS[origin] || origin}` });
      part.style.flexGrow = count;
      return part;
    }));
    this.shares.hidden = !total;
    this.shares.setAttribute("aria-label", shown.map(([origin, count]) => `${origin} ${number(100 * count / total)} %`).join(", "));
    const parts = speedWords(message.speed);
    if (usage) parts.push(`${number(usage.completion_tokens)} tokens`);
    if (total) parts.push(shown.map(([origin, count]) => `${number(100 * count / total)} % ${origin}`).join(", "));
    if (message.stopped) parts.push("stopped");
    if (message.finish === "length") parts.push("cut off: the limit of tokens was reached");
    if (usage?.edgespec?.lossy && !message.answeredBy) parts.push(`LOSSY: ${usage.edgespec.replaced_tokens} tokens are not the target's own`);
    if (!message.drafts) parts.push("without drafts");
    if (usage?.edgespec?.reconnects) parts.push(`${usage.edgespec.reconnects} reconnects`);
    this.figures.replaceChildren(...joined(parts));
  }
}

const quiet = (text, onclick) => make("button", { type: "button", class: "quiet", onclick }, text);
const joined = parts => parts.flatMap((part, index) => index ? [" · ", part] : [part]);

function indented(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

const PLAIN_HELP = "Plain streaming is estimated: one token for each pass of the target, and each pass as long as the verifier reported for this answer, less what draft rows added. Pauses between passes are left out. Where this device and the verifier are one machine, drafting slows the passes themselves, which the estimate does not see. “Compare without drafts” measures it.";

/** Return what is known of a speed, as parts of a line. */
function speedWords(speed) {
  if (!speed?.now) return [];
  const parts = [make("b", {}, `${number(speed.now, 1)} tokens/s`)];
  if (speed.plain) parts.push(make("span", { title: PLAIN_HELP }, make("b", {}, `${number(speed.now / speed.plain, 2)} times`), ` plain streaming (estimated ${number(speed.plain, 1)})`));
  return parts;
}

function showLegend() {
  element("legend").hidden = !element("colours").checked || !conversation.messages.some(one => one.runs?.content.length);
}

// --- asking ---------------------------------------------------------------------------------------

/** Return the request for the next message, or throw an error that names the wrong setting. */
function requestFor(messages) {
  const values = Object.fromEntries(OPTIONS.map(name => [name, element(name).value.trim()]));
  const request = { model: element("model").value || "edgespec", messages: [], stream: true,
    stream_options: { include_usage: true }, token_sources: true, drafts: element("drafts").checked };
  if (values.system) request.messages.push({ role: "system", content: values.system });
  for (const one of messages) {
    if (one.role === "assistant") {
      if (!one.content && !one.calls.length) continue;
      const sent = { role: "assistant", content: one.content };
      if (one.reasoning) sent.reasoning_content = one.reasoning;
      if (one.calls.length) sent.tool_calls = one.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
      request.messages.push(sent);
    } else if (one.role === "tool") request.messages.push({ role: "tool", tool_call_id: one.tool_call_id, content: one.content });
    else request.messages.push({ role: one.role, content: one.content });
  }
  for (const name of SAMPLING) {
    if (!values[name]) continue;
    request[name] = Number(values[name]);
    if (!Number.isFinite(request[name])) throw new Error(`${name} is “${values[name]}”, but must be a number`);
  }
  // With a known seed the same request has the same answer, also after a restart.
  request.seed ??= Math.floor(Math.random() * SEED_BELOW);
  if (values.format === "json_object") request.response_format = { type: "json_object" };
  if (values.format === "json_schema") {
    request.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("The JSON schema", values.schema) } };
  }
  if (values.tools) request.tools = parsed("The list of tools", values.tools);
  return request;
}

function parsed(name, text) {
  try { return JSON.parse(text); } catch (error) { throw new Error(`${name} is no JSON: ${error.message}`); }
}

function submit(text) {
  conversation.messages.push({ role: "user", content: text });
  showAll();
  answer();
}

/** Drop the answer at `index` and what follows it, and ask again. */
function retry(index) {
  stop();
  conversation.messages.length = index;
  showAll();
  answer();
}

function stop() {
  running?.control.abort(new DOMException("stopped by the user", "AbortError"));
}

const emptyAnswer = drafts => ({ role: "assistant", content: "", reasoning: "", calls: [], runs: { content: [], reasoning_content: [] },
  moments: [], speed: null, sources: null, usage: null, finish: null, answeredBy: "", error: "", stopped: false, drafts, comparison: null });

/** Ask for the next message of the conversation and show it while it comes. */
async function answer() {
  let request;
  try {
    request = requestFor(conversation.messages);
    element("wrong-option").textContent = "";
  } catch (error) {
    element("wrong-option").textContent = error.message;
    showSettings(true);
    return;
  }
  const mine = conversation, message = emptyAnswer(request.drafts), control = new AbortController();
  const task = running = { message, control };
  mine.messages.push(message);
  await keepConversation(mine);
  if (conversation !== mine || control.signal.aborted) {  // its user went elsewhere meanwhile
    message.stopped = true;
    if (running === task) running = null;
    return;
  }
  element("welcome").hidden = true;
  for (const one of element("messages").children) one.classList.remove("last");
  const view = new MessageView(message, mine.messages.length - 1);
  view.root.classList.add("last");
  element("messages").append(view.root);
  toEnd(true);
  setState("asking");
  announce("The answer is being written.");
  let keptAt = performance.now();
  await ask(request, message, control.signal, () => {
    if (performance.now() - keptAt > KEEP_EVERY_MS && store.all.has(mine.id)) {
      keptAt = performance.now();
      store.save(mine);  // a page that is loaded again has what came so far
    }
    if (conversation !== mine) return;
    view.update();
    showLegend();
    if (running === task) element("live").replaceChildren(...joined(speedWords(message.speed)));
    toEnd();
  });
  if (running === task) running = null;
  if (mine === conversation) {
    view.update();
    view.finish();
    showLegend();
    element("live").replaceChildren();  // the line stands below the answer now
    announce(message.error ? `The answer failed: ${message.error}` : `The answer is complete. ${message.content.slice(0, 2000)}`);
    toEnd();
  }
  if (running === null) setState("idle");
  if (store.all.has(mine.id)) await keepConversation(mine);  // else it was deleted meanwhile
}

/** Fill `message` with the answer to `request`. If the endpoint goes away meanwhile, wait for it and ask
 *  again with the same seed. */
async function ask(request, message, signal, changed) {
  for (;;) {
    const found = new Answer(request);
    let isDue = false;
    const draw = () => {
      if (isDue) return;
      isDue = true;
      requestFrame(() => { isDue = false; copy(found, message); if (!signal.aborted || message.stopped) changed(); });
    };
    try {
      for await (const event of streamEvents(request, signal, headers => { found.setHeaders(headers); setState("streaming"); showLink("ready", "good"); notify(""); })) {
        found.add(event);
        draw();
      }
      found.end();
      copy(found, message);
      changed();
      return;
    } catch (error) {
      found.end();
      copy(found, message);
      if (signal.aborted) { message.stopped = true; changed(); return; }
      error.needsVerifier = error.status === 503 && error.code === "verifier_unavailable";
      if (error.isLost || error.needsVerifier) {
        try {
          setState("waiting");
          await waitForEndpoint(signal, error.needsVerifier);
          notify("edgespec is back. The answer is written again with the same seed, so its text is the same.");
          continue;
        } catch (later) {
          if (signal.aborted) { message.stopped = true; changed(); return; }
          error.message = later.message;
        }
      }
      if (error.status === 401) {
        askForKey();
        try { await keyEntered(signal); continue; } catch { message.stopped = true; return; }
      }
      message.error = error.message;
      return;
    }
  }
}

/** Call `work` with the next picture; in a hidden tab, which has none, soon. */
function requestFrame(work) {
  if (document.hidden) setTimeout(work, 200);
  else requestAnimationFrame(work);
}

function copy(found, message) {
  for (const name of ["content", "reasoning", "calls", "runs", "moments", "speed", "sources", "usage", "finish", "answeredBy"]) message[name] = found[name];
  message.seed = found.request.seed;
  message.model = found.model;
  message.tookS = found.tookS;
  message.firstTokenMs = found.firstTokenMs;
  raws.set(message, found);
}

// --- comparison -----------------------------------------------------------------------------------

/** Ask for the same answer with the drafts switched the other way, and show both speeds. */
async function compare(view) {
  const { message } = view, first = raws.get(message), mine = conversation;
  if (running) return;
  const request = first ? { ...first.request } : requestFor(conversation.messages.slice(0, view.index));
  request.drafts = !message.drafts;
  request.seed = message.seed;
  const other = emptyAnswer(request.drafts), control = new AbortController();
  const task = running = { message: other, control };
  view.extra.querySelector(".comparison")?.remove();
  const box = make("div", { class: "comparison" }, make("h3", {}, request.drafts ? "The same answer with drafts" : "The same answer without drafts"));
  const line = make("p", { class: "figures" }), text = make("div", { class: "markdown" }), drawn = new MarkdownView(text);
  box.append(line, make("details", {}, make("summary", { class: "soft" }, "Its text"), text));
  view.extra.append(box);
  toEnd();
  setState("asking");
  await ask(request, other, control.signal, () => {
    drawn.draw(other.content, element("colours").checked ? other.runs.content : null);
    line.replaceChildren(...joined(speedWords(other.speed)));
    toEnd();
  });
  if (running === task) running = null;
  setState("idle");
  box.remove();
  if (other.error || other.stopped) {
    view.extra.append(make("p", { class: "failed comparison" }, other.error || "The comparison was stopped."));
    return;
  }
  message.comparison = { speed: other.speed, content: other.content, drafts: other.drafts, sources: other.sources, tookS: other.tookS };
  view.extra.append(comparisonOf(message));
  announce(view.extra.querySelector(".comparison").textContent);
  if (store.all.has(mine.id)) await keepConversation(mine);
  toEnd();
}

function comparisonOf(message) {
  const other = message.comparison;
  const [withDrafts, without] = message.drafts ? [message, other] : [other, message];
  const most = Math.max(withDrafts.speed?.now || 0, without.speed?.now || 0) || 1;
  const row = (name, kind, { speed, tookS }) => {
    const bar = make("span");
    bar.style.width = `${100 * (speed?.now || 0) / most}%`;
    return make("div", { class: `row ${kind}` }, make("span", {}, name), make("span", { class: "track" }, bar),
      make("span", { class: "value" }, speed?.now ? `${number(speed.now, 1)} tokens/s` : "–"), make("span", { class: "soft" }, `${number(tookS, 1)} s`));
  };
  const isSame = withDrafts.content === without.content;
  const ratio = withDrafts.speed?.now && without.speed?.now ? withDrafts.speed.now / without.speed.now : null;
  let at = 0;
  while (!isSame && withDrafts.content[at] === without.content[at]) at += 1;
  const words = [isSame ? "The two texts are equal, character by character: drafts never change the text."
    : `The two texts differ from character ${number(at + 1)} on. They should not: the model or its numerics changed between the two.`];
  if (ratio) words.unshift(ratio >= 1 ? `With drafts it was ${number(ratio, 2)} times as fast. ` : `With drafts it was slower: ${number(ratio, 2)} times the speed. `);
  if (without.sources?.server) words.push(` The verifier went on drafting by itself (${number(without.sources.server)} tokens): its version cannot switch that off.`);
  return make("div", { class: "comparison" }, make("h3", {}, "With drafts and without"),
    row("With drafts", "with", withDrafts), row("Without", "without", without), make("p", {}, ...words));
}

// --- raw request and answer -----------------------------------------------------------------------

const raws = new WeakMap();  // of this page's life: they are not kept with the conversation

function showRaw(message) {
  const found = raws.get(message);
  const body = element("raw-body");
  if (!found) {
    body.replaceChildren(make("p", { class: "soft" }, "The request of an answer is kept until the page is closed or loaded again. These are its figures."), block("usage", message.usage));
  } else {
    const more = found.eventCount - found.events.length;
    body.replaceChildren(make("p", { class: "soft" }, `POST ${new URL("v1/chat/completions", location.href).href}`),
      block("As a command", asCommand(found.request)), block("Request", found.request), block("Headers of the answer", found.headers), block("Usage", found.usage),
      block(`Events of the stream${more > 0 ? ` (the first ${found.events.length} of ${found.eventCount})` : ""}`, found.events, null));
  }
  element("raw").showModal();
}

/** Return a command that sends the same request. The key is not in it. */
function asCommand(request) {
  const key = sessionStorage.getItem(KEY) ? ' -H "Authorization: Bearer $EDGESPEC_ENDPOINT_KEY"' : "";
  const data = JSON.stringify(request).replaceAll("'", "'\\''");
  return `curl -N ${new URL("v1/chat/completions", location.href).href}${key} -H 'Content-Type: application/json' -d '${data}'`;
}

function block(name, value, indent = 2) {
  const text = typeof value === "string" ? value : Array.isArray(value) ? value.map(one => JSON.stringify(one)).join("\n") : JSON.stringify(value, null, indent);
  return make("section", {}, make("div", { class: "row" }, make("h3", {}, name), copyButton(() => text)), make("pre", { class: "mono", tabindex: "0" }, text ?? "none"));
}
element("close-raw").addEventListener("click", () => element("raw").close());

// --- settings -------------------------------------------------------------------------------------

function readSettings() {
  try { settings = JSON.parse(localStorage.getItem(SETTINGS)) || {}; } catch { settings = {}; }
  for (const name of OPTIONS) if (typeof settings[name] === "string") element(name).value = settings[name];
  for (const name of ["drafts", "colours"]) if (typeof settings[name] === "boolean") element(name).checked = settings[name];
  element("theme").value = settings.theme || "";
  applySettings();
}

function applySettings() {
  const theme = element("theme").value;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  element("schema-field").hidden = element("format").value !== "json_schema";
}

function keepSettings() {
  settings = Object.fromEntries(OPTIONS.map(name => [name, element(name).value]));
  settings.drafts = element("drafts").checked;
  settings.colours = element("colours").checked;
  settings.theme = element("theme").value;
  settings.model = element("model").value;
  try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* they last until the page is closed */ }
  applySettings();
}

function showSettings(isShown) {
  element("settings").hidden = !isShown;
  element("open-settings").setAttribute("aria-expanded", String(isShown));
  (isShown ? element("system") : element("prompt")).focus();
}

element("options").addEventListener("input", keepSettings);
element("options").addEventListener("submit", event => event.preventDefault());
element("options").addEventListener("reset", () => setTimeout(keepSettings));
for (const name of ["drafts", "theme", "model"]) element(name).addEventListener("change", keepSettings);
element("colours").addEventListener("change", () => { keepSettings(); if (!running) showAll(); });
element("open-settings").addEventListener("click", () => showSettings(element("settings").hidden));
element("close-settings").addEventListener("click", () => showSettings(false));

// --- the frame ------------------------------------------------------------------------------------

function showSide(isShown) {
  document.body.classList.toggle("side-open", isShown);
  element("shade").hidden = !isShown;
  element("open-side").setAttribute("aria-expanded", String(isShown));
  if (isShown) element("new").focus();
}
element("open-side").addEventListener("click", () => showSide(true));
element("close-side").addEventListener("click", () => showSide(false));
element("shade").addEventListener("click", () => showSide(false));
element("new").addEventListener("click", () => openConversation(emptyConversation()));
element("export-all").addEventListener("click", () => saveFile("edgespec-conversations.json", store.list));
element("import").addEventListener("click", () => element("import-file").click());
element("import-file").addEventListener("change", async () => {
  const [file] = element("import-file").files;
  element("import-file").value = "";
  if (!file) return;
  try {
    const found = await readConversations(file);
    for (const one of found) await keepConversation(one, one.usedAt);
    notify(found.length === 1 ? "1 conversation was imported." : `${found.length} conversations were imported.`);
  } catch (error) {
    notify(`Nothing was imported: ${error.message}.`);
  }
});
element("delete-all").addEventListener("click", async () => {
  if (!store.all.size || !confirm(`Delete all ${store.all.size} conversations? They exist in this browser only.`)) return;
  await store.clear();
  openConversation(emptyConversation());
});

element("composer").addEventListener("submit", event => {
  event.preventDefault();
  if (running) { stop(); return; }
  const field = element("prompt"), text = field.value;
  if (!text.trim() || !isReady) return;
  field.value = "";
  submit(text);
});
element("prompt").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) element("composer").requestSubmit();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !element("raw").open) {
    if (running) stop();
    else if (document.body.classList.contains("side-open")) showSide(false);
    else if (!element("settings").hidden) showSettings(false);
  }
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    openConversation(emptyConversation());
  }
});
element("examples").append(...EXAMPLES.map(([title, rest]) => make("li", {}, make("button", { type: "button", onclick: () => {
  element("prompt").value = `${title} ${rest}.`;
  element("prompt").focus();
} }, title, make("small", {}, rest)))));

/** Conversations of another tab appear when this one is looked at again. */
document.addEventListener("visibilitychange", async () => {
  if (document.hidden || running || !store.database) return;
  const kept = await store.run("readonly", all => all.getAll());
  for (const one of kept) if (one.id !== conversation.id) store.all.set(one.id, one);
  showConversations();
});

(async () => {
  setState("idle");
  conversation = emptyConversation();
  readSettings();
  const why = await store.open();
  conversation = store.all.get(location.hash.slice(1)) || conversation;
  for (const one of store.list) one.messages.forEach(mend);
  showAll();
  await connect();
  if (why) notify(why);
  isReady = true;
  document.documentElement.dataset.ready = "yes";
  element("prompt").focus();
})();

/** An answer that a closed page left behind is complete as it is. */
function mend(message) {
  if (message.role === "assistant" && !message.finish && !message.error) message.stopped = true;
}
