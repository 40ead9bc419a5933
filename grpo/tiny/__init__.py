"""The bundled tiny policy: how it is made (`python -m grpo.tiny.make`) and, beside the code, the policy itself."""
