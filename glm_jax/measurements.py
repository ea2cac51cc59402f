"""What runs measured - step times, use of the grid - kept beside the compiled programs."""

import json
import os
import warnings
from pathlib import Path

from bucketing.grid_use import GridUse
from bucketing.step_time import StepTimeModel

NAME = "measurements"


class MeasurementsWarning(UserWarning):
    """Saved measurements could not be read; they are taken anew."""


class Measurements:
    """Measurements with a place on disk.

    Attributes:
        step_time: starts from what earlier runs measured and goes on learning.
        use: counts of cells in earlier runs.
    """

    def __init__(self, folder: Path | None) -> None:
        """Read what there is.

        Args:
            folder: of the programs; None keeps nothing.
        """
        self._path = None if folder is None else folder / NAME
        self.step_time = StepTimeModel()
        self.use = GridUse()
        if self._path is None or not self._path.exists():
            return
        try:
            content = json.loads(self._path.read_text())
            step_time = StepTimeModel.from_json(content["step_time"])
            use = GridUse.from_json(content["use"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"measurements of earlier runs are not used: {error}"
            warnings.warn(message, MeasurementsWarning, stacklevel=2)
        else:
            self.step_time, self.use = step_time, use

    def save(self, use: GridUse) -> None:
        """Write step times, and the use of cells in earlier runs and in this one.

        A reader finds the old or the new figures, never half of them.
        """
        if self._path is None or not use.steps:
            return
        draft = self._path.with_name(f"{NAME}.{os.getpid()}.tmp")
        content = {"step_time": self.step_time.as_json(), "use": (self.use + use).as_json()}
        try:
            draft.write_text(json.dumps(content))
            draft.replace(self._path)
        except OSError:
            # The next run takes them anew; no result depends on them.
            draft.unlink(missing_ok=True)
