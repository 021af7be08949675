"""One small program per engine: loads a model, runs one workload, prints one JSON line per run.

They run in the engine's environment, so they import nothing of quire (except quire's own). Of this
package they import only modules that need nothing but the standard library.
"""
