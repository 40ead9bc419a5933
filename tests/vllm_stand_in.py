"""`vllm serve` as far as training through it goes, without vLLM: the routes of grpo/engines/server_training.py in front
of tests/fake_vllm.py, with the real `WeightReceiver` in its workers."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from grpo.chat import ChatTokens
from grpo.engines.server_worker import WeightReceiver
from tests.fake_vllm import LLM
from tests.local_server import Request
from tests.stand_in import StandIn, completion


class Worker(WeightReceiver):
    """vLLM's, as far as `WeightReceiver` uses it. Its model starts with weights that are nobody's."""

    def __init__(self, rank: int, workers: int, folder: str, **about: Any):
        self.rank, self.llm = rank, LLM(folder)
        config = dict(dtype=torch.float32, quantization=None, logprobs_mode="raw_logprobs", data_parallel_size=1)
        self.model_config = self.parallel_config = SimpleNamespace(world_size=workers, **config | about)

    def get_model(self) -> torch.nn.Module:
        return self.llm.model

    def reload_weights(self, **options: Any) -> None:
        self.llm.collective_rpc("reload_weights", kwargs=options)


class VllmStandIn(StandIn):
    """A server of the model in `folder`. `about` changes what its workers say of it."""

    def __init__(self, chat: ChatTokens, folder: str, workers: int = 1, context: int = 2048, **about: Any):
        models = {"data": [{"id": str(folder), "root": str(folder), "max_model_len": context}]}
        super().__init__(self.complete_text, models=models)
        self.chat, self.folder, self.size, self.about = chat, str(folder), workers, about
        self.lock = threading.Lock()
        self.posts: list[str] = []  # paths of all commands, and methods of /collective_rpc
        self.gone = False
        self.restart()

    def restart(self) -> None:
        """As the process would begin."""
        self.workers = [Worker(rank, self.size, self.folder, **self.about) for rank in range(self.size)]
        self.llm, self.version, self.paused = self.workers[0].llm, "default", False

    def answer(self, request: Request) -> Any:
        if self.gone:
            return None
        path = request.path.split("?")[0]
        handlers = {
            "/collective_rpc": self.rpc,
            "/inference/v1/generate": self.generate,
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.reset,
            "/update_weight_version": self.name_weights,
        }
        if path not in handlers:
            return super().answer(request)
        body = json.loads(request.body or b"{}")
        if path not in ("/collective_rpc", "/inference/v1/generate"):
            self.posts.append(path)
        return handlers[path](body)

    def complete_text(self, body: dict[str, Any]) -> Any:
        assert not self.paused, "it would not answer"
        ids = self.chat.tokenizer.encode(body["prompt"], add_special_tokens=False)
        return completion([self.chat.tokenizer.eos_token_id], prompt_ids=ids)

    def rpc(self, body: dict[str, Any]) -> Any:
        """All workers at the same time, as they have to meet each other."""
        self.posts.append(body["method"])
        if not hasattr(Worker, body["method"]):
            return 500, {"error": {"message": "unknown method"}}
        with ThreadPoolExecutor(self.size) as pool:
            calls = [pool.submit(getattr(worker, body["method"]), *body["args"]) for worker in self.workers]
            return {"results": [call.result() for call in calls]}

    def pause(self, body: dict[str, Any]) -> Any:
        self.paused = True
        return {"status": "paused"}

    def resume(self, body: dict[str, Any]) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def reset(self, body: dict[str, Any]) -> Any:
        with self.lock:
            return {"success": self.llm.reset_prefix_cache()}

    def name_weights(self, body: dict[str, Any]) -> Any:
        self.version = body["new_version"]
        return {"success": True}

    def generate(self, body: dict[str, Any]) -> Any:
        """One turn, the cached way; log-probs of the prompt the other one."""
        assert not self.paused, "nothing is sampled while weights are on their way"
        self.bodies.append(body)
        parameters, ids = SimpleNamespace(**body["sampling_params"]), body["token_ids"]
        with self.lock:
            self.posts.append("generate")
            self.llm.add_request("turn", {"prompt_token_ids": ids}, parameters, said=False)
            finished: list[Any] = []
            while not finished:
                finished = self.llm._advance(["turn"])
            logprobs = torch.log_softmax(self.llm._forward(ids), -1)
        [output] = finished[0].outputs
        content = [
            {"token_id": token, "logprob": entry[token].logprob, "top_logprobs": []}
            for token, entry in zip(output.token_ids, output.logprobs)
        ]
        stopped = output.token_ids[-1] in parameters.stop_token_ids
        choice = {
            "index": 0, "token_ids": output.token_ids, "logprobs": {"content": content},
            "finish_reason": "stop" if stopped else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(content)}],
        }  # fmt: skip
        scores = None
        if hasattr(parameters, "prompt_logprobs"):
            scores = [None, *({str(b): {"logprob": float(row[b])}} for row, b in zip(logprobs, ids[1:]))]
        return {"choices": [choice], "prompt_logprobs": scores}
