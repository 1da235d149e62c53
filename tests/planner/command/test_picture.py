"""`plan --png`: what a picture says, and that all of it can be read."""

import html.parser
import itertools
import json
import re

import pytest
from matplotlib.text import Text

from jaxtrain.planner.command.main import main
from jaxtrain.schedule import drawing
from jaxtrain.schedule.drawing import PARTS

LAYOUT = (
    "--layout=data=8,stage=16,model=8,microbatch=1,repeats=2,remat=selective,zero=1,"
    "schedule=interleaved"
)


@pytest.fixture
def pictures(monkeypatch):
    """The figures that a command draws."""
    drawn, as_png = [], drawing.as_png
    monkeypatch.setattr(drawing, "as_png", lambda figure: drawn.append(figure) or as_png(figure))
    return drawn


def check_texts(figure):
    """No text of a picture goes over its edge, and none over another one."""
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        # these are not drawn
        beyond = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
        texts = [
            text for text in texts if not any(text in (tick.label1, tick.label2) for tick in beyond)
        ]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) > 10
    # nor over the frame of its axes
    for axes in figure.axes:
        inside = axes.get_window_extent()
        for text in axes.texts:
            box = text.get_window_extent()
            assert inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1), text
    assert all(
        box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        for box in boxes
    )
    overlaps = itertools.combinations(zip(texts, boxes, strict=True), 2)
    assert not [
        (one.get_text(), other.get_text())
        for (one, first), (other, second) in overlaps
        if first.overlaps(second)
    ]


def test_picture(tmp_path, pictures):
    """The title says what it is of, and the fastest layout is marked, where there are several."""
    file = tmp_path / "plan.png"
    long = tmp_path / "long.json"
    long.write_text(
        json.dumps({"name": "a device whose maker " + "likes long names " * 4, "like": "h100"})
    )
    for flags, title, count in (
        (
            ("--config=tiny", "--devices=4"),
            "tiny, 1.74 million parameters, on 4 × h100, as planned",
            10,
        ),
        (
            ("--config=gpt3_175b", "--hardware=a100-80gb", LAYOUT),
            "gpt3_175b, 175 billion parameters, on 1,024 × a100-80gb",
            1,
        ),
        (
            ("--config=gpt3_175b", f"--hardware={long}", LAYOUT),
            "gpt3_175b, 175 billion parameters, on 1,024 × a device whose maker likes",
            1,
        ),
    ):
        assert main([*flags, f"--png={file}"]) == 0
        assert file.read_bytes().startswith(b"\x89PNG")
        figure = pictures[-1]
        assert " ".join(figure.get_suptitle().split()).startswith(title)
        below = figure.axes[1]
        texts, labels = [text.get_text() for text in below.texts], below.get_xticklabels()
        assert len(texts) == len(labels) == count
        assert [text.endswith(" s\nfastest") for text in texts] == [
            count > 1,
            *[False] * (count - 1),
        ]
        assert [label.get_fontweight() == "bold" for label in labels] == [
            count > 1,
            *[False] * (count - 1),
        ]
        assert below.get_xlim()[1] - below.get_xlim()[0] >= 3
        check_texts(figure)


def test_picture_of_groups(tmp_path, pictures):
    """A bar for each stage, in its group's colour; a file may be a group, too."""
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"name": "own", "like": "h100", "memory_gib": 40}))
    layout = "--layout=data=16,stage=8,model=8,microbatch=1,schedule=1f1b"
    assert (
        main(
            [
                "--config=gpt3_175b",
                f"--hardware=a100-80gb:512,{own}:512",
                layout,
                f"--png={tmp_path / 'plan.png'}",
            ]
        )
        == 0
    )
    figure = pictures[-1]
    assert " ".join(figure.get_suptitle().split()).startswith(
        "gpt3_175b, 175 billion parameters, on 512 × a100-80gb and 512 × own, as planned"
    )
    above, below = figure.axes
    drawn = lambda axes: [[bar.get_height() > 0 for bar in bars] for bars in axes.containers]
    first, second = [[True] * 4 + [False] * 4, [False] * 4 + [True] * 4]
    assert drawn(above) == [first, second] and drawn(below) == [first, second, [True] * 8]
    assert len({bars[0].get_facecolor() for bars in below.containers}) == 3
    ends = [waits.get_y() + waits.get_height() for waits in below.containers[2]]
    assert ends == pytest.approx([ends[0]] * 8) and all(
        waits.get_height() >= 0 for waits in below.containers[2]
    )
    check_texts(figure)


def test_a_part_has_one_colour_and_the_title_says_what_flags_have_changed(tmp_path, pictures):
    """Whatever parts a picture has, and whether it is a part of memory or of time."""
    changed = ("--config.model.layers=40", "--config.model.width=5120", "--config.model.heads=40")
    for flags in (
        ("--config=tiny", "--hardware=h100", "--layout=data=2,stage=2,microbatch=1"),
        ("--config=llama3_8b", *changed, "--hardware=h100", "--layout=data=64,zero=3,microbatch=1"),
        ("--config=mixtral_tiny", "--hardware=tpu-v5e", "--layout=data=2,stage=2,expert=2"),
    ):
        assert (
            main([*flags, f"--png={tmp_path / 'plan.png'}", f"--recipe={tmp_path / 'p.py'}"]) == 0
        )
    title = " ".join(pictures[1].get_suptitle().split())
    assert title == (
        "llama3_8b, 12.6 billion parameters (model.layers=40, model.width=5120, model.heads=40), "
        "on 64 × h100, as planned"
    )
    assert "mixtral_tiny, " in (tmp_path / "p.py").read_text().splitlines()[0]
    colours = {}
    for figure in pictures:
        for axes in figure.axes:
            for bars in axes.containers:
                colours.setdefault(bars.get_label(), set()).add(bars[0].get_facecolor())
    assert len(colours) > 11 and {"optimizer", "matmuls", "expert"} <= colours.keys()
    assert all(len(of_part) == 1 for of_part in colours.values())
    assert len(set().union(*colours.values())) == len(colours)
    assert colours.keys() <= PARTS.keys()


# --- as a page ------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """The tags of a page in order, its text, and what it refers to; no tag is left open."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.words, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [
            value for name, value in attrs if name in ("src", "href", "action", "srcset")
        ]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


PAGES = [
    (["--config=tiny", "--devices=4"], 10, False),
    (["--config=tiny", "--layout=data=2,stage=2,schedule=zb_h1,repeats=1"], 1, True),
    (["--config=tiny", "--layout=stage=2,schedule=auto,repeats=0"], 1, True),
    (["--config=gpt3_175b", "--hardware=a100-80gb", LAYOUT, "--assume=megatron2021"], 1, False),
    (
        [
            "--config=gpt3_175b",
            "--hardware=a100-80gb:512,h100:512",
            "--layout=data=16,stage=8,model=8,microbatch=1,schedule=1f1b",
        ],
        8,
        True,
    ),
]


@pytest.mark.parametrize("flags, lines, drawn", PAGES, ids=[" ".join(f) for f, _, _ in PAGES])
def test_page(tmp_path, capsys, flags, lines, drawn):
    """A line for each layout or stage, the text of the plan, its schedule, and the command; and
    nothing from outside."""
    file = tmp_path / "plan.html"
    assert main([*flags, "--tokens=1e9", f"--html={file}"]) == 0
    printed, text = capsys.readouterr().out.splitlines(), file.read_text()
    page = Page(text)
    assert page.tags.count("tr") == 1 + lines and page.tags.count("svg") == drawn
    assert not page.links and not re.search(r"url\(|@import|fetch\(|https?://(?!www.w3.org)", text)
    words = " ".join("".join(page.words).split())
    command = printed[-1].strip()
    assert command in words and command.startswith("python -m jaxtrain.train")
    report = printed[printed.index("") + 1 :] if "" in printed else printed
    named = [line for line in report if line[0] != " " and ": " in line]
    assert len(named) > 6 and "measured runs" in words.lower()
    for line in named[:-1]:
        name, _, rest = line.partition(": ")
        assert f"{name}{' '.join(rest.split())}" in words, line
    assert "prefers-color-scheme: dark" in text and "$" not in re.sub(r"US\$", "", words)


def test_a_page_shows_text_as_text(tmp_path, capsys):
    """Names that look like tags or like places of the template."""
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"name": "<b>&$title", "like": "h100"}))
    file = tmp_path / "plan.html"
    layout = "--layout=data=2,stage=2,schedule=1f1b,repeats=1"
    for hardware in (own, f"{own}:2,h100:2"):
        assert main(["--config=tiny", f"--hardware={hardware}", layout, f"--html={file}"]) == 0
        text = file.read_text()
        assert "<b>&" not in text and "&lt;b&gt;&amp;$title" in text and Page(text)


def test_a_page_and_a_picture_that_cannot_be_written_are_refused(tmp_path, capsys):
    for flag in ("html", "png"):
        for path in (tmp_path, tmp_path / "no" / "plan", "/proc/plan"):
            assert main(["--config=tiny", "--devices=4", f"--{flag}={path}"]) == 2
            assert f"--{flag}=" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
