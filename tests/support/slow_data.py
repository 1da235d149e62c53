"""The training command in which the data of one process is slow: `python -m jaxtrain.launch
--module=support.slow_data`."""

import sys
import time

from jaxtrain import BEGAN, train_command as train
from jaxtrain.data import loader
from jaxtrain.data.loader import Batch, Loader
from jaxtrain.data.order import Draw

SLOW_PROCESS, SECONDS = 1, 0.2  # more for each batch


class SlowLoader(Loader):
    def read(self, number: int) -> tuple[dict[int, Draw | None], Batch]:
        time.sleep(SECONDS)
        return super().read(number)


if __name__ == "__main__":
    if f"--process_id={SLOW_PROCESS}" in sys.argv:
        loader.Loader = SlowLoader
    sys.exit(train.main(sys.argv[1:], BEGAN))
