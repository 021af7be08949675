// Conversations as files.

import { pathTo, titleOf, type Conversation, type Message } from "./conversations";
import { make } from "./dom";

const NAMES = { user: "You", assistant: "Assistant", tool: "Result" };

/** Return a conversation's branches as Markdown, each with its messages. */
export function asMarkdown(conversation: Conversation): string {
  const paths = conversation.branches.map((leaf) => pathTo(leaf, conversation));
  const system = conversation.system.trim() ? `**System prompt**\n\n${conversation.system.trim()}\n\n` : "";
  const parts = paths.map((path, i) => (paths.length > 1 ? `## Branch ${i + 1}\n\n` : "") + path.map(inMarkdown).join("\n\n"));
  return `# ${titleOf(conversation)}\n\n${system}${parts.join("\n\n")}\n`;
}

function inMarkdown({ role, content, images, files, reasoning, calls }: Message): string {
  const parts = [`**${NAMES[role]}**`];
  if (images?.length) parts.push(`(${images.length} ${images.length > 1 ? "images" : "image"})`);
  for (const { name } of files ?? []) parts.push(`(file: ${name})`);
  if (reasoning) parts.push(reasoning.split("\n").map((line) => `> ${line}`).join("\n"));
  if (content) parts.push(content);
  for (const { name, arguments: given } of calls ?? []) parts.push(`Calls \`${name}\` with \`${given}\``);
  return parts.join("\n\n");
}

/** Let the browser save a text as a file. */
export function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
  const safe = name.replace(/[^\p{L}\p{N} ._-]/gu, "").trim() || "conversation";
  const link = make("a", { href: url, download: safe });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
