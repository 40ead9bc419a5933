"""Train a language model with GRPO to ask before it acts: `python train.py --beta 0.2`; `--help` lists every flag."""

import sys

from grpo.console import run_entry


def main() -> None:
    """Parse the flags, then run: see grpo/run.py for the order of things."""
    from grpo.run import start

    start(sys.argv[1:])


if __name__ == "__main__":
    run_entry(main)
