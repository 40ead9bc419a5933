"""GRPO from scratch: scenarios -> episodes -> tokens with a loss mask -> log-probs -> one loss."""
