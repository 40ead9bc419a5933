"""The KL-anchor ablation in one command, `python -m grpo.reproduce`: train, evaluate, say what can be told.

For every model: the base is evaluated once; for every beta and seed a run of train.py, an evaluation of the same
held-out scenarios by eval.py, and the KL to the base by grpo.divergence. Each is a process of its own, so nothing here
trains or plays. What is done is kept: the same command goes on where an earlier one was stopped.

    plan.py        flags; the runs, and what is left to do of them
    processes.py   carries that out, several at a time
    results.py     the files of all runs as one JSON document, verdicts included
    report.py      that document as text and pictures

    RUNS_DIR/<model>-base-<n>.json              the base's evaluation of n scenarios
    RUNS_DIR/<model>-beta<b>-seed<s>/           a run's folder, with evaluation-<n>.json and divergence-<n>.json in it
    RUNS_DIR/<name>.log                         what the processes printed
    OUTPUT_DIR/report.md, report.json, *.png
"""
