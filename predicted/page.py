"""Draws a predicted step as a page of HTML (report.py), with its flags and what the planner would change.

    python roofline.py step --preset=llama3.1-70b --batch=256 --report=pages/70b

**Idea.** The page embeds the object that `--json` prints, and draws it: the parts of the step with their exposed and
hidden seconds, the memory by what is stored, and the matmuls of a layer on the roofline of a device. aot.py puts the
parts, the memory, the flags and the plan below the compiled step.
"""

import report
from hardware import si
from predicted import planner
from predicted.presentation import as_json, matmuls
from predicted.step import GiB, Prediction, cliffs


def data_of(prediction: Prediction) -> dict:
    """The data of a page: `prediction`, the object of --json; `flags`, that give it; `plan`, as in `plan_of`."""
    numbers = as_json(prediction) | {"cliffs": cliffs(prediction.run)}
    return {"prediction": numbers, "flags": planner.flags_of(prediction), "plan": plan_of(prediction)}


def plan_of(prediction: Prediction) -> dict:
    """The flags that the planner would change in a run on its slice, and the step with them, in seconds and bytes."""
    run = prediction.run
    try:
        how = dict(num_slices=run.num_slices, efficiency=run.efficiency)
        best = planner.plan(run.config, run.chip, run.topology, **how).best
    except ValueError as error:
        return {"flags": [], "words": f"It has no plan for this slice: {error}."}
    flags = planner.changed_flags(run.config, run.sizes, best)
    words = f"{si(best.step_s, 's')} a step in place of {si(prediction.step_s, 's')}, "
    words += f"{best.hbm_bytes / GiB:.2f} GiB a device (predicted)." if flags else "as with these flags."
    return {"flags": flags, "words": words, "step_s": best.step_s, "hbm_bytes": best.hbm_bytes}


def write(folder: str, prediction: Prediction) -> None:
    """Writes the page of a predicted step into a folder. Raises OSError if that fails."""
    data = data_of(prediction) | {"matmuls": matmuls(prediction)}
    numbers = data["prediction"]
    title = f"{numbers['preset']} on {numbers['topology']}: a training step, predicted"
    report.write(folder, title, report.of_prediction(data), data)
