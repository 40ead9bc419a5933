"""Fixtures of several test files, and the switch that lets Triton kernels run where there is no GPU."""

import os

import pytest
import torch

from tests import toy

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before any is imported


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder with the toy policy; dropout is set in its config, and must have no effect."""
    path = tmp_path_factory.mktemp("toy")
    tokenizer = toy.make_tokenizer()
    model = toy.make_model(tokenizer)
    model.config.attention_dropout = 0.1
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
