"""Compute prompts and keep their blocks in a directory.

vLLM: examples/disaggregated/example_connector/prefill_example.py
"""

import tempfile

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main():
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            model="demo",
            enforce_eager=True,
            kv_transfer_config=KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": folder},
            ),
        )
        params = SamplingParams(temperature=0, top_p=0.95, max_tokens=1)
        print(llm.generate(["Hi " * 50, "Hey " * 50], params)[0].outputs[0].text)
        llm.close()


if __name__ == "__main__":
    main()
