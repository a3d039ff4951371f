"""The page of a load in a browser: it draws, it answers to mouse and keys, it can be read."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megamind_ray.core.timeline import Mark, Sample, Span, Timeline
from megamind_ray.report.timeline_html import render
from megamind_ray.testing.timelines import made_up_load
from megamind_ray.units import MIB, format_bytes, format_duration, format_rate

pytestmark = pytest.mark.browser

# Colours of the plot by how often they occur, the most frequent one (the background) first.
COLOURS = """() => {
  const plot = document.getElementById("plot");
  const copy = new OffscreenCanvas(plot.width, plot.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(plot, 0, 0);
  const pixels = copy.getImageData(0, 0, plot.width, plot.height).data;
  const counts = new Map();
  for (let at = 0; at < pixels.length; at += 4) {
    const colour = `${pixels[at]},${pixels[at + 1]},${pixels[at + 2]}`;
    counts.set(colour, (counts.get(colour) ?? 0) + 1);
  }
  return [...counts.entries()].sort((a, b) => b[1] - a[1]);
}"""

# Each piece of text that is shown, its contrast against what is behind it.
CONTRASTS = """() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (colour !== "transparent" && !colour.endsWith(", 0)")) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((part) => part.nodeType === 3).map((part) => part.data.trim()).join("");
    if (!text || !node.checkVisibility() || node.matches("script, style")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
    found.push([text.slice(0, 60), (a + 0.05) / (b + 0.05)]);
  }
  return found;
}"""


def one_span() -> str:
    """A page on which it is known what is where: ``rank 0`` copies from 0.25 s to 0.75 s of 1 s."""
    spans = [
        Span(track="planner", kind="plan", begin_s=0, end_s=1, label="plan"),
        Span(track="rank 0", kind="copy", begin_s=0.25, end_s=0.75, nbytes=12 * MIB, label="block <b>7</b>"),
    ]
    samples = [Sample(series="bytes rank 0/device", at_s=0.5, value=12 * MIB)]
    timeline = Timeline.of("measured", spans, samples, marks=[Mark(at_s=0.6, kind="worker_lost", text="rank 3 & all")])
    return render(made_up_load(num_extents=4).report, [timeline])


def over(opened: Any, label: str, share: float) -> tuple[float, float]:
    """A point in the row with that label, at that share of the plot's width."""
    row = opened.page.locator("#labels .row", has=opened.page.get_by_text(label, exact=True)).first.bounding_box()
    plot = opened.page.locator("#plot").bounding_box()
    return plot["x"] + share * plot["width"], row["y"] + row["height"] / 2


def range_of(opened: Any) -> str:
    opened.settle()
    return str(opened.page.locator("#range").text_content())


def tip_of(opened: Any) -> str:
    return str(opened.page.locator("#tip").inner_text()) if opened.page.locator("#tip").is_visible() else ""


def is_drawn(opened: Any, at_least: int = 4) -> bool:
    """Whether the plot has several colours, each on more than a few pixels."""
    opened.settle()
    counts = opened.page.evaluate(COLOURS)
    return sum(count > 50 for _, count in counts) >= at_least


def test_a_load_is_drawn_without_any_trouble(open_page: Callable[..., Any]) -> None:
    load = made_up_load()

    opened = open_page("measured", render(load.report, [load.timeline]))

    opened.picture("measured")
    assert is_drawn(opened)
    assert opened.troubles == []


def test_a_span_is_drawn_in_its_row_and_at_its_time(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())

    inside = [opened.colour_at(*over(opened, "rank 0", share)) for share in (0.30, 0.45, 0.70)]
    outside = [opened.colour_at(*over(opened, "rank 0", share)) for share in (0.18, 0.80)]

    assert inside == [(20, 102, 58)] * 3, "the colour of copies in the light scheme"
    assert outside == [(255, 255, 255)] * 2


def test_measured_and_predicted_are_drawn_together_or_alone(open_page: Callable[..., Any]) -> None:
    load, predicted = made_up_load(), made_up_load(origin="predicted")
    opened = open_page("both", render(load.report, [load.timeline, predicted.timeline]))
    opened.picture("both")
    together = opened.page.evaluate(COLOURS)

    opened.page.get_by_role("button", name="predicted", exact=True).click()

    opened.picture("predicted")
    assert is_drawn(opened)
    assert opened.page.evaluate(COLOURS) != together
    assert opened.page.get_by_role("button", name="predicted", exact=True).get_attribute("aria-pressed") == "true"
    assert opened.page.get_by_role("button", name="both").get_attribute("aria-pressed") == "false"
    assert opened.troubles == []


def test_twenty_thousand_spans_are_drawn_and_can_be_zoomed(open_page: Callable[..., Any]) -> None:
    rng = random.Random(1)
    spans = []
    for i in range(24_000):
        begin_s = rng.uniform(0, 60)
        name, kind = (f"rank {i % 160}", "copy") if i % 3 else (f"n{i % 20}/storage", "read")
        spans.append(
            Span(track=name, kind=kind, begin_s=begin_s, end_s=begin_s + rng.expovariate(20), nbytes=8 * MIB)  # type: ignore[arg-type]
        )
    opened = open_page("many", render(made_up_load().report, [Timeline.of("measured", spans)]))
    before = range_of(opened)
    opened.picture("many")

    opened.page.keyboard.press("+")

    assert range_of(opened) != before
    assert is_drawn(opened)
    assert opened.troubles == []


def test_merged_spans_say_how_many_they_are(open_page: Callable[..., Any]) -> None:
    spans = (
        Span(track="rank 0", kind="copy", begin_s=i * 1e-3, end_s=(i + 0.5) * 1e-3, nbytes=1000) for i in range(1000)
    )
    opened = open_page("merged", render(made_up_load().report, [Timeline.of("measured", spans)], max_spans=10))

    opened.page.mouse.move(*over(opened, "rank 0", 0.5))

    tip = tip_of(opened)
    opened.picture("merged")
    assert "spans, busy 50%" in tip


def test_hovering_shows_the_exact_figures_of_a_span(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())

    opened.page.mouse.move(*over(opened, "rank 0", 0.5))

    tip = tip_of(opened)
    opened.picture("tooltip")
    assert tip.startswith("copy: block <b>7</b>")
    for figure in (
        "rank 0",
        f"{format_bytes(12 * MIB)} (12,582,912)",
        format_duration(0.5),
        format_rate(24 * MIB),
        "0.250000 s",
        "0.750000 s",
    ):
        assert figure in tip
    assert opened.troubles == []


def test_hovering_where_nothing_was_done_shows_nothing(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())

    opened.page.mouse.move(*over(opened, "rank 0", 0.1))

    assert tip_of(opened) == ""


def test_hovering_over_a_curve_shows_its_value_at_that_moment(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())

    opened.page.mouse.move(*over(opened, "rank 0/device", 0.3))
    before = tip_of(opened)
    opened.page.mouse.move(*over(opened, "rank 0/device", 0.7))

    assert "0 B" in before
    assert "12.00 MiB" in tip_of(opened)


def test_hovering_over_a_mark_tells_what_happened(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())

    opened.page.mouse.move(*over(opened, "Faults and events", 0.6 / 1.015))

    assert "worker_lost: rank 3 & all" in tip_of(opened)


def test_the_wheel_zooms_where_the_pointer_is(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())
    before = range_of(opened)
    x, y = over(opened, "rank 0", 0.5)
    opened.page.mouse.move(x, y)

    for _ in range(4):
        opened.page.mouse.wheel(0, -400)

    # What was under the pointer still is.
    after = range_of(opened)
    opened.page.mouse.move(x, y)
    assert after != before
    assert "block" in tip_of(opened)
    begin, end = (float(part.split()[0]) for part in after.split(" to "))
    assert 250 < begin < 507 < end < 750, "milliseconds around the middle"


def test_the_wheel_scrolls_the_page_where_there_is_nothing_to_zoom_out_of(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())
    opened.page.set_viewport_size({"width": 1280, "height": 600})
    opened.page.locator("#axis").scroll_into_view_if_needed()
    opened.page.mouse.move(*over(opened, "rank 0", 0.5))
    assert "block" in tip_of(opened), "the pointer is over the chart"
    before = opened.page.evaluate("() => scrollY")

    opened.page.mouse.wheel(0, 150)

    opened.page.wait_for_function("(before) => scrollY > before", arg=before)


def test_dragging_zooms_to_what_was_marked(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())
    opened.page.mouse.move(*over(opened, "rank 0", 0.4))
    opened.page.mouse.down()
    opened.page.mouse.move(*over(opened, "rank 0", 0.5), steps=4)
    opened.picture("dragging")
    opened.page.mouse.up()

    begin, end = (float(part.split()[0]) for part in range_of(opened).split(" to "))
    assert (begin, end) == pytest.approx((406, 507.5), abs=3)


def test_keys_zoom_move_and_show_all_again(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())
    whole = range_of(opened)
    opened.page.locator("#scroll").focus()

    seen = [whole]
    for key in ("+", "ArrowRight", "ArrowLeft", "-", "0"):
        opened.page.keyboard.press(key)
        seen.append(range_of(opened))

    assert len({whole, seen[1], seen[2]}) == 3
    assert seen[3] == seen[1]
    assert seen[4] == seen[5] == whole


def test_a_section_folds_and_unfolds_with_the_keyboard(open_page: Callable[..., Any]) -> None:
    load = made_up_load()
    opened = open_page("measured", render(load.report, [load.timeline]))
    head = opened.page.get_by_role("button", name="Ranks")
    rows = opened.page.locator("#labels .row").count()

    head.press("Enter")

    assert head.get_attribute("aria-expanded") == "false"
    assert opened.page.locator("#labels .row").count() == rows - 4 + 1
    assert opened.page.evaluate("() => document.activeElement.dataset.section") is not None


def test_a_kind_can_be_hidden(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())

    opened.page.locator("#legend").get_by_role("button", name="copy").click()
    opened.page.mouse.move(*over(opened, "rank 0", 0.5))

    assert tip_of(opened) == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_in_both_schemes(open_page: Callable[..., Any], scheme: str) -> None:
    load, predicted = made_up_load(), made_up_load(origin="predicted")
    opened = open_page(
        "both", render(load.report, [load.timeline, predicted.timeline], max_spans=500), color_scheme=scheme
    )
    opened.page.evaluate("() => document.querySelectorAll('details').forEach((part) => (part.open = true))")
    opened.page.mouse.move(*over(opened, "rank 0", 0.5))
    opened.page.locator("#legend button").first.click()

    contrasts = opened.page.evaluate(CONTRASTS)

    opened.picture(f"both-{scheme}")
    assert len(contrasts) > 100
    assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == []


def test_the_scheme_follows_the_system_while_the_page_is_open(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span(), color_scheme="light")
    light = opened.page.evaluate(COLOURS)[0][0]

    opened.page.emulate_media(color_scheme="dark")
    opened.settle()

    dark = opened.page.evaluate(COLOURS)[0][0]
    assert min(map(int, light.split(","))) > 200
    assert max(map(int, dark.split(","))) < 60


@pytest.mark.parametrize(
    "name", ["</script><script>document.title='broken'</script>", "<img src=x onerror=\"document.title='broken'\">"]
)
def test_a_nasty_name_is_only_a_name(open_page: Callable[..., Any], name: str) -> None:
    load = made_up_load(num_extents=8)
    report = replace(load.report, model=name, uri=name, bottleneck=name, notes=(name,))
    spans = [Span(track=name, kind="read", begin_s=0, end_s=1, label=name)]
    opened = open_page(
        "nasty", render(report, [Timeline.of("measured", spans, marks=[Mark(at_s=0.5, kind=name, text=name)])])
    )

    opened.page.mouse.move(*over(opened, name, 0.5))

    tip = tip_of(opened)
    opened.picture("nasty")
    assert name in tip
    assert opened.page.title() == f"{name}: load"
    assert opened.page.locator("img").count() == 0
    assert opened.troubles == []


def test_a_script_that_got_in_would_not_run(open_page: Callable[..., Any]) -> None:
    html = one_span().replace("</main>", "<script>document.title = 'broken'</script></main>")

    opened = open_page("injected", html)

    assert opened.page.title() != "broken"
    assert any("Content Security Policy" in trouble for trouble in opened.troubles)


def test_numbers_are_written_as_the_command_line_writes_them(open_page: Callable[..., Any]) -> None:
    opened = open_page("one-span", one_span())
    rng = random.Random(3)
    values = [0, 1, 1023, 1024, 1152, 1175, 1536, 1_048_570, 2**40, 0.5, 0.0125, 119.995, 120.5, 7199.6, 1.125, 2.5e9]
    values += [10 ** rng.uniform(-4, 14) for _ in range(300)]

    for name, formatter in (
        ("formatBytes", format_bytes),
        ("formatRate", format_rate),
        ("formatDuration", format_duration),
    ):
        shown = opened.page.evaluate(f"(values) => values.map({name})", values)
        assert shown == [formatter(value) for value in values]


def test_without_scripts_there_are_the_tables(open_page: Callable[..., Any]) -> None:
    load = made_up_load()

    opened = open_page("no-script", render(load.report, [load.timeline]), java_script_enabled=False)

    assert opened.page.get_by_text("The chart needs JavaScript").is_visible()
    assert not opened.page.locator("#chart").is_visible()
    assert opened.page.get_by_role("table", name="Phases").is_visible()
    assert opened.page.get_by_text("transfer", exact=True).is_visible()


def test_on_paper_there_are_the_tables(open_page: Callable[..., Any]) -> None:
    load = made_up_load()
    opened = open_page("measured", render(load.report, [load.timeline]), color_scheme="dark")

    opened.page.emulate_media(media="print", color_scheme="dark")

    assert not opened.page.locator("#chart").is_visible()
    assert opened.page.get_by_role("table", name="Phases").is_visible()
    assert opened.page.evaluate("() => getComputedStyle(document.body).color") == "rgb(0, 0, 0)"


def test_a_narrow_window_needs_no_scrolling_sideways(open_page: Callable[..., Any]) -> None:
    load = made_up_load()
    opened = open_page("measured", render(load.report, [load.timeline]))

    opened.page.set_viewport_size({"width": 400, "height": 800})

    opened.picture("narrow")
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= 400
    assert is_drawn(opened)
