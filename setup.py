"""Packages and dependencies.

Packages are named one by one: `kernels/` is a plain folder (Hugging Face's `kernels` library has that name), and an
automatic search would take it, the tests and run folders along.

The CUDA row kernel is optional: it is built where torch is a CUDA build and nvcc is found, and an installation without
either goes on and says so in one line. pip builds in isolation, without torch, so ask for it with
`pip install --no-build-isolation -e .`, or build it alone with `python kernels/csrc/build.py`.
"""

import importlib.util
import warnings
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

spec = importlib.util.spec_from_file_location("csrc_build", Path(__file__).parent / "kernels" / "csrc" / "build.py")
assert spec and spec.loader
csrc_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(csrc_build)


class BuildWithKernel(build_py):
    """Before the packages' files are collected, so that a library built here is one of them."""

    def run(self) -> None:
        print(csrc_build.build_if_possible())
        super().run()


# A banner for each editable installation, about folders named like the package: here they are the package.
warnings.filterwarnings("ignore", message="Editable installation")


setup(
    name="clarify-grpo",
    version="0.1.0",
    description="GRPO from scratch in plain PyTorch, training an agent that asks before it acts",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        "grpo", "grpo.engines", "grpo.reproduce", "grpo.tiny", "grpo_kernels", "demo", "env", "env.server", "scenarios",
    ],
    package_dir={"grpo_kernels": "kernels/grpo_kernels"},
    py_modules=["train", "eval"],
    cmdclass={"build_py": BuildWithKernel},
    package_data={
        "demo": ["*.css", "*.js"],
        "env": ["*.json"],
        "grpo_kernels": ["*.so"],
        "grpo.tiny": ["*.json", "*.safetensors", "*.jinja"],
        "env.server": ["*.md"],
        "scenarios": ["*.json"],
    },
    install_requires=[
        "torch>=2.11",
        # The range that vLLM 0.32 accepts.
        "transformers>=5.16.1,<5.20",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "numpy>=1.26",
        # What the sampler does between products on a CPU. Not pinned: vLLM pins it.
        "numba>=0.61",
        "pydantic>=2.7",
        "tyro>=0.9",
        "rich>=13",
        "matplotlib>=3.8",
        "jinja2>=3.1",
        # The client of `eval.py --vllm-url` and `--api-base`: retries and time limits are its own. 2.6: a limit for
        # Retry-After.
        "urllib3>=2.6",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "ruff>=0.6", "triton>=3.6", "peft>=0.17",
                 "nbclient>=0.10", "ipykernel>=6.29", "bitsandbytes>=0.50",
                 # Pinned, as each release finds other things in the same code.
                 "mypy==2.4.*"],
        # The environment as a server, and --env-url. Never beside openenv-core: both write the same folder.
        "server": ["openenv==0.10.*"],
        # The sampler on a GPU. It pins torch 2.13. Without a GPU: `make test-vllm`.
        "vllm": ["vllm==0.32.*"],
        "lora": ["peft>=0.17"],
        # One minor release: the page's styles, and what it takes to keep a model's text from being read as HTML, hang
        # on markup that gradio changes between them. tests/test_demo_page.py is what a newer one has to pass.
        "demo": ["gradio==6.31.*"],
        # Drives the browser of the machine (`make test-demo`); it brings none of its own.
        "demo-test": ["playwright>=1.65"],
        # docs/grpo_in_one_notebook.ipynb
        "notebook": ["jupyterlab>=4"],
        # --optimizer adamw8bit: the version that the tests have seen, and later ones.
        "adamw8bit": ["bitsandbytes>=0.50"],
        # --report-to: the versions that the tests have seen, and later ones.
        "wandb": ["wandb>=0.31"],
        "trackio": ["trackio>=0.43"],
        "tensorboard": ["tensorboard>=2.21"],
        # Only for the optional comparison of loss and gradients; release notes change the meaning of its flags.
        "trl": ["trl==1.16.*", "accelerate", "datasets"],
        # Only for the baselines of kernels/bench, which were written for these versions.
        "bench": ["trl==1.16.*", "accelerate", "datasets", "liger-kernel==0.8.5"],
    },
)
