// A request for an answer, as a stream of events.

/** The endpoint refused a request, or an answer broke off. */
class AnswerError extends Error {
  constructor(message, { status = 0, code = "", isLost = false } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.isLost = isLost;  // the connection was lost or the endpoint is stopping
  }
}

const LOST_CODES = new Set(["shutting_down"]);

/** Send a request and yield each event of its answer. Throws `AnswerError`, or the abort of `signal`. */
async function* streamEvents(request, signal, onHeaders) {
  let answer;
  try {
    answer = await fetch("v1/chat/completions", { method: "POST", signal, cache: "no-store",
      headers: { "Content-Type": "application/json", ...keyHeaders() }, body: JSON.stringify(request) });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new AnswerError("the endpoint does not answer", { isLost: true });
  }
  if (!answer.ok) throw await refusal(answer);
  onHeaders(answer.headers);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      held += value;
      const blocks = held.split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue;  // a comment that keeps the connection alive
        const data = block.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) {
          const { message, code } = event.error;
          throw new AnswerError(message, { code, isLost: LOST_CODES.has(code) });
        }
        yield event;
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof AnswerError) throw error;
    throw new AnswerError("the connection was lost", { isLost: true });
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new AnswerError("the connection was lost", { isLost: true });
}

async function refusal(answer) {
  let message = `the endpoint answered with status ${answer.status}`, code = "";
  try {
    const { error } = await answer.json();
    message = error.message;
    code = error.code || "";
  } catch { /* not an answer of the endpoint's own */ }
  return new AnswerError(message, { status: answer.status, code, isLost: LOST_CODES.has(code) });
}

const MAX_RAW_EVENTS = 400;

/** What came of a request so far. `add` takes the events in order. */
class Answer {
  constructor(request) {
    this.request = request;
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.finish = null;
    this.usage = null;
    this.model = request.model || "";
    this.answeredBy = "";
    this.runs = { content: [], reasoning_content: [] };  // tokens as [origin, characters]
    this.moments = [];  // the timeline
    this.commits = [];  // [seconds, tokens]
    this.speed = null;
    this.events = [];
    this.eventCount = 0;
    this.headers = {};
    this.beganAt = performance.now();
    this.firstTokenMs = null;
    this.endedAt = null;
  }

  setHeaders(headers) {
    for (const name of ["x-request-id", "x-edgespec-ignored", "x-edgespec-answered-by"]) {
      if (headers.get(name)) this.headers[name] = headers.get(name);
    }
    this.answeredBy = headers.get("x-edgespec-answered-by") || "";
  }

  add(event) {
    this.eventCount += 1;
    if (this.events.length < MAX_RAW_EVENTS) this.events.push(event);
    if (event.model) this.model = event.model;
    if (event.usage) this.addUsage(event.usage);
    for (const choice of event.choices) {
      const { delta } = choice;
      if (delta.content) this.content += delta.content;
      if (delta.reasoning_content) this.reasoning += delta.reasoning_content;
      for (const call of delta.tool_calls || []) this.addCall(call);
      if (choice.finish_reason) this.finish = choice.finish_reason;
      if (choice.edgespec) this.addSources(choice.edgespec);
    }
  }

  addUsage(usage) {
    this.usage = usage;
    const own = usage.edgespec || {};
    this.answeredBy = own.answered_by || this.answeredBy;
    if ("tokens_per_s" in own) this.speed = { now: own.tokens_per_s, plain: own.plain_tokens_per_s };
  }

  addCall({ index, id, function: own, custom }) {
    const call = this.calls[index] ||= { id: "", name: "", arguments: "" };
    if (id) call.id = id;
    const { name, arguments: text } = own || { name: custom?.name, arguments: custom?.input };
    if (name) call.name = name;
    call.arguments += text || "";
  }

  addSources({ tokens, events, tokens_per_s, plain_tokens_per_s }) {
    if (tokens.length && this.firstTokenMs === null) this.firstTokenMs = performance.now() - this.beganAt;
    for (const token of tokens) {
      for (const [name, runs] of Object.entries(this.runs)) {
        const length = token[name] || 0, last = runs[runs.length - 1];
        if (token.source) runs.push([token.source, length]);
        else if (last) last[1] += length;  // text that had been held back
      }
    }
    if (this.moments.length < MAX_MOMENTS) this.moments.push(...events);
    this.speed = { now: tokens_per_s, plain: plain_tokens_per_s };
  }

  /** Tokens by their source. */
  get sources() {
    const counts = {};
    for (const [origin] of this.runs.content) counts[origin] = (counts[origin] || 0) + 1;
    return this.usage?.edgespec?.tokens_by_source || counts;
  }

  end() {
    this.endedAt = performance.now();
  }

  get tookS() {
    return ((this.endedAt ?? performance.now()) - this.beganAt) / 1e3;
  }
}

const MAX_MOMENTS = 20000;
