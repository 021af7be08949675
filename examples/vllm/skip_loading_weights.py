"""Replace the weights of a running engine.

vLLM: examples/offline_inference/skip_loading_weights_in_engine_init.py
Refused: quire has no LLM.collective_rpc: the model runs in quire's own processes
"""

from vllm import LLM


def main():
    llm = LLM(model="demo", load_format="dummy", enforce_eager=True)
    llm.generate("Hello, my name is")
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights")


if __name__ == "__main__":
    main()
