// Conversations, kept in this browser alone.

export interface Message {
  role: "user" | "assistant";
  content: string;
  reasoning?: string;
  note?: string; // how it ended, if not by itself
}

export interface Conversation {
  id: string;
  title: string;
  system: string;
  messages: Message[];
}

const NAME = "quire.conversations";
const MOST_TITLE = 48;

/** Return what is kept, newest first; nothing if it cannot be read. */
export function load(): Conversation[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter(isConversation) : [];
  } catch {
    return [];
  }
}

function isConversation(value: unknown): value is Conversation {
  const one = value as Conversation | null;
  return typeof one?.id === "string" && typeof one.title === "string" && Array.isArray(one.messages)
    && one.messages.every((message) => typeof message.content === "string");
}

/** Keep them; those that the browser has no room for go, oldest first. False if none fits. */
export function save(all: Conversation[]): boolean {
  for (let num = all.length; num >= 0; num--) {
    try {
      localStorage.setItem(NAME, JSON.stringify(all.slice(0, num)));
      return num === all.length;
    } catch {
      continue;
    }
  }
  return false;
}

export function begin(system = ""): Conversation {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", system, messages: [] };
}

/** Copy a conversation up to a message, to go on from there in another way. */
export function branch(from: Conversation, num: number): Conversation {
  return { ...begin(from.system), title: from.title, messages: from.messages.slice(0, num).map((one) => ({ ...one })) };
}

export function titleOf(conversation: Conversation): string {
  const text = conversation.title || conversation.messages[0]?.content.slice(0, 200).replace(/\s+/g, " ").trim() || "New conversation";
  return text.length > MOST_TITLE ? `${text.slice(0, MOST_TITLE)}…` : text;
}
