"""benchmarks/endurance.py: its faults leave their traces, and its stored runs stay within the band."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import endurance

ROOT = Path(endurance.__file__).parents[1]


def stored() -> dict:
    return endurance.stored_runs(ROOT / "benchmarks/endurance_runs", 1000)


def test_the_table_compares_ways_of_the_same_model(tmp_path):
    held_out = {"plain": (2.0, 1.0), "everything": (2.02, 1.01), "faults": (2.0, 1.05)}
    for way, losses in held_out.items():
        run = dict(model="tiny", way=way, steps=40, losses=[2.0] * 20 + [None] + [1.0] * 19, skipped=0, done_again=0)
        run |= dict(held_out=dict(zip(("20", "40"), losses, strict=True)))
        (tmp_path / f"tiny-{way}-40.json").write_text(json.dumps(run))
    runs = endurance.stored_runs(tmp_path, 40)
    assert [*runs] == [("tiny", way) for way in held_out] and endurance.stored_runs(tmp_path, 41) == {}
    assert endurance.table(runs).splitlines()[2:] == [
        "| tiny | plain | 1.0000 |  |  | 0 | 0 |",
        "| tiny | everything | 1.0100 | 1.00% |  | 0 | 0 |",
        "| tiny | faults | 1.0500 | 5.00% | 3.96% | 0 | 0 |",
    ]
    endurance.plot(runs, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


# Its checkpoint still has a file of more than a MiB, which the full disk refuses.
SMALLER = dict(num_layers=1, model_dim=128, ff_dim=256, head_dim=16, seq_len=64)


@pytest.mark.slow
def test_faults_leave_their_traces_and_no_harm(tmp_path, capfd, monkeypatch):
    """The faults are a kill, a batch that is not finite, one of random tokens, and a full disk at a checkpoint."""
    monkeypatch.setattr(endurance, "EVERYTHING", SMALLER)  # FP8 and other axes are in test_composition.py
    monkeypatch.setitem(endurance.MESHES, "tiny", {"faults": "fsdp:2"})
    endurance.run("tiny", "faults", 20, tmp_path)
    (run,) = endurance.stored_runs(tmp_path, 20).values()
    assert run["skipped"] == 1 and len(run["losses"]) == 20 and run["done_again"] > 0
    assert run["losses"].index(None) == 6 and run["losses"][10] > 1.2 * run["losses"][9]  # not finite; random tokens
    assert run["held_out"]["20"] < 3.0
    said = capfd.readouterr().out
    assert "resumed" in said and "File too large" in said


def test_everything_follows_plain_for_a_thousand_steps():
    """Held-out losses stay within endurance.BAND of the plain run's."""
    runs = stored()
    assert {*runs} == {(model, way) for model, meshes in endurance.MESHES.items() for way in meshes}
    for (model, way), run in runs.items():
        assert len(run["losses"]) == 1000 and run["losses"].count(None) == run["skipped"] == (way == "faults")
        if way != "experts":  # below
            assert endurance.distance(run, runs[model, "plain"]) <= endurance.BAND


def test_experts_on_several_devices_drop_nothing_and_end_as_one_device_does():
    """On the way one of ten held-out losses is beyond the band. docs/RESULTS.md says how far."""
    experts, one_device = (stored()["tiny-moe", way] for way in ("experts", "one device"))
    assert experts["dropped"] == 0 and experts["more_rounds"] > 0  # buffers that were too small did not matter
    above = experts["held_out"]["1000"] / one_device["held_out"]["1000"] - 1
    assert abs(above) < endurance.BAND / 2
    assert experts["losses"][:100] == one_device["losses"][:100]
    assert experts["held_out"]["100"] == pytest.approx(one_device["held_out"]["100"], rel=3e-6)
    text = " ".join((ROOT / "docs/RESULTS.md").read_text().split())
    assert f"{experts['more_rounds']} of its steps needed a second round" in text
    farthest = endurance.distance(experts, one_device)
    assert f"they end {above:.2%} above `one device`, but are {farthest:.2%} from it at the farthest" in text


def test_a_way_that_a_model_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["endurance.py", "run", "--models=tiny", "--ways=experts"])
    with pytest.raises(ValueError, match=r"^tiny has none of the ways experts; it has plain, everything, faults$"):
        endurance.main()


def test_the_table_that_is_shown_is_of_the_runs_that_are_kept():
    shown = re.search(
        r"<!-- measured: endurance -->\n(.*?)\n<!-- end -->", (ROOT / "docs/RESULTS.md").read_text(), re.DOTALL
    )
    assert shown[1] == endurance.table(stored())
