"""The environment: a vague request, a simulated user who knows more, three tools, and a score for the plan.

Everything here speaks messages and text, never tokens, and depends on no machine-learning library.
"""
