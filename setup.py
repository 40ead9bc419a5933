"""Packages and dependencies.

Packages are named one by one: `kernels/` is a plain folder (Hugging Face's `kernels` library has that name), and an
automatic search would take it, the tests and run folders along.
"""

from setuptools import setup

setup(
    name="clarify-grpo",
    version="0.1.0",
    description="GRPO from scratch in plain PyTorch, training an agent that asks before it acts",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["grpo", "grpo.engines", "grpo.tiny", "grpo_kernels", "env", "scenarios"],
    package_dir={"grpo_kernels": "kernels/grpo_kernels"},
    py_modules=["train", "eval"],
    package_data={"grpo.tiny": ["*.json", "*.safetensors", "*.jinja"], "scenarios": ["*.json"]},
    install_requires=[
        "torch>=2.11",
        # The range that vLLM 0.32 accepts.
        "transformers>=5.16.1,<5.20",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "numpy>=1.26",
        "pydantic>=2.7",
        "tyro>=0.9",
        "rich>=13",
        "matplotlib>=3.8",
        "jinja2>=3.1",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "ruff>=0.6", "triton>=3.6"],
        # Only for the optional comparison of loss and gradients; release notes change the meaning of its flags.
        "trl": ["trl==1.16.*", "accelerate", "datasets"],
    },
)
