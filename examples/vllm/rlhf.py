"""Train and generate with weights that change.

vLLM: examples/offline_inference/rlhf.py
Refused: quire has one kind of worker
"""

from vllm import LLM


def main():
    llm = LLM(model="demo", worker_extension_cls="rlhf_utils.WorkerExtension")
    llm.collective_rpc("init_weight_update_group", args=("localhost", 5555, 1, 2))


if __name__ == "__main__":
    main()
