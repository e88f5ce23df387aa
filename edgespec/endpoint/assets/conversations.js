// Conversations, kept in this browser only (IndexedDB). They are bounded: beyond MAX_CONVERSATIONS
// the one that was used least recently is dropped. Where the browser allows no storage they last
// until the page is closed.

const MAX_CONVERSATIONS = 200;
const STORE = "conversations";

class Conversations {
  constructor() {
    this.all = new Map();
    this.database = null;
  }

  /** Read what is kept. Returns a sentence if nothing can be kept, else an empty text. */
  async open() {
    try {
      this.database = await new Promise((resolve, reject) => {
        const opening = indexedDB.open("edgespec", 1);
        opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
        opening.onsuccess = () => resolve(opening.result);
        opening.onerror = () => reject(opening.error);
        opening.onblocked = () => reject(new Error("blocked"));
      });
      for (const one of await this.run("readonly", store => store.getAll())) this.all.set(one.id, one);
      return "";
    } catch {
      return "This browser allows no storage here, so conversations last until the page is closed.";
    }
  }

  run(mode, work) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(STORE, mode);
      const asked = work(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(asked?.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }

  /** The conversations, the one used last first. */
  get list() {
    return [...this.all.values()].sort((one, other) => other.usedAt - one.usedAt);
  }

  /** Keep a conversation. Returns a sentence if the browser did not keep it. */
  async save(conversation) {
    this.all.set(conversation.id, conversation);
    const surplus = this.list.slice(MAX_CONVERSATIONS);
    for (const one of surplus) this.all.delete(one.id);
    if (!this.database) return "";
    try {
      await this.run("readwrite", store => {
        for (const one of surplus) store.delete(one.id);
        return store.put(structuredClone(conversation));
      });
      return "";
    } catch (error) {
      return `The browser did not keep this conversation (${error?.name || "its storage is full"}): delete or export older ones.`;
    }
  }

  async delete(id) {
    this.all.delete(id);
    if (this.database) await this.run("readwrite", store => store.delete(id));
  }

  async clear() {
    this.all.clear();
    if (this.database) await this.run("readwrite", store => store.clear());
  }
}

const MAX_FILE_BYTES = 64 << 20;

/** Return the conversations in an exported file, as new ones. Throws an error for people. Only known
 *  fields of known types are taken, so a file that somebody else made can do no harm. */
async function readConversations(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`the file has ${number(file.size)} bytes, but at most ${number(MAX_FILE_BYTES)} are read`);
  let value;
  try { value = JSON.parse(await file.text()); } catch { throw new Error("the file holds no JSON"); }
  const text = one => typeof one === "string" ? one : "";
  const message = one => {
    const role = one?.role;
    if (role === "user") return { role, content: text(one.content) };
    if (role === "tool") return { role, content: text(one.content), tool_call_id: text(one.tool_call_id) };
    if (role !== "assistant") throw new Error("a message in the file is neither of a user nor of an assistant");
    const calls = Array.isArray(one.calls) ? one.calls : [];
    return { ...emptyAnswer(one.drafts !== false), content: text(one.content), reasoning: text(one.reasoning), finish: "stop",
      answeredBy: text(one.answeredBy), calls: calls.map(call => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })) };
  };
  const found = (Array.isArray(value) ? value : [value]).slice(0, MAX_CONVERSATIONS);
  return found.map(one => {
    // The terminal's chat writes a system message beside the others.
    if (!Array.isArray(one?.messages)) throw new Error("the file holds no conversation");
    return { id: newId(), title: text(one.title), usedAt: Number.isFinite(one.usedAt) ? one.usedAt : Date.now(), messages: one.messages.map(message) };
  });
}

/** Offer a file to the user. */
function saveFile(name, value) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
