"""A page to look at runs and to play against a policy: `python -m demo` (`pip install -e ".[demo]"`).

runs.py      reads run folders: episodes, evaluations; pure, without torch and gradio
views.py     episodes as HTML: everything that a model or a file wrote is escaped
tokens.py    the token view: numbers by the trainer's own code, colours
chat.py      live episodes, the person being the user or the agent
app.py       the page (live.py: its live tab); the only files that import gradio
"""

INSTALL = 'pip install -e ".[demo]"'
