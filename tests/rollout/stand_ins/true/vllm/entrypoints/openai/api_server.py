"""The stand-in for vLLM with a true model behind it; started as the real one is.

Needs torch and transformers, and is slow: every token is a pass over all before it. One sample depends on the weights,
the prompt and its seed, and on nothing else.
"""

import threading

import torch
from contract import VLLM, main
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)


class Model:
    context = 512

    def __init__(self, folder):
        self.one_at_a_time = threading.Lock()
        self.load(folder)

    def load(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        stop = self.model.generation_config.eos_token_id
        self.stops = {stop} if isinstance(stop, int) else set(stop or ())

    @torch.no_grad()
    def logprobs(self, ids):
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

    def score(self, ids):
        with self.one_at_a_time:
            return self.logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def sample(self, prompt, seed, max_tokens):
        generator = torch.Generator().manual_seed(seed % (1 << 62))
        ids, found = [], []
        with self.one_at_a_time:
            while len(ids) < max_tokens and not (ids and ids[-1] in self.stops):
                row = self.logprobs([*prompt, *ids])[-1]
                ids.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
                found.append(float(row[ids[-1]]))
        return ids, found, "stop" if ids[-1] in self.stops else "length"

    def digests(self):
        return None


main(VLLM, "--model", Model)
