"""The page: what is where, and what follows from which choice. Everything shown is made by the other files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from demo import curves, live, tokens, views
from demo.loading import import_trainer
from demo.runs import Run, Shown, Unreadable, evaluation, find_runs, most_telling, step_episodes

HERE = Path(__file__).parent
NO_RUNS = "No runs in {} yet: `make train` makes one. Meanwhile the live chat works."
FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
THEME = gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=FONT, font_mono=MONO)


def serve(root: Path, host: str, port: int, model: str) -> None:
    """Serve the page until Ctrl-C."""
    page = make_page(root, model)
    page.queue(default_concurrency_limit=4)
    page.launch(server_name=host, server_port=port, prevent_thread_lock=True, **launch_options())
    print(f"runs of {root} at http://{host}:{port}. Ctrl-C ends it.", flush=True)
    if host not in ("127.0.0.1", "::1", "localhost"):
        print("warning: anyone who reaches this address can look and play; there is no authentication", flush=True)
    try:
        page.block_thread()
    finally:
        page.close()


def launch_options() -> dict[str, Any]:
    """No share link, no telemetry, nothing fetched from elsewhere."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    return dict(
        share=False, ssr_mode=False, quiet=True, show_error=True, footer_links=[], run_history=False, theme=THEME,
        css_paths=HERE / "style.css", head=f"<script>{script}</script>",
    )  # fmt: skip


def make_page(root: Path, model: str) -> gr.Blocks:
    """The page over the runs in `root`, not yet served."""
    with gr.Blocks(title="Ask before you act", analytics_enabled=False) as page:
        with gr.Row(elem_classes="pair"):
            gr.HTML(
                "<h1>Ask before you act</h1><p>A small policy learns to ask what it was not told.</p>",
                elem_id="title",
                scale=2,
            )
            run = gr.Dropdown(label="Run", choices=[], scale=1, min_width=240, visible=False, elem_id="run")
        with gr.Tabs() as tabs:
            with gr.Tab("Episodes", id="episodes"):
                episodes = _episodes_tab(root)
            with gr.Tab("Compare", id="versus") as versus_tab:
                versus = _versus_tab(root, run)
            with gr.Tab("Curves", id="curves") as curves_tab:
                curve = _curves_tab(root)
            with gr.Tab("Live chat", id="live"):
                models = live.tab(root, model)

        step, episode, talk, side, by, token_view, view, tokens_tab, talk_tab = episodes
        shown = [step, episode, talk, side]

        choose, token_inputs = _Chosen(root), [view, run, step, episode, by]
        loaded = page.load(choose.open_page, None, [tabs, run, *shown], show_progress="hidden")
        chosen = run.input(choose.open_run, run, shown, show_progress="hidden")
        moved = step.input(choose.open_step, [run, step], shown[1:], show_progress="hidden", trigger_mode="always_last")
        picked = episode.input(choose.open_episode, [run, step, episode], shown[2:], show_progress="hidden")
        looked = tokens_tab.select(lambda: "tokens", None, view)
        talk_tab.select(lambda: "talk", None, view)
        for event in (chosen, moved, picked, looked):
            event.then(choose.show_tokens, token_inputs, token_view, show_progress="minimal", concurrency_id="torch")
        by.input(choose.show_tokens, token_inputs, token_view, show_progress="minimal", concurrency_id="torch")
        loaded.then(live.warm_up, models, None, show_progress="hidden")
        # The other tabs are filled when somebody looks at them: they read more, and import torch.
        for event in (versus_tab.select, chosen.then):
            event(versus.open, run, versus.outputs, show_progress="minimal")
        for event in (curves_tab.select, chosen.then):
            event(curve.open, run, curve.outputs, show_progress="minimal")
    return page


class _Chosen:
    """What follows from which choice in the first tab: each method fills what depends on the one before it."""

    def __init__(self, root: Path):
        self.root = root

    def open_page(self) -> tuple:
        """The tabs, the choice of a run, and all of the newest run that has steps."""
        try:
            runs = find_runs(self.root)
        except Unreadable as error:
            runs, text = [], views.notice(str(error), "error")
        else:
            text = views.notice(NO_RUNS.format(self.root))
        choices = [(f"{each.name} · {views.count(len(each.steps), 'step')}", each.name) for each in runs]
        if not runs:
            hidden = gr.update(visible=False)
            return gr.Tabs(selected="live"), hidden, hidden, hidden, text, ""
        first = next((each for each in runs if each.steps), runs[0])
        return gr.Tabs(), gr.Dropdown(choices=choices, value=first.name, visible=True), *self.open_run(first.name)

    def open_run(self, name: str) -> tuple:
        """Its slider of steps, and the step worth looking at first."""
        chosen = _find(self.root, name)
        first = chosen.first_choice
        if first is None:
            hidden = gr.update(visible=False)
            return hidden, hidden, views.notice(f"{chosen.name} has no finished step yet."), ""
        slider = gr.Slider(
            minimum=chosen.steps[0], maximum=max(chosen.steps[-1], chosen.steps[0] + 1), value=first, visible=True
        )
        return slider, *self.open_step(name, first)

    def open_step(self, name: str, number: float) -> tuple:
        """The choice of an episode, and the most telling one."""
        try:
            batch = step_episodes(_find(self.root, name), int(number))
        except Unreadable as error:
            return gr.update(visible=False), views.notice(str(error), "error"), ""
        if not batch:
            return gr.update(visible=False), views.notice(f"Step {int(number)} holds no episodes."), ""
        chosen = most_telling(batch)
        choices = [(views.label(each), i) for i, each in enumerate(batch)]
        return gr.Dropdown(choices=choices, value=chosen, visible=True), *self.open_episode(name, number, chosen)

    def open_episode(self, name: str, number: float, index: int) -> tuple[str, str]:
        """The conversation, and beside it scores and profile."""
        try:
            batch = step_episodes(_find(self.root, name), int(number))
        except Unreadable as error:
            return views.notice(str(error), "error"), ""
        return _episode(batch, index)

    def show_tokens(self, where: str, name: str, number: float, index: int | None, colour: str) -> Iterator[Any]:
        """The token view, where it is looked at."""
        if where != "tokens" or name is None or index is None:
            yield gr.skip()
            return
        yield from _token_views(_find(self.root, name), int(number), index, colour)


def _find(root: Path, name: str) -> Run:
    """A run by the name that the page shows: nothing outside of `root` can be asked for."""
    for run in find_runs(root):
        if run.name == name:
            return run
    raise gr.Error(f"{views.esc(name)}: this run is gone; reload the page", print_exception=False)


# ------------------------------------------------------------------------------------------------------------- episodes


def _episodes_tab(root: Path) -> tuple:
    with gr.Row():
        step = gr.Slider(1, 2, step=1, label="Step", visible=False, min_width=240, elem_id="step", buttons=[])
        episode = gr.Dropdown(
            label="Episode: reward · task · how it ended", choices=[], visible=False, min_width=300, elem_id="episode"
        )
    view = gr.State("talk")
    with gr.Tabs():
        with gr.Tab("Conversation", id="talk") as talk_tab, gr.Row(elem_classes="pair"):
            talk = gr.HTML(scale=3, min_width=320, elem_id="talk")
            side = gr.HTML(scale=2, min_width=280, elem_id="side")
        with gr.Tab("Tokens", id="tokens") as tokens_tab:
            choices = [(label, name) for name, label in tokens.COLOURS.items()]
            by = gr.Radio(choices, value="advantage", label="Colour by", elem_id="by")
            token_view = gr.HTML(elem_id="tokens")
    return step, episode, talk, side, by, token_view, view, tokens_tab, talk_tab


def _episode(batch: tuple[Shown, ...], index: int) -> tuple[str, str]:
    shown = batch[index]
    group = [each for each in batch if each.group == shown.group]
    cards = views.scores(shown, [each.reward for each in group], [each.advantage for each in group])
    return views.heading(shown) + views.conversation(shown), cards + views.profile(shown)


def _token_views(run: Run, step: int, index: int, by: str) -> Iterator[str]:
    """The token view: at once with what the record holds, then, where a model is needed or quickly asked, complete."""
    try:
        record = tokens.recorded(run, step)
        if index >= len(record.episodes):
            raise Unreadable(f"{run.rollouts(step)}: holds {len(record.episodes)} episodes, not number {index}")
        episode, advantage = record.episodes[index], record.advantages[index]
        decode = tokens.decoder(run.folder, record.model)

        def view(numbers: tokens.Scored | None, note: str = "") -> str:
            scale = tokens.scale_of(by, record, numbers)
            listed = tokens.episode_tokens(episode, advantage, decode, numbers, index)
            drawn = tokens.tokens_html(listed, by, scale, len(episode.prompt_ids))
            return tokens.legend(by, scale, numbers) + note + drawn

        repeats = tokens.steps_to_repeat(run, step)
        if by in tokens.SCORED or (repeats == 0 and tokens.is_small(run)):
            more = f", after repeating {repeats} steps from the checkpoint before it" if repeats else ""
            yield view(None, views.notice(f"scoring step {step} with the weights that met it{more} ...", "wait"))
            yield view(tokens.scored(run, step))
        else:
            note = "KL and gap appear once one of them is chosen: they need a model."
            yield view(None, f'<p class="faint">{note}</p>')
    except Unreadable as error:
        yield views.notice(str(error), "error" if step in run.recorded else "empty")


# ----------------------------------------------------------------------------------------------------- base and trained


class _Opened:
    """A tab's function of the chosen run, and what it fills."""

    def __init__(self, open: Any, outputs: list):
        self.open, self.outputs = open, outputs


def _versus_tab(root: Path, run: gr.Dropdown) -> _Opened:
    summary = gr.HTML(elem_id="summary")
    scenario = gr.Dropdown(
        label="Held-out scenario: base → trained", choices=[], visible=False, min_width=300, elem_id="scenario"
    )
    wishes = gr.HTML()
    with gr.Row(elem_classes="pair"):
        base = gr.HTML(min_width=320, elem_id="base")
        trained = gr.HTML(min_width=320, elem_id="trained")

    def open_run(name: str | None) -> tuple:
        hidden = gr.update(visible=False)
        if name is None:
            return views.notice(NO_RUNS.format(root)), hidden, "", "", ""
        chosen = _find(root, name)
        try:
            before = evaluation(chosen, "before")
        except Unreadable as error:
            return views.notice(str(error), "error"), hidden, "", "", ""
        after, note = _after(chosen, len(before))
        gains = [t.score.card - b.score.card for b, t in zip(before, after)] if after else [0.0]
        first = max(range(len(gains)), key=lambda i: (gains[i], -i)) if after else most_telling(before)
        choices = [(_versus_label(before[i], after[i] if after else None), i) for i in range(len(before))]
        head = note or _versus_summary(chosen)
        return head, gr.Dropdown(choices=choices, value=first, visible=True), *open_scenario(name, first)

    def open_scenario(name: str, index: int) -> tuple[str, str, str]:
        chosen = _find(root, name)
        try:
            before = evaluation(chosen, "before")
        except Unreadable as error:
            return views.notice(str(error), "error"), "", ""
        after, _ = _after(chosen, len(before))
        sides = [("Base", before[index]), *([("Trained", after[index])] if after else [])]
        cards = [
            f'<div class="title">{title}: {each.score.card:.3f}</div>{views.conversation(each)}{views.scores(each)}'
            for title, each in sides
        ]
        return views.heading(before[index]) + views.profile(before[index], told=False), cards[0], (cards[1:] or [""])[0]

    scenario.input(open_scenario, [run, scenario], [wishes, base, trained], show_progress="hidden")
    return _Opened(open_run, [summary, scenario, wishes, base, trained])


def _after(run: Run, n: int) -> tuple[tuple[Shown, ...], str]:
    """The trained model's episodes, or none and why."""
    try:
        after = evaluation(run, "after")
    except Unreadable as error:
        there = (run.folder / "eval_after.json").exists()
        text = str(error) if there else f"{run.name} is not evaluated yet after its training: only the base is shown."
        return (), views.notice(text, "error" if there else "empty")
    return (after, "") if len(after) == n else ((), views.notice("The two evaluations hold other scenarios.", "error"))


def _versus_label(before: Shown, after: Shown | None) -> str:
    scenario, trained = before.scenario, f" → {after.score.card:.2f}" if after else ""
    task = f"{scenario.family.replace('_', ' ')} {scenario.task_id}, {scenario.request}"
    return f"{before.score.card:.2f}{trained} · {task}"


def _versus_summary(run: Run) -> str:
    import_trainer()
    from grpo.compare import compare, load_report
    from grpo.config import UsageError

    try:
        reports = [load_report(run.folder / f"eval_{which}.json") for which in ("before", "after")]
        compared = compare(reports, names=["base", "trained"])
    except UsageError as error:
        return views.notice(str(error), "error")
    base, trained = compared["rows"][-1]["models"]
    low, high = trained["delta_interval"] or (None, None)
    interval = "" if low is None else f", 95 % interval {low:+.3f} to {high:+.3f}"
    return (
        f'<div class="card versus"><span>base <span class="big">{base["mean"]:.3f}</span></span>'
        f'<span>trained <span class="big">{trained["mean"]:.3f}</span></span>'
        f'<span class="faint">mean {views.esc(compared["rubric"])} score of {compared["n"]} held-out scenarios; change '
        f"{trained['delta']:+.3f}{interval}</span></div>"
    )


# --------------------------------------------------------------------------------------------------------------- curves


def _curves_tab(root: Path) -> _Opened:
    note = gr.HTML()
    runs = gr.Dropdown(label="Runs", choices=[], multiselect=True, visible=False, elem_id="curve_runs")
    plots = []
    for i in range(0, len(curves.FIRST), 2):
        with gr.Row():
            plots += [_plot() for _ in curves.FIRST[i : i + 2]]
    metric = gr.Dropdown(label="Any other metric", choices=[], visible=False, elem_id="metric")
    meaning = gr.HTML()
    other = _plot()

    def draw(names: list[str], wanted: str | None) -> tuple:
        try:
            histories = curves.logs([_find(root, name) for name in names or []])
        except Unreadable as error:
            blank = [gr.update(visible=False)] * (len(plots) + 2)
            return views.notice(str(error), "error"), *blank, ""
        known = curves.metrics(histories)
        if not known:
            blank = [gr.update(visible=False)] * (len(plots) + 2)
            return views.notice("Choose a run that has finished a step."), *blank, ""
        rest = [name for name in known if name not in curves.FIRST]
        wanted = wanted if wanted in rest else rest[0]
        drawn = [_drawn(histories, name, name in known) for name in (*curves.FIRST, wanted)]
        about = f'<p class="faint">{views.esc(curves.meaning(wanted))}</p>'
        return "", *drawn, gr.Dropdown(choices=rest, value=wanted, visible=True), about

    def open_run(name: str | None) -> tuple:
        if name is None:
            hidden = [gr.update(visible=False)] * (len(plots) + 3)
            return hidden[0], views.notice(NO_RUNS.format(root)), *hidden[1:], ""
        names = [each.name for each in find_runs(root)]
        return gr.Dropdown(choices=names, value=[name], visible=True), *draw([name], "loss")

    drawn = [note, *plots, other, metric, meaning]
    for changed in (runs, metric):
        changed.input(draw, [runs, metric], drawn, show_progress="hidden")
    return _Opened(open_run, [runs, *drawn])


def _plot() -> gr.LinePlot:
    return gr.LinePlot(x="step", y="value", color="run", height=230, visible=False, min_width=320, buttons=[])


def _drawn(histories: dict[str, list[dict]], metric: str, known: bool) -> Any:
    if not known:
        return gr.update(visible=False)
    # One name of a colour for each run: Okabe and Ito's, as in the PNG files.
    from grpo.plots import MODEL_COLOURS

    colours = dict(zip(histories, MODEL_COLOURS[1:] * (1 + len(histories))))
    return gr.LinePlot(
        curves.table(histories, metric), title=metric, x="step", y="value", color="run", color_map=colours,
        colors_in_legend=list(colours) if len(colours) > 1 else [], y_title=" ", x_title="step", visible=True,
    )  # fmt: skip
