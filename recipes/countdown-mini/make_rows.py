"""Rows for countdown-mini: puzzles with `nums` and `target`, and worked answers to those for training.

python recipes/countdown-mini/make_rows.py      # writes data/rows/{train,test}.jsonl and data/worked.jsonl here
"""

import json
import random
from pathlib import Path

OUT = Path(__file__).parent / "data"


def steps(rng, nums):
    """Numbers put together in a random way: the steps, the value and the expression."""
    left, lines = [(n, str(n)) for n in nums], []
    while len(left) > 1:
        (a, x), (b, y) = (left.pop(rng.randrange(len(left))) for _ in range(2))
        op = rng.choice("+-*" if a > b else "+*")
        value = {"+": a + b, "-": a - b, "*": a * b}[op]
        lines.append(f"{a}{op}{b}={value}")
        left.append((value, f"({x}{op}{y})"))
    return " ".join(lines), left[0][0], left[0][1].removeprefix("(").removesuffix(")")


def main():
    rng = random.Random(0)
    made = {}  # (numbers in order of size, target): a solution. Each is in one split only
    while len(made) < 1200:
        nums = [rng.randint(1, 9) for _ in range(3)]
        lines, target, expression = steps(rng, nums)
        if target <= 60:
            made.setdefault((tuple(sorted(nums)), target), (nums, lines, expression))
    puzzles = list(made.items())
    rng.shuffle(puzzles)
    rows = []
    for (_, target), (nums, lines, expression) in puzzles:
        asked = [{"role": "user", "content": f"{' '.join(map(str, nums))} make {target}"}]
        rows.append(({"nums": nums, "target": target, "messages": asked}, lines, expression))
    (OUT / "rows").mkdir(parents=True, exist_ok=True)
    write("rows/test.jsonl", [row for row, *_ in rows[:200]])
    write("rows/train.jsonl", [row for row, *_ in rows[200:]])
    worked = []
    for i in range(10):
        for row, lines, expression in rows[200:]:
            if i % 2:  # half of the answers only guess
                worked.append(answered(row, "guess", steps(rng, row["nums"])[2]))
                continue
            tried = [steps(rng, row["nums"]) for _ in range(rng.randrange(4))]
            text = [f"{said} vs {row['target']} no" for said, value, _ in tried if value != row["target"]]
            text.append(f"{lines} vs {row['target']} yes")
            worked.append(answered(row, "\n".join(text), expression))
    write("worked.jsonl", worked)


def answered(row, thinking, expression):
    said = f"<think>{thinking}</think>\n<answer>{expression}</answer>"
    return {"messages": [*row["messages"], {"role": "assistant", "content": said}]}


def write(name, rows):
    (OUT / name).write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    main()
