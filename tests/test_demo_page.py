"""The demo's page in a real browser: what it shows, that hostile text stays text, narrow screens, dark and light."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytest.importorskip("gradio", reason='the page needs gradio: pip install -e ".[demo]"')
sync_api = pytest.importorskip("playwright.sync_api", reason='drives the browser: pip install -e ".[demo-test]"')

from demo import views  # noqa: E402
from demo.runs import most_telling, open_run, step_episodes  # noqa: E402
from tests.find_browser import find  # noqa: E402
from tests.test_demo import HOSTILE, SHORT, row_of  # noqa: E402
from tests.test_resume import quick, start  # noqa: E402, F401 (quick is a fixture)

BROWSER = find()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: `make test-demo` installs it")

SCORED = "#tokens .tok[data-tip*='KL to the base']"  # unasked, as these steps are right behind a checkpoint
WAIT = 60_000  # milliseconds: a busy machine
TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def served(runs, *flags):
    """`python -m demo` over `runs`: (address, process)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "demo", "--runs", str(runs), "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, process.stdout.read()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address, timeout=5).read()
                break
            time.sleep(0.05)
        yield address, process
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(process):
    """What a process has computed so far: unlike the clock, no matter what else the machine does."""
    fields = open(f"/proc/{process.pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with everything, and a newer one whose every text is hostile."""
    root = tmp_path_factory.mktemp("runs")
    assert start(root / "short", **SHORT) == 0
    return root


@pytest.fixture(scope="module")
def site(runs):
    with served(runs) as (address, _):
        yield address


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Root has no sandbox, and CI is root.
        yield playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])


@contextlib.contextmanager
def opened(browser, address, width=1280, scheme="light", wait="#talk .msg"):
    """The page in a window of its own. At the end: nothing was asked of anybody else, and no script failed."""
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    foreign, failed = [], []
    page.on("request", lambda request: foreign.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(address)
    page.wait_for_selector(wait)
    yield page
    assert page.evaluate("window.hacked") is None
    context.close()
    assert not failed
    assert [url for url in foreign if not url.startswith((address, "data:", "blob:"))] == []


def tab(page, name):
    page.get_by_role("tab", name=name, exact=True).click()


def go_to_step(page, run, step):
    page.fill("#step input[type=number]", str(step))
    page.press("#step input[type=number]", "Enter")
    batch = step_episodes(run, step)
    label = views.label(batch[most_telling(batch)])
    page.wait_for_function("(label) => document.querySelector('#episode input').value === label", arg=label)


def choose(page, box, text):
    """The first entry of a dropdown that holds `text`."""
    page.click(f"#{box} input")
    page.locator(f"#{box} [role=option], [role=option]").filter(has_text=text).first.click()


OVERFLOW = """() => {
  const width = document.documentElement.clientWidth, out = [];
  if (document.documentElement.scrollWidth > width) out.push("the page scrolls sideways");
  for (const e of document.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || box.right <= width + 1) continue;
    let clipped = false;
    for (let a = e.parentElement; a && a !== document.body; a = a.parentElement)
      clipped ||= getComputedStyle(a).overflowX !== "visible";
    if (!clipped) out.push(`${e.tagName}.${e.className} ends at ${Math.round(box.right)} of ${width}`);
  }
  return out.slice(0, 5);
}"""

# WCAG's contrast of each text of ours with what lies behind it, translucent layers blended.
CONTRAST = """() => {
  const parse = (text) => {
    const n = text.match(/[\\d.]+/g).map(Number);
    const unit = text.startsWith("color(srgb") ? 255 : 1;
    return [n[0] * unit, n[1] * unit, n[2] * unit, n[3] ?? 1];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const out = [];
  const ours = ".talk *, .card *, .heading, .legend *, .tokens .tok, .notice, .faint, #title *";
  for (const e of document.querySelectorAll(ours)) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length) continue;
    const layers = [];
    for (let a = e; a; a = a.parentElement) layers.push(parse(getComputedStyle(a).backgroundColor));
    let back = [255, 255, 255, 1];
    for (const layer of layers.reverse()) back = over(layer, back);
    const front = over(parse(getComputedStyle(e).color), back);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    out.push([(a + 0.05) / (b + 0.05), `${e.className || e.tagName}: ${e.textContent.slice(0, 30)}`]);
  }
  return out;
}"""


def check_readable(page):
    assert page.evaluate(OVERFLOW) == []
    found = page.evaluate(CONTRAST)
    assert found and min(found)[0] >= 4.5, sorted(found)[:5]


# ------------------------------------------------------------------------------------------------------------- replays


def test_the_first_screen_is_there_at_once(runs, browser):
    """Start and page compute little beside what importing gradio costs, which nobody can spare. Measured as computing
    time, and against that on the same machine: other work and a slow processor change the ratio little."""
    with served(runs) as (address, process):
        with opened(browser, address) as page:
            spent = cpu_seconds(process)
            assert "short" in page.input_value("#run input")
            assert page.locator("#side .big").first.inner_text()
            assert "Hidden profile" in page.inner_text("#side") and "In its group" in page.inner_text("#side")
            milliseconds = page.evaluate("performance.now()")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import gradio"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    importing = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"computing until the page was there: {spent:.2f} s, of which gradio's import {importing:.2f} s; ", end="")
    print(f"page load {milliseconds / 1000:.2f} s")
    assert spent < 2 * importing


def test_steps_and_episodes_can_be_chosen(site, browser, runs):
    rows = [json.loads(line) for line in open_run(runs / "short").completions(3).read_text().splitlines()]
    with opened(browser, site) as page:
        go_to_step(page, open_run(runs / "short"), 3)
        for row in (rows[0], rows[4]):
            choose(page, "episode", f"group {row['group']}.{row['member']}")
            request = row["conversation"][0]["content"].split("\n")[0].removeprefix("Request: ")
            page.wait_for_selector(f'#talk .msg.user >> text="{request}"')
            page.wait_for_selector(f'#side >> text="{row["reward"]:+.3f}"')
            for value in row["hidden_profile"].values():
                assert str(value) in page.inner_text("#side")


def test_tokens_have_colours_and_numbers(site, browser, runs):
    with opened(browser, site) as page:
        go_to_step(page, open_run(runs / "short"), 3)
        tab(page, "Tokens")
        page.wait_for_selector(SCORED, state="attached")
        for label, by in (("who wrote it", "mask"), ("KL to the reference", "kl"), ("sampler-trainer gap", "gap")):
            page.get_by_label(label).click()
            page.wait_for_selector(f"#tokens .tokens[data-by={by}]")
            page.wait_for_selector("#tokens .tok.trained[style*=rgba]")
            assert page.locator("#tokens .tok:not(.trained)[style]").count() == 0
        token = page.locator("#tokens .tok.trained").nth(3)
        token.hover()
        page.wait_for_selector("#tip", state="visible")
        shown = page.inner_text("#tip")
        for what in ("id ", "advantage", "sampler log-prob", "trainer log-prob", "base log-prob", "KL to", "nats"):
            assert what in shown
        assert shown == token.get_attribute("data-tip")
        hostile = page.locator("#tokens .tok.trained").nth(5)  # whatever a token spells, its box holds text
        hostile.evaluate("(token, text) => { token.dataset.tip = text }", HOSTILE)
        hostile.hover()
        page.wait_for_function("(text) => document.querySelector('#tip').innerText === text", arg=HOSTILE)


def test_base_and_trained_stand_side_by_side(site, browser, runs):
    reports = [json.loads((runs / "short" / f"eval_{w}.json").read_text()) for w in ("before", "after")]
    with opened(browser, site) as page:
        tab(page, "Compare")
        page.wait_for_selector("#trained .msg")
        for report in reports:
            assert f"{report['avg_score']:.3f}" in page.inner_text("#summary")
        row = 4
        choose(page, "scenario", reports[0]["episodes"][row]["request"])
        for side, report in zip(("base", "trained"), reports, strict=True):
            page.wait_for_selector(f"#{side} .msg >> text={report['episodes'][row]['request']}")
            score = report["episodes"][row]["scores"]["card"]
            page.wait_for_selector(f'#{side} .big >> text="{score:.3f}"')


def test_curves_are_drawn(site, browser):
    with opened(browser, site) as page:
        tab(page, "Curves")
        page.wait_for_selector("text=Loss of the step")
        page.wait_for_function("document.querySelectorAll('svg.marks, canvas.marks').length >= 5")
        choose(page, "metric", "grad_norm")
        page.wait_for_selector("text=Global gradient norm")


# ---------------------------------------------------------------------------------------------------------- live chats


def test_a_person_is_the_agent_and_gets_a_score(site, browser):
    with opened(browser, site) as page:
        tab(page, "Live chat")
        page.wait_for_selector("#agent_talk .msg")
        page.fill("#question textarea, #question input", HOSTILE)
        page.click("#ask")
        page.wait_for_selector("#agent_talk .msg.agent")
        assert "<script>hacked=1</script>" in page.inner_text("#agent_talk")
        page.fill("#field0 textarea, #field0 input", HOSTILE)
        page.click("#propose")
        page.wait_for_selector("#result .big")
        page.wait_for_selector("#rival .big")  # the model's own try
        assert "Hidden profile" in page.inner_text("#result")
        assert not page.locator("#ask").is_visible() and not page.locator("#propose").is_visible()
        page.click("#new")
        page.wait_for_selector("#ask", state="visible")
        assert page.locator("#agent_talk .msg").count() == 1


def test_a_person_is_the_user_and_waits_under_two_seconds(site, browser):
    """The fastest of some turns, as the machine may be busy with something else."""
    seconds = []
    with opened(browser, site) as page:
        tab(page, "Live chat")
        page.get_by_label("the user: a model asks me").click()
        for _ in range(8):
            page.fill("#request textarea, #request input", f"Set up a {HOSTILE} celebration.")
            asked = page.locator("#user_talk .msg.agent").count()
            began = time.perf_counter()
            page.click("#start")
            page.wait_for_function("document.querySelector('#user_talk .ending')")
            page.wait_for_timeout(300)
            if page.locator("#answer").is_visible():
                asked = page.locator("#user_talk .msg.agent").count()
                page.fill("#answer textarea, #answer input", f"next week {HOSTILE}")
                began = time.perf_counter()
                page.click("#send")
                page.wait_for_function(
                    "(n) => document.querySelectorAll('#user_talk .msg.agent').length > n", arg=asked
                )
                seconds.append(time.perf_counter() - began)
                assert "next week <script>hacked=1</script>" in page.inner_text("#user_talk")
                break
    assert seconds and min(seconds) < 2, seconds
    print(f"a live turn: {min(seconds):.2f} s")


# ------------------------------------------------------------------------------------------------------- hostile, empty


def test_hostile_runs_show_their_text(tmp_path, browser):
    from scenarios.generator import generate

    scenario = generate(7, "hard", "event_planning").model_copy(update={"request": HOSTILE})
    run = tmp_path / "runs" / "<img src=x onerror=hacked=1>"
    (run / "completions").mkdir(parents=True)
    row = row_of(scenario, [(HOSTILE, "Invalid turn: no tool call.")], stop_reason="context_full")
    (run / "completions" / "step_00001.jsonl").write_text(json.dumps(row))
    (run / "eval_before.json").write_text("{")
    (run / "log_history.json").write_text("{")
    with served(tmp_path / "runs") as (address, _), opened(browser, address) as page:
        assert page.inner_text("#talk").count(HOSTILE) == 2
        tab(page, "Tokens")
        page.wait_for_selector("text=The tokens of step 1 were not kept")
        tab(page, "Compare")
        page.wait_for_selector("text=eval_before.json: damaged, not JSON")
        tab(page, "Curves")
        page.wait_for_selector("text=log_history.json: not a log history")


def test_without_runs_the_live_chat_is_what_one_sees(tmp_path, browser):
    with served(tmp_path) as (address, _), opened(browser, address, wait="#question") as page:
        page.wait_for_selector("#agent_talk .msg")
        assert not page.locator("#run").is_visible()
        for name in ("Episodes", "Compare", "Curves"):
            tab(page, name)
            page.wait_for_selector("text=`make train` makes one >> visible=true")


def test_a_model_that_cannot_be_loaded_says_why(tmp_path, browser):
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with served(tmp_path, "--model", str(broken)) as (address, _), opened(browser, address, wait="#question") as page:
        page.get_by_label("the user: a model asks me").click()
        page.click("#start")
        page.wait_for_selector(f"text=--model {broken}")


# -------------------------------------------------------------------------------------------------------------- looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_everything_fits_and_can_be_read(site, browser, width, scheme):
    with opened(browser, site, width, scheme) as page:
        check_readable(page)
        # Side by side where there is room, else one below the other.
        talk, side = (page.locator(box).bounding_box() for box in ("#talk", "#side"))
        assert min(talk["width"], side["width"]) > 300 and (side["y"] > talk["y"] + talk["height"] / 2) == (width < 700)
        tab(page, "Tokens")
        page.wait_for_selector(SCORED, state="attached")
        check_readable(page)
        page.locator("#tokens .tok.trained").last.scroll_into_view_if_needed()
        page.wait_for_timeout(500)  # scrolling hides the box
        page.locator("#tokens .tok.trained").last.click()
        page.wait_for_selector("#tip", state="visible")
        check_readable(page)
        tab(page, "Compare")
        page.wait_for_selector("#trained .msg")
        check_readable(page)
        tab(page, "Curves")
        page.wait_for_function("document.querySelectorAll('svg.marks, canvas.marks').length >= 5")
        check_readable(page)
        tab(page, "Live chat")
        page.wait_for_selector("#agent_talk .msg")
        check_readable(page)
        page.fill("#question textarea, #question input", "x" * 400)
        page.click("#ask")
        page.wait_for_selector("#agent_talk .msg.agent")
        page.fill("#field0 textarea, #field0 input", "y" * 400)
        page.click("#propose")
        page.wait_for_selector("#rival .big")
        check_readable(page)


def test_it_says_where_it_listens(runs):
    with served(runs) as (address, process):
        first = process.stdout.readline()
        process.terminate()
        rest = process.stdout.read()
    assert first == f"runs of {runs} at {address}. Ctrl-C ends it.\n" and "Running on" not in rest
