"""Started as the real one is: python -m vllm.entrypoints.openai.api_server --model ... --port ..."""

from contract import VLLM, main

main(VLLM, "--model")
