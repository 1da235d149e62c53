"""What the tests of this room share."""

import pytest
from support.checkpoint_state import Layout, checkpointer, meta_of, state


@pytest.fixture
def saved(tmp_path):
    """A folder with step 5 of a state of 7 layers, and its layout."""
    layout = Layout(7, stages=2, chunks=2, data=2, model=2)
    c = checkpointer(tmp_path / "run", layout)
    c.save(5, state(layout), meta_of(5) | {"seed": 3})
    c.close()
    return tmp_path / "run", layout
