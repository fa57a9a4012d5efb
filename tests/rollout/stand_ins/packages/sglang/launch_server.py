"""Started as the real one is: python -m sglang.launch_server --model-path ... --port ..."""

from contract import SGLang, main

main(SGLang, "--model-path")
