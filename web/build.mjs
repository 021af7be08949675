// Builds the page into a folder: node build.mjs FOLDER
import { build } from "esbuild";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const folder = process.argv[2];
if (!folder) throw new Error("name the folder to build into");
mkdirSync(folder, { recursive: true });
await build({
  entryPoints: [{ in: "src/page.ts", out: "page" }, { in: "src/page.css", out: "page" }, { in: "src/math_converter.ts", out: "math" }],
  outdir: folder,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2020",
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) copyFileSync(join("src", name), join(folder, name));
const licences = [["marked", "LICENSE"], ["temml", "LICENSE"]].map(([name, file]) => `${name}\n\n${readFileSync(join("node_modules", name, file), "utf8")}`);
writeFileSync(join(folder, "licences.txt"), licences.join("\n\n"));
