"""The multi-turn loop: what becomes of sampled turns, replies and limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import toy

from env.clarify import ClarifyEnv, StepResult, StopReason
from grpo.batching import make_microbatches
from grpo.chat import ChatTokens
from grpo.data_types import Turn
from grpo.engines import TurnOutput
from grpo.engines.torch_engine import TorchEngine
from grpo.rollout import rollout
from grpo.sampling import SamplingConfig
from scenarios.generator import generate

SCENARIO = generate(10_000, "medium", "event_planning")
EOS = 151645


class ScriptedEngine:
    """Plays given ids: `script(key, turn)` -> ids. Turns end in the order of `rank(key, turn)`, one per step."""

    def __init__(self, script, max_context=100_000, rank=lambda key, turn: 0, eos=EOS):
        self.script, self.max_context, self.rank, self.eos = script, max_context, rank, eos
        self.requests, self.pending, self.released = [], [], []

    def start(self, step, sampling=None, before=()):
        self.started = (step, sampling)

    def submit(self, request):
        self.requests.append(request)
        self.pending.append(request)

    def step(self):
        request = min(self.pending, key=lambda r: (self.rank(r.key, r.turn), r.turn, r.key))
        self.pending.remove(request)
        ids = tuple(self.script(request.key, request.turn))
        finish = "length" if len(ids) > request.max_tokens or ids[-1] != self.eos else "stop"
        ids = ids[: request.max_tokens]
        return [TurnOutput(request.key, ids, tuple(-0.5 - i for i in range(len(ids))), finish)]

    def release(self, key):
        self.released.append(key)

    @property
    def num_active(self):
        return len(self.pending)


class StubChat:
    """Ids stand for themselves: prompt and delta are given, a turn's text lists its ids."""

    def __init__(self, prompt=(1, 2, 3), delta=(198, 151644, 872, 198, 9, EOS, 198, 151644, 77091, 198)):
        self.prompt, self.delta = tuple(prompt), tuple(delta)

    def first_prompt(self, messages):
        return self.prompt

    def reply_ids(self, text):
        return self.delta

    def decode_turn(self, ids):
        return " ".join(map(str, ids))


class StubEnv(ClarifyEnv):
    """Answers "9" for `turns - 1` turns, then ends with a plan."""

    turns = 2

    def step(self, text, truncated=False):
        self.seen = [*getattr(self, "seen", []), (text, truncated)]
        self._record = dataclasses.replace(self.record, num_turns=self.record.num_turns + 1)
        if self.record.num_turns < self.turns or truncated:
            return StepResult("9", False, None)
        self._record = dataclasses.replace(self.record, plan={}, stop_reason=StopReason.PLAN)
        return StepResult(None, True, StopReason.PLAN)


def play(engine, chat=None, scenarios=(SCENARIO,), **options):
    options = {"num_generations": 1, "max_completion_len": 1000, "step": 0, "reward_fn": lambda record: 1.0} | options
    return rollout(engine, chat or StubChat(), list(scenarios), **{"env_factory": StubEnv} | options)


TWO_TURNS = [(5, 6, EOS), (7, EOS)]


def two_turns(key, turn):
    return TWO_TURNS[turn]


# ------------------------------------------------------------------------------------------------- tokens and masks


def test_worked_example_of_episode():
    """The example in the docstring of `grpo.data_types.Episode`, value by value."""
    engine = ScriptedEngine(two_turns)
    ((episode,),) = [group.episodes for group in play(engine)]
    assert episode.prompt_ids == (1, 2, 3)
    delta = (198, 151644, 872, 198, 9, 151645, 198, 151644, 77091, 198)
    assert episode.completion_ids == (5, 6, 151645, *delta, 7, 151645)
    assert episode.loss_mask == (1, 1, 1, *[0] * 10, 1, 1)
    assert [(turn.start, turn.stop) for turn in episode.turns] == [(0, 3), (13, 15)]
    assert episode.turns == (Turn(0, 3, "5 6 151645", "9"), Turn(13, 15, "7 151645", None))
    assert episode.num_trained == 5
    assert episode.sampler_logprobs == (-0.5, -1.5, -2.5, *[0.0] * 10, -0.5, -1.5)
    assert (episode.stop_reason, episode.truncated, episode.reward, episode.member) == (StopReason.PLAN, False, 1.0, 0)
    assert episode.record.num_turns == 2
    first, second = engine.requests
    assert (first.prompt_ids, first.turn, first.position) == ((1, 2, 3), 0, 0)
    assert second.prompt_ids == episode.prompt_ids + episode.completion_ids[:13]
    assert (second.turn, second.position) == (1, 13)
    assert engine.released == [(0, 0)]


def test_worked_example_of_token_batch():
    """The example in the docstring of `grpo.data_types.TokenBatch`: which position predicts which token."""
    episode = play(ScriptedEngine(two_turns))[0].episodes[0]
    (batch,) = make_microbatches([episode], [0.2], max_tokens=100)
    assert batch.input_ids.shape == (1, 17)  # the last token predicts nothing
    assert batch.predict_cols.tolist() == [2, 3, 4, 15, 16]
    assert batch.targets.tolist() == [5, 6, 151645, 7, 151645]
    assert batch.episode_index.tolist() == [0] * 5
    # Token 7 is predicted by the last token of the reply: completion index 12.
    assert batch.predict_cols[3] - len(episode.prompt_ids) == 12
    assert batch.sampler_logprobs.tolist() == [-0.5, -1.5, -2.5, -0.5, -1.5]


def real_parts(slots=5, **chat_options):
    """Toy model, tokenizer and environment; every twelfth id ends a turn, so that episodes have several turns."""
    tokenizer = toy.make_tokenizer()
    chat = ChatTokens(tokenizer, **chat_options)
    engine = TorchEngine(toy.make_model(tokenizer), chat.eos_ids | set(range(0, 400, 12)), slots=slots)
    return tokenizer, chat, engine


SCENARIOS = [generate(20_000 + seed) for seed in range(3)]


def play_real(engine, chat, **options):
    options = {"num_generations": 3, "max_completion_len": 300, "step": 3, "reward_fn": lambda r: 0.0} | options
    return rollout(engine, chat, SCENARIOS, **options)


def test_every_turn_begins_with_the_turns_before_it():
    """Prefix property over real rollouts: prompt n+1 = prompt n + ids sampled in turn n + reply."""
    _, chat, engine = real_parts()
    asked, ended = {}, {}
    submit, step = engine.submit, engine.step

    def recording_submit(request):
        asked.setdefault(request.key, []).append(request)
        submit(request)

    def recording_step():
        outputs = step()
        for output in outputs:
            ended.setdefault(output.key, []).append(output)
        return outputs

    engine.submit, engine.step = recording_submit, recording_step
    groups = play_real(engine, chat)
    checked = 0
    for s, group in enumerate(groups):
        for episode in group.episodes:
            requests, outputs = asked[s, episode.member], ended[s, episode.member]
            assert requests[0].prompt_ids == episode.prompt_ids
            for n, (request, output) in enumerate(zip(requests, outputs, strict=True)):
                grown = request.prompt_ids + output.token_ids
                if n + 1 < len(requests):
                    following = requests[n + 1].prompt_ids
                    assert following == grown + chat.reply_ids(episode.turns[n].reply)
                    checked += 1
                turn = episode.turns[n]
                assert episode.completion_ids[turn.start : turn.stop] == output.token_ids
                assert episode.sampler_logprobs[turn.start : turn.stop] == output.logprobs
            trained = [i for turn in episode.turns for i in range(turn.start, turn.stop)]
            assert [i for i, mask in enumerate(episode.loss_mask) if mask] == trained
    assert checked > 20


def test_sampler_logprobs_of_real_rollouts_equal_a_fresh_forward():
    _, chat, engine = real_parts()
    for group in play_real(engine, chat):
        for episode in group.episodes:
            ids = torch.tensor([episode.prompt_ids + episode.completion_ids])
            with torch.no_grad():
                logprobs = torch.log_softmax(engine.model(ids).logits[0], -1)  # [T, V]
            start = len(episode.prompt_ids)
            predicted = logprobs[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]
            mask = torch.tensor(episode.loss_mask, dtype=torch.bool)
            torch.testing.assert_close(
                predicted[mask], torch.tensor(episode.sampler_logprobs)[mask], atol=1e-4, rtol=0
            )


def test_model_text_is_never_encoded(monkeypatch):
    """Anything that turns text into ids raises on what the model wrote."""
    tokenizer, chat, engine = real_parts()
    written = []
    decode, encode = chat.decode_turn, tokenizer._encode_plus

    def recording_decode(ids):
        written.append(decode(ids))
        return written[-1]

    def careful_encode(text, *args, **kwargs):
        for turn in written:
            assert len(turn) < 4 or turn not in text, f"model text {turn!r} is encoded"
        return encode(text, *args, **kwargs)

    monkeypatch.setattr(chat, "decode_turn", recording_decode)
    monkeypatch.setattr(tokenizer, "_encode_plus", careful_encode)
    groups = play_real(engine, chat)
    assert sum(len(turn) >= 4 for turn in written) > 20
    with pytest.raises(AssertionError, match="is encoded"):  # the watch works
        tokenizer.encode("x" + max(written, key=len))
    assert all(episode.num_trained for group in groups for episode in group.episodes)


def test_same_seed_same_rollout_whatever_the_slots():
    runs = []
    for slots in (2, 64):
        _, chat, engine = real_parts(slots)
        runs.append([episode.completion_ids for group in play_real(engine, chat) for episode in group.episodes])
    assert runs[0] == runs[1]
    assert runs[0] != [e.completion_ids for group in play_real(engine, chat, step=4) for e in group.episodes]
    assert len(set(runs[0])) == 9


def test_evaluation_is_the_same_function_with_other_sampling():
    _, chat, engine = real_parts()
    greedy = SamplingConfig(temperature=0.0, seed=1)
    first, second = (play_real(engine, chat, num_generations=1, step=step, sampling=greedy) for step in (0, 1))
    assert first == second and len(first) == 3
    # Training and evaluation prompts are the same ids.
    training = play_real(engine, chat)
    assert [g.episodes[0].prompt_ids for g in training] == [g.episodes[0].prompt_ids for g in first]
    assert all(len({episode.prompt_ids for episode in group.episodes}) == 1 for group in training)


# ------------------------------------------------------------------------------------------------------------ limits


def test_reply_that_does_not_fit_is_dropped_whole():
    """Budget 8, 3 sampled, a reply of 10: the episode stops with its 3 tokens."""
    (group,) = play(ScriptedEngine(two_turns), max_completion_len=8, reward_fn=lambda r: -0.1)
    (episode,) = group.episodes
    assert episode.completion_ids == (5, 6, EOS)
    assert episode.loss_mask == (1, 1, 1)
    assert episode.turns[0].reply is None
    assert (episode.stop_reason, episode.truncated, episode.reward) == (StopReason.TOKEN_CAP, True, -0.1)
    assert episode.record.stop_reason == StopReason.TOKEN_CAP


@pytest.mark.parametrize("budget, turns", [(13, 1), (14, 2), (15, 2)])
def test_reply_needs_room_for_an_answer(budget, turns):
    """3 sampled and a reply of 10 fill a budget of 13: no token could be sampled after them."""
    episode = play(ScriptedEngine(two_turns), max_completion_len=budget)[0].episodes[0]
    assert len(episode.turns) == turns
    assert len(episode.completion_ids) == {13: 3, 14: 14, 15: 15}[budget]
    assert episode.stop_reason == (StopReason.PLAN if budget == 15 else StopReason.TOKEN_CAP)


def test_each_turn_asks_for_what_is_left():
    engine = ScriptedEngine(two_turns)
    play(engine, max_completion_len=50)
    assert [request.max_tokens for request in engine.requests] == [50, 50 - 13]
    engine = ScriptedEngine(two_turns, max_context=512)
    play(engine, StubChat(range(500)), max_completion_len=64)
    assert engine.requests[0].max_tokens == 12


def test_turn_cut_by_the_budget():
    """The parser hears that the text is cut; the turn's tokens stay trained; no reply follows."""
    envs = []

    def env_factory(scenario):
        envs.append(StubEnv(scenario))
        return envs[-1]

    engine = ScriptedEngine(lambda key, turn: (5, 6, 7, 8, 9))
    episode = play(engine, max_completion_len=4, env_factory=env_factory)[0].episodes[0]
    assert envs[0].seen == [("5 6 7 8", True)]
    assert episode.completion_ids == (5, 6, 7, 8) and episode.loss_mask == (1, 1, 1, 1)
    assert (episode.stop_reason, episode.truncated) == (StopReason.TOKEN_CAP, True)
    # A turn that ends with its last allowed token is whole.
    envs.clear()
    play(ScriptedEngine(two_turns), max_completion_len=3, env_factory=env_factory)
    assert envs[0].seen == [(f"5 6 {EOS}", False)]


def test_context_full():
    """A prompt that fills the context ends that episode before its first turn; a turn cut by the context, after it."""
    for length in (512, 600):
        engine = ScriptedEngine(two_turns, max_context=512)
        episode = play(engine, StubChat(range(length)))[0].episodes[0]
        assert not engine.requests and episode.completion_ids == () == episode.turns
        assert (episode.stop_reason, episode.truncated, episode.reward) == (StopReason.CONTEXT_FULL, True, 1.0)
    engine = ScriptedEngine(lambda key, turn: (5,) * 20, max_context=512)
    episode = play(engine, StubChat(range(500)), max_completion_len=64)[0].episodes[0]
    assert len(episode.completion_ids) == 12
    assert episode.stop_reason == StopReason.CONTEXT_FULL
    engine = ScriptedEngine(two_turns, max_context=512)
    episode = play(engine, StubChat(range(500)), max_completion_len=64)[0].episodes[0]
    assert episode.completion_ids == (5, 6, EOS) and episode.stop_reason == StopReason.CONTEXT_FULL


def test_an_engine_that_cuts_early_ends_the_episode():
    """Some samplers have limits of their own: a cut turn is never continued as if it were whole."""
    episode = play(ScriptedEngine(lambda key, turn: (5, 6)))[0].episodes[0]
    assert episode.completion_ids == (5, 6) and episode.stop_reason == StopReason.TOKEN_CAP


# ------------------------------------------------------------------------------------------------------------ groups


@pytest.fixture
def plan_engine():
    """Real environment, scripted plans: member m of scenario s asks m questions, then proposes {"date": "s-m"}."""
    tokenizer = toy.make_tokenizer()
    chat = ChatTokens(tokenizer)

    def script(key, turn):
        call = (
            '{"name": "ask_question", "arguments": {"question": "What is the venue?"}}'
            if turn < key[1]
            else f'{{"name": "propose_plan", "arguments": {{"plan": {{"date": "{key[0]}-{key[1]}"}}}}}}'
        )
        return tokenizer.encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False)

    def make(order):
        """Members finish in `order`, group by group interleaved."""
        return ScriptedEngine(script, rank=lambda key, turn: order.index(key[1]), eos=tokenizer.eos_token_id)

    return make, chat


def test_reward_i_belongs_to_completion_i(plan_engine):
    """Members finish in the order 3, 1, 0, 2; each reward is made from the plan of its own completion."""
    make, chat = plan_engine
    scenarios = [generate(20_000 + seed) for seed in range(3)]
    ended = []

    def reward_fn(record):
        ended.append(record.plan["date"])
        scenario, member = map(int, record.plan["date"].split("-"))
        assert len(record.questions) == member
        return 10.0 * scenario + member

    engine = make([3, 1, 0, 2])
    groups = play(
        engine, chat, scenarios, num_generations=4, reward_fn=reward_fn, env_factory=ClarifyEnv, max_completion_len=2000
    )
    assert [date[2] for date in ended] == list("333111000222")
    assert [group.rewards for group in groups] == [[10.0 * s + m for m in range(4)] for s in range(3)]
    for s, group in enumerate(groups):
        assert group.scenario == scenarios[s]
        for m, episode in enumerate(group.episodes):
            assert episode.member == m
            assert episode.record.scenario == scenarios[s]  # same family, request, profile, difficulty for all
            assert len(episode.turns) == m + 1
            assert f'"date": "{s}-{m}"' in episode.turns[-1].text
        assert len({episode.prompt_ids for episode in group.episodes}) == 1
    assert len({group.episodes[0].prompt_ids for group in groups}) == 3
    prompt = chat.tokenizer.decode(groups[1].episodes[0].prompt_ids)
    for fact in (scenarios[1].request, scenarios[1].family, *scenarios[1].required_keys):
        assert fact in prompt
    again = play(
        make([0, 1, 2, 3]), chat, scenarios, num_generations=4, reward_fn=reward_fn, env_factory=ClarifyEnv,
        max_completion_len=2000,
    )  # fmt: skip
    assert again == groups  # whatever the order of finishing


def test_progress_counts_finished_episodes():
    calls = []
    play(ScriptedEngine(two_turns), num_generations=3, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (3, 3) and calls == sorted(calls)


def test_step_and_sampling_reach_the_engine():
    engine, sampling = ScriptedEngine(two_turns), SamplingConfig(0.7, seed=5)
    play(engine, step=17, sampling=sampling)
    assert engine.started == (17, sampling)
