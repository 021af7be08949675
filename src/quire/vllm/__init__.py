"""vLLM's Python names, so that a script that imports vllm runs unchanged.

    python -m quire.vllm SCRIPT

`finder.install` makes `import vllm` find these names in the running process. Nothing else imports
this folder, and nothing is installed under the name vllm.
"""
