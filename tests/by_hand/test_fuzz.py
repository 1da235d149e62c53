"""tests/by_hand/fuzz.py: some of its cases, and that it sees what is wrong."""

import pytest

from by_hand import fuzz, fuzz_valid

SEED = 7


@pytest.mark.full
def test_random_layouts_train_as_one_device(tmp_path):
    fuzz.write_corpora(tmp_path)
    assert fuzz.run_valid(tmp_path, SEED, 1, jobs=1) == 0
    cases = fuzz.Results(tmp_path / "results.jsonl").lines
    assert sorted(cases) == ["0.0", "0.one"]
    assert all(len(line["figures"]) >= 4 for line in cases.values())


def test_cases_are_drawn_from_the_seed_and_cover_what_they_should():
    groups = [fuzz_valid.draw_group(SEED, group, fuzz.LAYOUTS) for group in range(8)]
    assert groups[3] == fuzz_valid.draw_group(SEED, 3, fuzz.LAYOUTS)
    layouts = [layout for _, layouts in groups for layout in layouts]
    assert sum(layout.stages > 1 for layout in layouts) >= len(layouts) / 2
    assert sum(layout.odd for layout in layouts) >= len(layouts) / 3
    assert all(
        fuzz_valid.works(fuzz_valid.RUN | model | layout.settings, layout.devices)
        for model, own in groups
        for layout in own
    )


def test_a_difference_is_seen():
    figures = {"loss, step 1": 5.0, "grad_norm, step 1": 2.0}
    assert fuzz.difference(figures, dict(figures)) == ""
    assert fuzz.difference(figures | {"loss, step 1": 5.00004}, figures) == ""
    assert "loss, step 1" in fuzz.difference(figures | {"loss, step 1": 5.0001}, figures)
    assert "grad_norm" in fuzz.difference(figures | {"grad_norm, step 1": float("nan")}, figures)
    assert fuzz.difference({"loss, step 1": 5.0}, figures)


def test_a_failed_command_is_a_failed_case_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    def train(folder, name, settings, devices):
        if name == "0.1":
            return {
                "command": "python -m jaxtrain.train",
                "seconds": 1.0,
                "error": "status 1: Traceback",
            }
        return {
            "command": "python -m jaxtrain.train",
            "seconds": 1.0,
            "figures": {"loss, step 1": 1.0},
        }

    monkeypatch.setattr(fuzz, "train", train)
    assert fuzz.run_valid(tmp_path, SEED, 4, jobs=1) == 1
    assert "0.1: status 1: Traceback" in capsys.readouterr().out
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6
    monkeypatch.setattr(fuzz, "train", lambda *_: pytest.fail("all have been run"))
    assert fuzz.run_valid(tmp_path, SEED, 4, jobs=1) == 1


def test_invalid_cases_are_judged_once(tmp_path, monkeypatch, capsys):
    assert fuzz.run_invalid(tmp_path, SEED, 4, jobs=1) == 0
    assert "invalid: 4 of 4 refused with flags that work" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "judge", lambda *_: pytest.fail("all have been judged"))
    assert fuzz.run_invalid(tmp_path, SEED, 4, jobs=1) == 0


def test_a_refusal_that_the_command_does_not_give_is_seen(tmp_path, monkeypatch):
    flags, devices = fuzz.draw_refused(SEED, 0)
    monkeypatch.setattr(
        fuzz,
        "mended",
        lambda *_: (flags, devices, "error: another line", ["--config.mesh.model=1"]),
    )
    monkeypatch.setattr(
        fuzz.subprocess,
        "run",
        lambda words, **_: fuzz.subprocess.CompletedProcess(words, 2, "", "error: a line\n"),
    )
    assert "it is not the refusal" in fuzz.compile_mended(tmp_path, SEED, 0)["error"]
    monkeypatch.setattr(
        fuzz, "mended", lambda *_: (flags, devices, "error: a line", ["--config.mesh.model=1"])
    )
    assert "status 2 with --config.mesh.model=1" in fuzz.compile_mended(tmp_path, SEED, 0)["error"]
