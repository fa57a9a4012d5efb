"""GSM8K (arXiv:2110.14168): grade-school word problems whose answer is a number.

One row: {"question": "Natalia sold clips to 48 of her friends ...", "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips
in May.\\n...\\n#### 72"}. Read from the hub, or from a file or folder of such rows (`task.source`).
"""

from __future__ import annotations

from typing import Literal

from hone.tasks.rows.sources import Rows, read_source
from hone.tasks.rows.task import RowsConfig, RowsTask

SOURCE, SUBSET = "openai/gsm8k", "main"


class GSM8KConfig(RowsConfig):
    """7473 train and 1319 test problems; validation is cut from train."""

    name: Literal["gsm8k"] = "gsm8k"
    source: str | None = SOURCE


class GSM8KTask(RowsTask):
    """Answers are numbers, compared exactly and in process."""

    name = "gsm8k"
    grading = "exact"

    def rows(self) -> Rows:
        if self.config.source == SOURCE and self.config.subset is None:
            return {**read_source(SOURCE, SUBSET), **self.files()}
        return super().rows()
