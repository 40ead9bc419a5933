"""What the model reads before its first turn. Training, evaluation and `play` use these same texts.

The texts are short, because a small policy pays for each token, and hold no example values, because small models copy
those word for word.
"""

from __future__ import annotations

from scenarios.schema import Scenario

SYSTEM = (
    "You turn a vague request into a plan. Make one tool call per turn. Ask for what you do not know with "
    "ask_question, one thing at a time. Then call propose_plan once, using only what the user told you."
)

TOOLS: list[dict] = [
    {
        "type": "function",
        "function": {
            "name": "ask_question",
            "description": "Ask the user one clarifying question.",
            "parameters": {
                "type": "object",
                "properties": {"question": {"type": "string"}},
                "required": ["question"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "propose_plan",
            "description": "Submit the plan, one JSON object of plan fields. Ends the task.",
            "parameters": {
                "type": "object",
                "properties": {"plan": {"type": "object"}},
                "required": ["plan"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_task_info",
            "description": "Repeat the task and what is left of the budget.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
"""The three tools as function descriptions, for the `tools=` of a chat template."""


def brief(scenario: Scenario) -> str:
    """The task as the user message gives it: request, family, required plan fields, budgets."""
    lines = [
        f"Request: {scenario.request}",
        f"Family: {scenario.family}",
        f"Plan fields: {', '.join(scenario.required_keys) or 'any'}",
        f"Budget: {scenario.max_steps} turns, {scenario.max_questions} questions",
    ]
    if scenario.family == "medical_intake":
        lines.append("Intake only, no diagnosis.")
    return "\n".join(lines)


def first_messages(scenario: Scenario) -> list[dict[str, str]]:
    """The conversation before the model's first turn: one system and one user message."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": brief(scenario)}]
