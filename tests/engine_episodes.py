"""Episodes for the in-process sampler: turns and replies of random lengths on a toy model, played and checked."""

from __future__ import annotations

import random

import torch
import toy

from grpo.engines import TurnRequest
from grpo.engines.torch_engine import TorchEngine

TOKENIZER = toy.make_tokenizer()
EOS = frozenset(range(0, len(TOKENIZER), 15))  # many, so that a random model ends its turns at different lengths


def engine_for(model, compiled=True, **options) -> TorchEngine:
    """`compiled` False: forwards of few tokens go the way of those of many."""
    engine = TorchEngine(model, EOS, **{"max_context": 1024, "slots": 5} | options)
    if not compiled:
        engine._decode.few_tokens = 0
    return engine


def some_ids(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(len(TOKENIZER)) for _ in range(n))


class Episode:
    """What one episode sends and gets: three to five turns with replies of different lengths."""

    def __init__(self, key, prompt, seed=0):
        self.rng = random.Random(hash((key, seed)))
        self.key, self.prompt = key, prompt
        self.replies = [some_ids(self.rng, self.rng.randint(0, 20)) for _ in range(self.rng.randint(2, 4))]
        self.ids, self.turn, self.delay = list(prompt), 0, 0
        self.sampled: list[tuple[int, int, float]] = []  # (index in ids, token, log-prob)
        self.finishes: list[str] = []

    def request(self) -> TurnRequest:
        return TurnRequest(
            self.key, tuple(self.ids), self.rng.randint(1, 30), self.turn, len(self.ids) - len(self.prompt), self.key[0]
        )

    def take(self, output) -> bool:
        """True if there is another turn."""
        for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
            self.sampled.append((len(self.ids), token, logprob))
            self.ids.append(token)
        self.finishes.append(output.finish)
        assert (output.token_ids[-1] in EOS) == (output.finish == "stop")
        assert not EOS & set(output.token_ids[:-1])
        if self.turn == len(self.replies):
            return False
        self.ids.extend(self.replies[self.turn])
        self.turn += 1
        return True


def episodes_of(groups=3, members=4, prompt=(30, 90), seed=0) -> list[Episode]:
    """Groups share a prompt; all groups share a prefix of 20 tokens."""
    rng = random.Random(seed)
    system = some_ids(rng, 20)
    prompts = [system + some_ids(rng, rng.randint(*prompt)) for _ in range(groups)]
    return [Episode((g, m), prompts[g], seed) for g in range(groups) for m in range(members)]


def play(engine, episodes, step=0, sampling=None, max_delay=0) -> None:
    """Drive the engine until all is done; `max_delay`: an environment that takes up to that many steps to answer."""
    engine.start(step, sampling)
    by_key = {episode.key: episode for episode in episodes}
    rng = random.Random(1)
    for episode in episodes:
        engine.submit(episode.request())
    late: list[list] = []
    while engine.num_active:
        for output in engine.step():
            if by_key[output.key].take(output):
                late.append([rng.randint(0, max_delay), by_key[output.key]])
            else:
                engine.release(output.key)
        for entry in late:
            entry[0] -= 1
            if entry[0] < 0:
                engine.submit(entry[1].request())
        late = [entry for entry in late if entry[0] >= 0]


def largest_gap(model, episodes, temperature=1.0) -> float:
    """Largest difference between a sampled log-prob and that of a fresh forward over the whole episode."""
    gap = 0.0
    for episode in episodes:
        with torch.no_grad():
            logits = model(torch.tensor([episode.ids]), use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits / temperature, -1)
        for index, token, logprob in episode.sampled:
            assert episode.ids[index] == token
            gap = max(gap, abs(logprobs[index - 1, token].item() - logprob))
    return gap
