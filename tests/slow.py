"""Which tests are slow: `bash scripts/test.sh` leaves them out, `--all` runs them too.

A test can also carry `@pytest.mark.slow` in its own file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

# Fixtures of slow tests: a browser.
FIXTURES = {"browser"}

# Folders, files and functions of slow tests. A comment names what the fast run has instead.
SLOW = (
    "tests/architecture/test_examples.py::test_an_example_runs",
    "tests/attach/test_compiled.py::test_generate_of_a_model_that_is_one_graph",  # compiles it
    "tests/comfy/test_page.py",
    "tests/comfy/test_server.py",
    "tests/commands/test_evaluate.py",  # tests/evaluation has the functions
    "tests/evaluation/test_speed_baselines.py",
    "tests/text_to_image/test_fake_device.py",  # tests/compatibility/test_matrix.py
    "tests/window/test_memory.py",
)

# Sweeps: of each parametrized test in a file, or of one test, the fast run has the first case and
# every n-th after it. Choose n without a common factor with the number of policies or settings, so
# that both vary. Tokens of every method of the catalog (tests/matrix/test_window.py and bitwise
# policies in test_canvas.py) and all planted bugs are in both.
SWEEPS = {
    "tests/attach/test_layout.py": 4,
    "tests/attach/test_own_prompts.py": 7,
    "tests/attach/test_step_outputs.py": 5,
    "tests/diffusion_lm/test_llada2.py": 5,
    "tests/loading/test_moving.py::test_parts_are_on_the_accelerator_while_they_compute": 4,
    "tests/loading/test_moving.py::test_speech_and_clips_move": 2,
    "tests/loading/test_moving.py::test_to_is_as_good_as_loading_there": 3,
    "tests/loading/test_moving.py::test_weights_on_a_disk": 3,
    "tests/loading/test_pickles.py": 5,
    "tests/logits/test_repetition.py": 3,
    "tests/models/test_coarse_folders.py": 3,
    "tests/text_to_image/test_batch_rows.py": 4,
    "tests/text_to_image/test_models.py": 4,
    "tests/text_to_image/test_requests.py": 4,
    "tests/vision_language/test_reducers.py": 3,
}


def find_slow(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The listed tests among the collected ones."""
    cases: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        step = SWEEPS.get(function) or SWEEPS.get(function.partition("::")[0], 1)
        left_out = cases[function] % step != 0
        cases[function] += 1
        listed = any(f"{function}/".startswith((f"{e}/", f"{e}::")) for e in SLOW)
        if left_out or listed or FIXTURES & set(getattr(item, "fixturenames", ())):
            yield item
