// Builds the page into a folder: node build.mjs FOLDER
import { build } from "esbuild";
import { copyFileSync, mkdirSync } from "node:fs";
import { join } from "node:path";

const folder = process.argv[2];
if (!folder) throw new Error("name the folder to build into");
mkdirSync(folder, { recursive: true });
await build({
  entryPoints: ["src/page.ts", "src/page.css"],
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
