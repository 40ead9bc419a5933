"""Flags, environment variables, recipes: precedence, and one clear line for bad values."""

import dataclasses

import pytest
import tyro

from grpo.config import HELD_OUT_SIZE, RECIPES, Config, UsageError, cautions, parse
from scenarios.generator import held_out


def flags() -> set[str]:
    return set(Config().flat())


def test_at_most_50_knobs_each_with_help():
    assert len(flags()) <= 50
    for concern in dataclasses.fields(Config):
        cls = type(getattr(Config(), concern.name))
        help_text = tyro.extras.get_parser(cls).format_help()
        for knob in dataclasses.fields(cls):
            assert "--" + knob.name.replace("_", "-") in help_text
            helptext = tyro._docstrings.get_field_docstring(cls, knob.name, ())
            assert helptext, f"{knob.name} has no help"


def test_the_required_flags_exist():
    wanted = """model beta learning_rate num_steps num_generations prompts_per_step max_completion_len seed output_dir
    engine recipe loss_type kl_estimator rubric eval_limit resume""".split()
    assert set(wanted) <= flags()


def test_flag_beats_variable_beats_recipe_beats_default():
    assert Config().loss.beta == 0.0
    assert parse(["--recipe", "clarify-run4"], {}).loss.beta == 0.2
    assert parse(["--recipe", "clarify-run4"], {"BETA": "0.3"}).loss.beta == 0.3
    assert parse(["--recipe=clarify-run4", "--beta", "0.4"], {"BETA": "0.3"}).loss.beta == 0.4


def test_the_published_recipe_s_variables():
    env = dict(BETA="0.1", LEARNING_RATE="2e-6", NUM_STEPS="7", NUM_GENERATIONS="3", MAX_COMPLETION_LEN="99",
               BASE_MODEL="some/model")  # fmt: skip
    config = parse([], env)
    assert (config.loss.beta, config.optim.learning_rate, config.optim.num_steps) == (0.1, 2e-6, 7)
    assert (config.rollout.num_generations, config.rollout.max_completion_len) == (3, 99)
    assert config.model.model == "some/model"


def test_run4_is_pinned_by_name():
    config = parse(["--recipe", "clarify-run4"], {})
    got = config.flat()
    expected = dict(model="Qwen/Qwen3-1.7B", beta=0.2, learning_rate=5e-7, lr_schedule="cosine", num_steps=300,
                    num_generations=4, prompts_per_step=2, max_completion_len=768, temperature=1.0, top_p=1.0,
                    kl_estimator="k3", loss_type="grpo", warmup_steps=10, max_grad_norm=1.0)  # fmt: skip
    assert {name: got[name] for name in expected} == expected
    run1 = parse(["--recipe", "clarify-run1"], {}).flat()
    assert (run1["model"], run1["beta"], run1["learning_rate"]) == ("Qwen/Qwen3-0.6B", 0.0, 1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_name_every_semantic(name):
    semantics = set(RECIPES["clarify-run4"])
    assert set(RECIPES[name]) == semantics


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--num-generations", "1"], "--num-generations 1"),
        (["--beta", "-0.1"], "--beta -0.1"),
        (["--beta", "nan"], "--beta nan"),
        (["--temperature", "0"], "--temperature 0.0"),
        (["--epsilon", "1.5"], "--epsilon 1.5"),
        (["--delta", "1.1"], "--delta 1.1"),
        (["--delta", "1.25", "--loss-type", "dapo"], "--delta 1.25"),
        (["--learning-rate", "inf"], "--learning-rate inf"),
        (["--recipe", "best"], "--recipe best"),
        (["--kl-in", "reward", "--beta", "0"], "--kl-in reward"),
        (["--vllm-url"], "--vllm-url: needs an address"),
        (["--vllm_url", "--seed", "1"], "--vllm-url: needs an address"),
    ],
)
def test_bad_values_are_one_line_that_names_the_flag(args, names):
    with pytest.raises(UsageError) as error:
        parse(args, {})
    assert names in str(error.value) and "\n" not in str(error.value)


def test_bad_variable_is_named():
    with pytest.raises(UsageError, match="NUM_STEPS='many'"):
        parse([], {"NUM_STEPS": "many"})


@pytest.mark.parametrize(
    ("args", "env", "message"),
    [
        ([], {"BETA": "-1"}, "BETA=-1: must be 0 or more"),
        ([], {"NUM_GENERATIONS": "1", "BETA": "0.1"}, "NUM_GENERATIONS=1: must be at least 2"),
        (["--beta", "-2"], {"BETA": "-1"}, "--beta -2.0: must be"),  # the flag wins, so the fault is the flag's
        (["--seed", "-1"], {"BETA": "0.1"}, "--seed -1: must be"),
    ],
)
def test_a_value_is_blamed_on_what_gave_it(args, env, message):
    with pytest.raises(UsageError) as error:
        parse(args, env)
    assert str(error.value).startswith(message)


def test_clip_bounds_that_are_used_can_be_given():
    assert parse(["--loss-type", "cispo", "--epsilon-high", "3"], {}).loss.epsilon_high == 3
    assert parse(["--loss-type", "dapo", "--epsilon", "0.1"], {}).loss.epsilon == 0.1


def test_a_truncated_distribution_is_a_caution():
    assert cautions(parse([], {})) == []
    (line,) = cautions(parse(["--top-p", "0.9"], {}))
    assert "--top-p 0.9" in line and "off-policy" in line


def test_a_kl_estimator_without_a_kl_is_said():
    (line,) = cautions(parse(["--beta", "0", "--kl-estimator", "k1"], {}))
    assert line == "--kl-estimator k1: has no effect, there is no KL where beta is 0"
    assert cautions(parse(["--beta", "0.1", "--kl-estimator", "k1"], {})) == []
    assert cautions(parse(["--beta", "0", "--kl-estimator", "k3"], {})) == []


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--bta", "0.2"], "Unrecognized options: --bta, 0.2; did you mean --beta?"),
        (["--gradient-chekpointing"], "Unrecognized options: --gradient-chekpointing; did you mean "
                                      "--gradient-checkpointing?"),
        (["--xyzzyq"], "Unrecognized options: --xyzzyq"),
        (["--num-steps", "x"], "Error parsing --num-steps: invalid literal for int() with base 10: 'x'"),
        (["--dtype", "f8"], "invalid choice 'f8' for argument '--dtype'. Expected one of ('auto', 'float32', "
                            "'bfloat16')."),
    ],
)  # fmt: skip
def test_what_a_wrong_flag_may_have_been(args, line):
    with pytest.raises(UsageError) as error:
        parse(args, {})
    assert str(error.value) == f"{line} (--help lists the flags)"


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--beta", "lots"], "--beta"),
        (["--num-steps", "1e3"], "--num-steps"),
        (["--loss-type", "foo"], "--loss-type"),
        (["--bet", "0.1"], "--bet"),
        (["--loss-type", "sapo", "--delta", "3"], "--delta 3.0"),
        (["--loss-type", "cispo", "--epsilon", "0.2"], "--epsilon 0.2"),
        (["--loss-type=sapo", "--epsilon=0.1"], "--epsilon 0.1"),
        (["--loss-type", "sapo", "--epsilon_high", "0.3"], "--epsilon-high 0.3"),
        (["--tensor-parallel", "0"], "--tensor-parallel 0"),
        (["--report-to", "mlflow"], "--report-to"),
        (["--report-to"], "--report-to"),
        (["--report-to", "none", "wandb"], "--report-to none wandb"),
        (["--report-to", "wandb", "wandb"], "--report-to wandb wandb"),
    ],
)
def test_a_flag_that_does_not_parse_is_one_line_too(args, names):
    with pytest.raises(UsageError) as error:
        parse(args, {})
    assert names in str(error.value) and "\n" not in str(error.value)


def test_of_a_repeated_flag_the_last_one_counts():
    config = parse(["--recipe", "tiny", "--recipe", "clarify-run1"], {})
    assert (config.run.recipe, config.loss.beta) == ("clarify-run1", 0.0)


def test_several_trackers_can_be_named():
    assert parse(["--report-to", "wandb", "tensorboard"], {}).run.report_to == ("wandb", "tensorboard")


def test_the_size_of_the_held_out_file():
    assert len(held_out(None)) == HELD_OUT_SIZE
