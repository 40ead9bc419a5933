"""The tiny policy's tokenizer: a byte-level BPE whose pieces never cross the edge of a value.

What the user answers (`date: next week.`) and what the plan holds (`"date": "next week"`) must be the *same* token
ids, or a small model cannot learn to copy. So text is split before any merge is learnt:

- a word keeps its *trailing* space (`next `, `week`), because what stands before a value differs (`: ` or `": "`)
  but its first letter does not, and what stands after it is never a space;
- digits come in pieces of at most two, apart from the letters around them;
- characters a value can begin or end with (`# $ < > +`) stand alone; every other run of punctuation, spaces and
  newlines is one piece, so that `", "` or `?"}}` + newline cost one token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PIECES = (
    r"(?:system|user|assistant)\n"  # one token per turn header
    r"|[A-Za-z]+(?:[-.][A-Za-z]+)*[ _]?"
    r"|[0-9]{1,2}"
    r"|[#$<>+]"
    r"|[^A-Za-z0-9#$<>+]+"
)
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# As in Qwen3: markers of calls and thinking are single tokens but not "special" (they survive decoding).
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCAB_SIZE = 1536
SYLLABLES = [c + v for c in "b c d f g h j k l m n p r s t v w z".split() for v in "aeiou"]


def open_vocabulary(count: int, seed: int) -> list[str]:
    """`count` invented words and the numbers below 100: pieces for values that no list holds."""
    rng = random.Random(seed)
    stems = ("".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(count))
    words = [stem + rng.choice(["", "n", "r", "s"]) + rng.choice(["", " "]) for stem in stems]
    return words + [f"{number:02d}" for number in range(100)] * 20


def build_tokenizer(corpus: Iterable[str], out: Path, max_length: int) -> PreTrainedTokenizerFast:
    """Train on `corpus` (the texts the policy will read and write) plus invented words; save into `out`."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus, *open_vocabulary(4000, seed=0)], trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    fast.save_pretrained(out)
    return fast
