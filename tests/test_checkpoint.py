"""Checkpoints: exact, whole after a kill at any point of their making, damage named, other runs refused."""

import builtins
import errno
import json
import os
from pathlib import Path

import pytest
import torch

from grpo import checkpoint, files
from grpo.checkpoint import Progress
from grpo.config import Config, UsageError

CONFIG = json.loads(json.dumps(Config().flat()))  # as config.json has it


def make_model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=0.1, fused=True)


def update(model, optimizer, times=1):
    for i in range(times):
        optimizer.zero_grad()
        model(torch.full((2, 5), 1.0 + i)).square().sum().backward()
        optimizer.step()


def progress(step, **changes):
    values = dict(run_id="a", config=CONFIG, step=step, position={"seed": 0}, log={"rows": step})
    return Progress(**values | changes)


def save(folder, step, model, optimizer, keep=2, **changes):
    return checkpoint.save(folder, progress(step, **changes), model, optimizer, keep)


def whole(folder, run_id="a", config=CONFIG):
    return checkpoint.newest_whole(folder, run_id, config)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    model, optimizer = make_model()
    update(model, optimizer, 3)
    path = save(tmp_path, 3, model, optimizer)
    found, said, problems = whole(tmp_path)
    other, other_optimizer = make_model(seed=1)
    checkpoint.load(found, other, other_optimizer)
    assert (found, said, problems) == (path, progress(3), [])
    assert torch.equal(weights(other), weights(model))
    before, after = optimizer.state_dict(), other_optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"] and before["state"].keys() == after["state"].keys()
    for index, values in before["state"].items():
        for name, tensor in values.items():
            there = after["state"][index][name]
            assert torch.equal(there, tensor) and there.dtype == tensor.dtype, name
    update(model, optimizer)
    update(other, other_optimizer)
    assert torch.equal(weights(other), weights(model))


def test_an_optimizer_that_has_not_stepped_yet_is_restored_as_that(tmp_path):
    model, optimizer = make_model()
    found = save(tmp_path, 1, model, optimizer)
    checkpoint.load(found, model, optimizer)
    assert not optimizer.state


def test_only_safetensors_and_json_are_written_and_nothing_else_is_read(tmp_path):
    path = save(tmp_path, 1, *make_model())
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    source = "".join(
        Path(files.__file__).with_name(name).read_text() for name in ("checkpoint.py", "rollout_record.py")
    )
    assert "torch.load" not in source and "pickle" not in source


def test_order_is_numeric_and_keep_counts_the_newest(tmp_path):
    model, optimizer = make_model()
    for step in (2, 10, 999_999, 1_000_000):
        save(tmp_path, step, model, optimizer, keep=3)
    assert [checkpoint.number(path) for path in checkpoint.finished(tmp_path)] == [10, 999_999, 1_000_000]
    (tmp_path / "checkpoints" / "step-best").mkdir()
    (tmp_path / "checkpoints" / "step-2000000.damaged").mkdir()
    assert checkpoint.number(whole(tmp_path)[0]) == 1_000_000
    save(tmp_path, 1_000_001, model, optimizer, keep=1)
    assert [checkpoint.number(path) for path in checkpoint.finished(tmp_path)] == [1_000_001]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(tmp_path, name, harm):
    model, optimizer = make_model()
    for step in (2, 4):
        save(tmp_path, step, model, optimizer)
    harm(tmp_path / "checkpoints" / "step-000004" / name)
    found, _, problems = whole(tmp_path)
    assert found.name == "step-000002"
    assert len(problems) == 1 and "step-000004 is damaged" in problems[0]
    assert name in problems[0] or (name, harm) == ("manifest.json", flip)  # then a file differs from what it says


def test_a_file_that_the_disk_does_not_give_back_is_damaged_too(tmp_path, monkeypatch):
    model, optimizer = make_model()
    for step in (2, 4):
        save(tmp_path, step, model, optimizer)
    real = checkpoint.sha256

    def sha256(path):
        if path.parent.name == "step-000004" and path.name == "optimizer.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(checkpoint, "sha256", sha256)
    found, _, problems = whole(tmp_path)
    assert found.name == "step-000002"
    assert problems == [f"{tmp_path}/checkpoints/step-000004 is damaged (optimizer.safetensors: Input/output error)"]


def test_a_damaged_checkpoint_never_counts_as_one_that_is_kept(tmp_path):
    model, optimizer = make_model()
    for step in (2, 4):
        save(tmp_path, step, model, optimizer)
    truncate(tmp_path / "checkpoints" / "step-000004" / "model.safetensors")
    checkpoint.set_aside(tmp_path, newer_than=2)
    save(tmp_path, 3, model, optimizer, keep=1)
    assert [path.name for path in checkpoint.finished(tmp_path)] == ["step-000003"]
    assert whole(tmp_path)[0].name == "step-000003"
    assert (tmp_path / "checkpoints" / "step-000004.damaged").is_dir()  # the user's data is not ours to remove


def test_another_run_s_checkpoint_and_changed_settings_are_refused_by_name(tmp_path):
    path = save(tmp_path, 2, *make_model())
    with pytest.raises(UsageError, match=r"step-000002 belongs to another run \(a, this one is b\)"):
        whole(tmp_path, run_id="b")
    with pytest.raises(UsageError, match=r"step-000002 was saved with beta 0.0, config.json says 0.3"):
        whole(tmp_path, config=CONFIG | {"beta": 0.3})
    assert whole(tmp_path, config=CONFIG | {"resume": "x", "report_to": tuple(CONFIG["report_to"])})[0] == path


def test_weights_of_another_model_are_refused(tmp_path):
    path = save(tmp_path, 2, *make_model())
    other = torch.nn.Linear(5, 7)
    with pytest.raises(UsageError, match="step-000002: cannot be loaded into this model"):
        checkpoint.load(path, other, torch.optim.AdamW(other.parameters()))


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def break_at(patch, moment, error):
    """Raise `error` at the `moment`th call that changes the disk; returns the list of calls that were made."""
    calls = []

    def watched(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            if len(calls) == moment:
                raise error
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (checkpoint, "save_trained"), (checkpoint, "save_file"), (Path, "write_text"), (Path, "mkdir"),
        (Path, "rename"), (os, "fsync"), (os, "rmdir"), (os, "unlink"), (os, "replace"),
    ):  # fmt: skip
        patch.setattr(owner, name, watched(getattr(owner, name)))
    return calls


def kills(tmp_path):
    """(moment, folder, steps that were saved before) for a kill at each call of a `save` that also drops one."""
    model, optimizer = make_model()
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        for step in (2, 4):
            save(folder, step, model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            calls = break_at(patch, moment, Killed())
            try:
                save(folder, 6, model, optimizer)
                assert moment > len(calls)
                return
            except Killed:
                pass
        yield moment, folder
    raise AssertionError("a save has no end")


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_and_the_next_save_cleans_up(tmp_path):
    steps, model_and_optimizer = [], make_model()
    for moment, folder in kills(tmp_path):
        found, said, problems = whole(folder)
        assert problems == [] and said.step in (4, 6), moment
        steps.append(said.step)
        save(folder, 8, *model_and_optimizer)
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert len(names) == 2 and names[1] == "step-000008", (moment, names)
    assert steps == sorted(steps) and 4 in steps and 6 in steps and len(steps) > 15


def test_a_full_disk_at_any_moment_is_an_os_error_and_leaves_what_was_there(tmp_path):
    model, optimizer = make_model()
    for moment in range(1, 9):
        folder = tmp_path / str(moment)
        save(folder, 2, model, optimizer)
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, moment, OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(OSError, match="No space left"):
                save(folder, 4, model, optimizer)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"], moment
        assert whole(folder)[1] == progress(2)


def test_safetensors_own_error_of_a_full_disk_is_an_os_error_too(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*args):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError) as caught:
        save(tmp_path, 2, *make_model())
    assert caught.value.errno == errno.ENOSPC and "step-000002" in caught.value.filename


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    files.write_atomic(path, "first")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            files.write_atomic(path, "second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["file.json"]
    files.write_atomic(path, json.dumps({"text": "a\ud800b"}, ensure_ascii=False))
    assert json.loads(path.read_text()) == {"text": "a\ud800b"}


def test_a_log_s_line_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    from grpo import metrics

    log = metrics.LogHistory(tmp_path / "log_history.json")
    log.append({"step": 1, "loss": 0.5})
    before = log.path.read_bytes()

    class Full:
        """The file on a disk with room for ten more bytes."""

        def __init__(self, file):
            self.file, self.room = file, 10

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            if self.file.tell() + 1 <= len(before):  # room that the file has already
                self.room = max(self.room, len(before) - self.file.tell())
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self.file.write(content[: self.room])
            self.room -= written
            return written

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", lambda *a, _open=open, **k: Full(_open(*a, **k)))
        with pytest.raises(OSError, match="No space left"):
            log.append({"step": 2, "loss": 0.25})
    assert log.path.read_bytes() == before
    log.append({"step": 2, "loss": 0.25})
    assert [row["step"] for row in json.loads(log.path.read_text())] == [1, 2]
    assert log.position == {"rows": 2, "bytes": len(log.path.read_bytes()) - 3, "num_tokens": 0}
