"""The environment as a server that speaks OpenEnv's protocol, and what plays on one from elsewhere.

`ClarifyEnvironment` (`environment.py`) is one class for both: made in process, or served by `python -m env.server`.
Everything here but this file needs the package openenv: `pip install -e ".[server]"`.
"""

NAME = "clarify"
"""The environment's name in `openenv.yaml`, in `/metadata` and in the addresses of its tasks."""

VERSION = "1.0.0"
"""Of what goes over the wire."""

INSTALL = 'pip install -e ".[server]"'
