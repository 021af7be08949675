// Conversations, kept in this browser alone. Each is a tree of messages: a new answer or an edited
// question stands next to the earlier one. Its branches are paths through the tree, shown side by
// side, each identified by its last message.

export interface Call {
  id: string;
  name: string;
  arguments: string;
}

/** A text file that was attached to a message. */
export interface TextFile {
  name: string;
  text: string;
}

export interface Message {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  images?: string[]; // data URLs; empty ones were not kept
  files?: TextFile[];
  reasoning?: string;
  calls?: Call[]; // that the model makes
  call?: string; // of a result: the id of its call
  note?: string; // how it ended, if not by itself
  usage?: string; // what it took, in words
  request?: string; // the id of the request that it is the answer to
}

export interface Conversation {
  id: string;
  title: string;
  system: string;
  tools: string; // JSON as it was typed
  schema: string;
  messages: Message[];
  branches: (string | null)[];
}

const NAME = "quire.conversations";
const MAX_TITLE = 48;
export const MAX_BRANCHES = 4; // side by side

function newId(): string {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

export function begin(like?: Conversation): Conversation {
  const { system = "", tools = "", schema = "" } = like ?? {};
  return { id: newId(), title: "", system, tools, schema, messages: [], branches: [null] };
}

/** Add a message behind another one. */
export function add(to: Conversation, parent: string | null, message: Omit<Message, "id" | "parent">): Message {
  const added = { ...message, id: newId(), parent };
  to.messages.push(added);
  return added;
}

/** Return the messages from the first one to this one. */
export function pathTo(leaf: string | null, of: Conversation): Message[] {
  const known = new Map(of.messages.map((message) => [message.id, message]));
  const path: Message[] = [];
  for (let at = known.get(leaf ?? ""); at && path.length < known.size; at = known.get(at.parent ?? "")) path.unshift(at);
  return path;
}

/** Return what stands in the same place: the message and others behind the same one. */
export function versionsOf(message: Message, of: Conversation): Message[] {
  return of.messages.filter((one) => one.parent === message.parent && one.role === message.role && one.call === message.call);
}

/** Follow the newest messages behind one to the end. */
export function endOf(message: Message, of: Conversation): string {
  let end = message.id;
  for (const _ of of.messages) end = of.messages.filter((one) => one.parent === end).at(-1)?.id ?? end;
  return end;
}

/** Return the number of messages that all paths begin with. */
export function numShared(paths: Message[][]): number {
  const [first = [], ...others] = paths;
  const differs = first.findIndex((message, i) => others.some((path) => path[i]?.id !== message.id));
  return differs < 0 ? Math.min(...paths.map((path) => path.length)) : differs;
}

export function titleOf(conversation: Conversation): string {
  const text = conversation.title || conversation.messages[0]?.content.slice(0, 200).replace(/\s+/g, " ").trim() || (conversation.messages.length ? "Image" : "New conversation");
  return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE)}…` : text;
}

// ---- kept -----------------------------------------------------------------------------------------

/** Return what is kept, newest first; nothing if it cannot be read. */
export function load(): Conversation[] {
  return parse(localStorage.getItem(NAME) ?? "[]");
}

/** Return the conversations of a text in JSON; nothing if it holds none. */
export function parse(text: string): Conversation[] {
  try {
    const found: unknown = JSON.parse(text);
    return Array.isArray(found) ? found.flatMap(read) : [];
  } catch {
    return [];
  }
}

/** Read the stored conversations of this or an earlier page, and drop all other values. */
function read(value: unknown): Conversation[] {
  const one = value as Partial<Conversation> | null;
  if (typeof one?.id !== "string" || !Array.isArray(one.messages)) return [];
  if (!areTexts([one.title, one.system, one.tools, one.schema])) return [];
  if (!one.messages.every(isMessage)) return [];
  let before: string | null = null; // earlier pages kept a list
  const messages = one.messages.map((message) => {
    const whole: Message = { ...message, id: message.id ?? newId(), parent: message.parent === undefined ? before : message.parent };
    before = whole.id;
    return whole;
  });
  const branches = Array.isArray(one.branches) && one.branches.length ? one.branches.slice(0, MAX_BRANCHES) : [before];
  return [{ ...begin(), ...one, messages, branches } as Conversation];
}

function isText(value: unknown): boolean {
  return typeof value === "string";
}

/** Return whether all values that are there are texts. */
function areTexts(values: unknown[]): boolean {
  return values.every((value) => value === undefined || isText(value));
}

/** Return whether a value of a file can be shown as a message. */
function isMessage(value: unknown): value is Message {
  const { role, content, images = [], files = [], calls = [], id, parent, reasoning, call, note, usage, request } = (value ?? {}) as Partial<Record<keyof Message, unknown>>;
  if (!areTexts([id, parent ?? undefined, reasoning, call, note, usage, request])) return false;
  if (typeof content !== "string" || !["user", "assistant", "tool"].includes(role as string)) return false;
  if (!Array.isArray(images) || !Array.isArray(files) || !Array.isArray(calls)) return false;
  return images.every((url) => typeof url === "string" && /^(data:image\/|$)/.test(url)) && files.every((file: TextFile | null) => isText(file?.name) && isText(file?.text)) && calls.every((call: Call | null) => isText(call?.id) && isText(call?.name) && isText(call?.arguments));
}

/** Keep them. Where the browser has no room, images go first, then conversations, the oldest of each first. Return what had to go. */
export function save(all: Conversation[]): "images" | "conversations" | null {
  if (stored(all)) return null;
  const rest = [...all];
  for (let i = rest.length - 1; i >= 0; i--) {
    const one = rest[i];
    if (!one?.messages.some((message) => message.images?.some(Boolean))) continue;
    rest[i] = { ...one, messages: one.messages.map((message) => message.images ? { ...message, images: message.images.map(() => "") } : message) };
    if (stored(rest)) return "images";
  }
  while (rest.pop()) if (stored(rest)) break;
  return "conversations";
}

function stored(all: Conversation[]): boolean {
  try {
    localStorage.setItem(NAME, JSON.stringify(all));
    return true;
  } catch {
    return false;
  }
}
