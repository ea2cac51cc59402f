"""What runs measured - step times, use of the grid - kept beside the compiled programs."""

import warnings

from bucketing.grid_use import GridUse
from bucketing.program_store import ProgramStore
from bucketing.step_time import StepTimeModel

NAME = "measurements"


class MeasurementsWarning(UserWarning):
    """Saved measurements could not be read; they are taken anew."""


class Measurements:
    """Measurements with a place in a store.

    Attributes:
        step_time: starts from what earlier runs measured and goes on learning.
        use: counts of cells in earlier runs.
    """

    def __init__(self, store: ProgramStore) -> None:
        """Read what there is.

        Args:
            store: of the programs; one that does not last keeps nothing.
        """
        self._store = store
        self.step_time = StepTimeModel()
        self.use = GridUse()
        content = store.load_json(NAME) if store.lasting else None
        if content is None:
            return
        try:
            step_time = StepTimeModel.from_json(content["step_time"])
            use = GridUse.from_json(content["use"])
        except (ValueError, KeyError, TypeError) as error:
            message = f"measurements of earlier runs are not used: {error}"
            warnings.warn(message, MeasurementsWarning, stacklevel=2)
        else:
            self.step_time, self.use = step_time, use

    def save(self, use: GridUse) -> None:
        """Write step times, and the use of cells in earlier runs and in this one.

        No result depends on them: where they cannot be written there is a warning.
        """
        if not self._store.lasting or not use.steps:
            return
        content = {"step_time": self.step_time.as_json(), "use": (self.use + use).as_json()}
        try:
            self._store.save_json(NAME, content)
        except OSError as error:
            message = f"measurements of this run are not kept: {error}"
            warnings.warn(message, MeasurementsWarning, stacklevel=2)
