// The package's source, which is smaller than its build: that one has chemistry and physics too.
declare module "temml/temml.js" {
  export { default } from "temml";
}
