"""The page of a run in a real browser. They need Chromium."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.report_runs import HOSTILE, served, write_run
from hybridflow.cli.inspect.report import write_report
from hybridflow.runtime.observe import JsonlWriter, TraceEvent, trace_row
from hybridflow.runtime.observe.metrics import METRICS
from hybridflow.runtime.observe.run_files import RunFiles

pytestmark = pytest.mark.browser

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
TABS = ("overview", "curves", "rollouts", "timeline", "configuration", "events")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the files `one`, `two` (two runs over each other) and `hostile`."""
    directory = tmp_path_factory.mktemp("pages")
    first = write_run(directory / "first", steps=40)
    write_first_looks(first)
    second = write_run(directory / "second", steps=30, seed=1)
    (first / "recoveries.jsonl").write_text('{"step": 3, "action": "restart", "error": "a worker died"}\n')
    hostile = write_run(directory / "<i>hostile", steps=3, texts=list(HOSTILE.values()))
    files = {}
    for name, runs in {"one": [first], "two": [first, second], "hostile": [hostile]}.items():
        files[name] = directory / f"{name}.html"
        write_report([RunFiles(run) for run in runs], files[name])
    return files


def write_first_looks(run: Path) -> None:
    """Add to a run what its overview opens with: validations, cut responses, and a trace."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"response_length/mean": 9.5, "response_length/clip_ratio": 0.9}
        if row["step"] % 10 == 0:
            row |= {"val/accuracy": row["step"] / 50, "val/accuracy/ci95": 0.05}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    trace = JsonlWriter(run / "trace" / "calls.jsonl")
    for step in (38, 39, 40):
        spans = {"generate_sequences": (0.0, 0.51), "score": (0.53, 0.86), "update_actor": (0.86, 0.992)}
        calls = [
            TraceEvent("call", f"Worker.{name}", "actor/0", "vm", step + start, step + end, process="actor/0")
            for name, (start, end) in spans.items()
        ]
        events = [*calls, TraceEvent("step", "", "controller", "", step, step + 1.0)]
        trace.write_all({"step": step, **trace_row(event)} for event in events)
    trace.close()


def rows_of(page):
    cells = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    return page.locator("#responses tbody tr").evaluate_all(cells)


def expect(locator):
    from playwright.sync_api import expect

    return expect(locator)


def show(page, tab):
    page.click(f"#tab-{tab}")
    page.wait_for_selector(f"#tab-{tab}[aria-selected=true]")


def wait_until(page, expression):
    """Wait until an expression is true; the page's policy forbids `page.wait_for_function`."""
    for _ in range(300):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"{expression} is not true after 30 s")


@pytest.mark.parametrize("name", ["grpo", "episodes"])
def test_every_part_of_a_trained_run_opens(name, open_page, request, tmp_path):
    run = request.getfixturevalue(f"{name}_run")
    write_report([RunFiles(run)], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert page.inner_text("h1") == run.name
    for tab in TABS:
        show(page, tab)
        assert page.locator("main").inner_text().strip()
    show(page, "curves")
    page.wait_for_selector(".chart canvas")
    page.fill("input[type=search]", "timing_s/step")
    expect(page.locator(".chart")).to_have_count(1)
    show(page, "rollouts")
    page.locator("#responses td.response .link").first.click()
    page.locator(".side.own .token").nth(1).click()
    assert "token 2, id" in page.locator(".side.own [role=status]").inner_text()


def test_the_overview_opens_with_figures_curves_times_and_samples(open_page, pages):
    page = open_page(pages["one"])
    figures = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    assert figures["step"] == "40 / 40"
    assert (figures["val accuracy"], figures["s/step"]) == ("0.8", "1.5")
    charts = page.locator(".chart:has(.plot)")
    assert [title.split("\n")[0].rstrip("?").strip() for title in charts.locator("h2").all_inner_texts()] == [
        *("reward", "response length", "val accuracy", "response_length/clip_ratio")
    ]
    expect(charts.nth(2).locator("canvas")).to_have_count(1)
    assert "0.8 ± 0.05" in charts.nth(2).inner_text()
    advised = page.locator(".chart:has(.advice)")
    assert "data.max_response_length" in advised.inner_text()
    assert advised.locator(".plot").get_attribute("data-metric") == "response_length/clip_ratio"
    charts.nth(2).locator(".meaning button").focus()
    assert METRICS["val/accuracy"].description in charts.nth(2).locator("[role=tooltip]").inner_text()
    page.keyboard.press("Escape")
    expect(charts.nth(2).locator("[role=tooltip]")).not_to_be_visible()
    stages = page.locator(".split [role=img]").get_attribute("aria-label")
    assert stages == "gen 51.0%, reward 33.0%, update_actor 13.2%, controller 2.8%"
    best, worst, cut = page.locator(".sample").all()
    assert "question the answer is" in best.inner_text()
    assert [each.locator("h3").inner_text().split("score")[0].strip() for each in (best, worst, cut)] == [
        *("best", "worst", "cut")
    ]
    best.locator("button").click()
    page.wait_for_selector(".side.own .token")


def test_responses_are_filtered_and_sorted(open_page, pages):
    page = open_page(pages["one"])
    show(page, "events")
    assert "a worker died" in page.inner_text("main")
    show(page, "rollouts")
    assert page.inner_text("#count") == "320 of 320 responses"
    page.get_by_label("steps, as 10 or 10-20").fill("3-4")
    expect(page.locator("#count")).to_have_text("16 of 320 responses")
    page.get_by_label("data source").select_option(label="code")
    expect(page.locator("#count")).to_have_text("8 of 320 responses")
    page.click('[data-sort="score"]')
    scores = [float(row[2]) for row in rows_of(page)]
    assert scores == sorted(scores, reverse=True)
    page.click('[data-sort="score"]')
    assert [float(row[2]) for row in rows_of(page)] == scores[::-1]
    assert page.get_attribute("th[aria-sort]", "aria-sort") == "ascending"
    page.click("text=clear")
    page.fill("#search", "answer is 3")
    expect(page.locator("#count")).to_have_text("16 of 320 responses")
    page.click("text=clear")
    assert rows_of(page)[0][5].startswith("question the answer is")  # a sample has the text of the prompt
    page.click("#next")
    assert "page 2 of 7" in page.inner_text(".pager")
    prompt = rows_of(page)[0][5]  # a prompt is followed over the steps
    page.locator("#responses tbody td:not(.response) .link").first.click()
    expect(page.locator("#count")).not_to_contain_text("320 of")
    rows = rows_of(page)
    assert {row[5] for row in rows} == {prompt}
    assert [int(row[0]) for row in rows] == sorted(int(row[0]) for row in rows)


def test_a_response_opens_token_by_token(open_page, pages):
    page = open_page(pages["one"])
    show(page, "rollouts")
    page.fill("#search", "answer is 3")
    expect(page.locator("#count")).to_contain_text("16 of")
    page.locator("#responses td.response .link").last.click()
    assert "question the answer is 3" in page.inner_text("main")
    page.locator(".side.own .token").nth(1).click()
    details = page.locator(".side.own [role=status]")
    assert "not trained (mask)" in details.inner_text()
    page.keyboard.press("ArrowRight")
    assert details.inner_text().startswith("token 3, id 2")
    before = page.locator(".side.own .token").first.get_attribute("style")
    page.get_by_label("color of tokens").select_option("mismatch")
    assert page.locator(".side.own .token").first.get_attribute("style") != before
    assert page.locator(".side").count() > 1
    page.keyboard.press("Escape")
    page.wait_for_selector("#responses")


def test_the_address_names_what_is_shown(open_page, pages):
    page = open_page(pages["two"])
    show(page, "rollouts")
    page.get_by_label("run", exact=True).select_option(label="second")
    page.locator("#responses td.response .link").first.click()
    address, title = page.url, page.inner_text("main h2")
    assert address.endswith(
        f"#rollouts/1/{'/'.join(word for word in title.replace(',', '').split() if word.isdigit())}"
    )
    page.go_back()
    page.wait_for_selector("#responses")
    page.go_back()
    page.wait_for_selector("#tab-overview[aria-selected=true]")
    page.goto(f"{pages['two'].as_uri()}#timeline")
    page.wait_for_selector("#tab-timeline[aria-selected=true]")
    page.goto(address)
    expect(page.locator("main h2").first).to_have_text(title)


def test_two_runs_are_compared(open_page, pages):
    page = open_page(pages["two"])
    assert page.inner_text("h1") == "first · second"
    show(page, "curves")
    page.wait_for_selector(".chart canvas")
    legend = page.locator(".chart").first.inner_text()
    assert "first" in legend
    assert "second" in legend
    show(page, "configuration")
    text = page.inner_text("main")
    assert "trainer.seed" in text
    assert "actor.optimizer.lr" not in text.partition("Starts")[0]
    show(page, "rollouts")
    page.get_by_label("run", exact=True).select_option(label="second")
    assert page.inner_text("#count") == "240 of 240 responses"


def test_the_keyboard_suffices(open_page, pages):
    page = open_page(pages["one"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-rollouts"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("answer is 5")
    expect(page.locator("#count")).to_contain_text("16 of")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#responses td.response') !== null"):
            break
    page.keyboard.press("Enter")
    page.wait_for_selector("#back")
    assert page.evaluate("document.activeElement.id") == "back"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.i") == "0"
    page.focus("#back")
    page.keyboard.press("Enter")
    page.wait_for_selector("#responses")


def test_a_narrow_screen_has_cards_and_scrolls_in_one_direction_only(open_page, pages):
    page = open_page(pages["two"], NARROW, "dark")
    for tab in TABS:
        show(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], tab
        for box in page.locator(".scroll:has(table)").all():
            assert box.evaluate("box => box.scrollWidth <= box.clientWidth"), tab
    show(page, "rollouts")
    page.locator("#responses td.response .link").last.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_hostile_texts_are_shown_as_texts(open_page, pages):
    page = open_page(pages["hostile"])
    assert page.inner_text("h1") == "<i>hostile"
    for tab in TABS:
        show(page, tab)
    show(page, "rollouts")
    shown = ""
    count = page.locator("#responses td.response .link").count()
    for i in range(count):
        page.locator("#responses td.response .link").nth(i).click()
        shown += page.locator("main").evaluate("main => main.textContent.slice(0, 20000)")
        page.click("#back")
    for text in ("<script>window.ran = 'script'</script><img src=x", "␀", "␛[31m", "\\u{202e}gnp.exe", "{{constructor"):
        assert text in shown
    assert page.evaluate("window.ran") is None
    assert page.locator("main img, main script, main i:not(.scale i)").count() == 0


@pytest.mark.parametrize(
    ("scheme", "viewport"), [("light", WIDE), pytest.param("dark", NARROW, marks=pytest.mark.exhaustive)]
)
def test_axe_finds_nothing(open_page, pages, axe, scheme, viewport):
    page = open_page(pages["two"], viewport, scheme)
    for tab in TABS:
        show(page, tab)
        page.wait_for_timeout(300)
        assert axe(page) == [], tab
    show(page, "rollouts")
    page.locator("#responses td.response .link").last.click()
    assert axe(page) == []


def test_metrics_with_names_of_javascript_are_drawn(open_page, tmp_path):
    runs = [write_run(tmp_path / name, steps=3) for name in ("first", "second")]
    rows = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    names = {"constructor": 1.0, "__proto__": 2.0, "toString": 3.0}
    (runs[0] / "metrics.jsonl").write_text("".join(f"{json.dumps(row | names)}\n" for row in rows))
    write_report([RunFiles(run) for run in runs], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    show(page, "curves")
    expect(page.locator(".chart")).to_have_count(len(rows[0] | names) - 1)
    expect(page.locator(".chart canvas")).to_have_count(len(rows[0] | names) - 1)


def test_a_chosen_part_of_a_curve_is_kept_and_colors_follow_the_scheme(open_page, pages):
    page = open_page(pages["one"])
    page.evaluate(
        "() => { const draw = drawPlot; window.plots = []; drawPlot = (...of) => plots[plots.push(draw(...of)) - 1]; }"
    )
    show(page, "curves")
    page.fill("input[type=search]", "timing_s/step")
    expect(page.locator(".chart canvas")).to_have_count(1)

    def of_newest(expression):
        return page.evaluate(f"() => (plot => {expression})(plots.at(-1))")

    assert of_newest("plot.scales.x.max") == 40
    box = page.locator(".chart .u-over").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 4, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=5)
    page.mouse.up()
    chosen, drawn = of_newest("[plot.scales.x.min, plot.scales.x.max]"), page.evaluate("plots.length")
    assert chosen == pytest.approx([10.75, 20.5], abs=1)
    page.get_by_label("smoothing").fill("0.5")
    wait_until(page, f"plots.length > {drawn}")
    assert of_newest("[plot.scales.x.min, plot.scales.x.max]") == pytest.approx(chosen, abs=0.1)
    light, drawn = of_newest("plot.axes[0].stroke()"), page.evaluate("plots.length")
    page.emulate_media(color_scheme="dark")
    wait_until(page, f"plots.length > {drawn}")
    assert of_newest("plot.axes[0].stroke()") != light
    assert page.evaluate("drawn.length") == 1  # those before are destroyed


def test_axes_have_round_numbers_and_a_constant_is_in_the_middle(open_page, pages):
    page = open_page(pages["one"])
    assert page.evaluate("rangeOfValues(null, 5, 5)") == [4.5, 5.5]
    assert page.evaluate("rangeOfValues(null, 0, 0)") == [-1, 1]
    assert page.evaluate("rangeOfValues(null, null, null)") == [0, 1]
    assert page.evaluate("[0.30000000000000004, 1000000, 1e-7].map(formatNumber)") == ["0.3", "1000000", "1.00e-7"]


@pytest.fixture
def live(tmp_path):
    """Return a run of three steps and a server of its page."""
    run = write_run(tmp_path / "run", steps=3)
    with served(run) as server:
        yield run, server


def test_an_error_of_drawing_does_not_end_a_live_page(open_page, live):
    run, server = live
    page = open_page(server.address)
    expect(page.locator("#state")).to_have_text("live: step 3, finished")
    page.evaluate(
        "() => { window.addEventListener('unhandledrejection', (event) => event.preventDefault());"
        "  const draw = show; show = () => { show = draw; throw new Error('drawing'); }; }"
    )
    append_step(run, 4)
    wait_until(page, "runs[0].curves.steps.at(-1) === 4")
    append_step(run, 5)
    expect(page.locator("#state")).to_have_text("live: step 5, finished")
    page.close()


def test_a_step_between_the_page_and_its_first_data_is_shown(open_page, live):
    run, server = live
    make = server.page

    def page_before_a_step():
        page = make()
        append_step(run, 4)
        return page

    server.page = page_before_a_step
    page = open_page(server.address)
    expect(page.locator("#state")).to_have_text("live: step 4, finished")
    show(page, "rollouts")
    expect(page.locator("#count")).to_have_text("26 of 26 responses")
    page.close()


@pytest.mark.own_run("grpo: starts `hybridflow watch`")
def test_a_live_page_follows_the_run(open_page, tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    command = [sys.executable, "-m", "hybridflow", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            page = open_page(address)
            expect(page.locator("#state")).to_have_text("live: step 3, finished")
            show(page, "rollouts")
            append_step(run, 4)
            expect(page.locator("#state")).to_have_text("live: step 4, finished")
            expect(page.locator("#count")).to_have_text("26 of 26 responses")
            with open(run / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                append_step(run, 5, ("rollouts",))  # its metrics are written later
                expect(page.locator("#state")).to_have_text("live: step 4, running")
                show(page, "rollouts")
                expect(page.locator("#count")).to_have_text("26 of 26 responses")
                append_step(run, 5, ("metrics",))
                expect(page.locator("#state")).to_have_text("live: step 5, running")
                expect(page.locator("#count")).to_have_text("28 of 28 responses")
                show(page, "configuration")
                page.click("summary")
                append_step(run, 6)
                expect(page.locator("#state")).to_have_text("live: step 6, running")
                assert page.evaluate("document.querySelector('details').open")
                show(page, "rollouts")
                page.locator("#responses td.response .link").first.click()
                title = page.inner_text("main h2")
                samples = (run / "samples.jsonl").read_text().splitlines(keepends=True)
                (run / "samples.jsonl").write_text("".join(samples[2:]))  # newer responses replace it
                append_step(run, 7)
                expect(page.locator("#state")).to_have_text("live: step 7, running")
                page.get_by_label("color of tokens").select_option("mismatch")
                assert page.inner_text("main h2") == title
            expect(page.locator("#state")).to_have_text("live: step 7, finished")
        finally:
            server.terminate()
        assert server.wait(30) == 0


def append_step(run: Path, step: int, names: tuple[str, ...] = ("rollouts", "metrics")) -> None:
    """Append a step with two responses to files of a run."""
    rows = {"rollouts": {"score": [1.0, 0.0], "length": [3, 4]}, "metrics": {"critic/score/mean": 0.5}}
    for name in names:
        row = rows[name]
        with open(run / f"{name}.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")
