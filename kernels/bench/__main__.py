"""All benchmarks: `python kernels/bench`, or `make bench`. On a GPU: `python kernels/bench --device cuda`.

CPU: under three minutes on two cores; GPU: under ten. The head's loss gets most of the time; `--budget` sets another
total, `--smoke` only tries whether everything runs. For shapes of one's own there is a script for each op.
"""

from __future__ import annotations

import sys

import grpo_token_loss
import harness
import linear_grpo_loss
import linear_logprob
import logprob_from_logits

if __name__ == "__main__":
    harness.main(
        [
            linear_grpo_loss.BENCHMARK,
            linear_logprob.SCORING,
            linear_logprob.AUTOGRAD,
            logprob_from_logits.BENCHMARK,
            grpo_token_loss.BENCHMARK,
        ],
        sys.argv[1:],
        shares=(0.74, 0.06, 0.1, 0.08, 0.02),
    )
