"""Rows for countdown-mini: puzzles with `nums` and `target`, and worked answers to those for training.

python recipes/countdown-mini/make_rows.py      # writes data/rows/{train,test}.jsonl and data/worked.jsonl here
"""

import json
import random
from pathlib import Path

OUT = Path(__file__).parent / "data"
LARGEST = 18  # of what numbers are put together to; every two of them can be


def combination(rng, nums):
    """Numbers put together one after the other in a random way: what is said, the value and the expression."""
    value, *others = rng.sample(nums, len(nums))
    said = expression = str(value)
    for n in others:
        results = {"+": value + n, "-": value - n, "*": value * n}
        op = rng.choice([op for op, result in results.items() if 0 < result <= LARGEST])
        value = results[op]
        expression = f"({expression}){op}{n}" if "=" in said else f"{expression}{op}{n}"
        said = f"{said}{op}{n}={value}"
    return said, value, expression


def search(rng, nums, target):
    """Combinations that fail, then one that does not. How many fail says nothing of whether the next one will."""
    lines = []
    while True:
        said, value, expression = combination(rng, nums)
        if value == target:
            return "\n".join([*lines, f"{said} vs {target} yes"]), expression
        if rng.random() < 0.4 and len(lines) < 8:  # most failures are left out
            lines.append(f"{said} vs {target} no")


def main():
    rng = random.Random(0)
    made = {}  # (numbers in order of size, target): the numbers as asked. Each is in one split only
    while len(made) < 800:
        nums = [rng.randint(1, 9) for _ in range(3)]
        made.setdefault((tuple(sorted(nums)), combination(rng, nums)[1]), nums)
    puzzles = list(made.items())
    rng.shuffle(puzzles)
    rows = []
    for (_, target), nums in puzzles:
        asked = [{"role": "user", "content": f"{' '.join(map(str, nums))} make {target}"}]
        rows.append({"nums": nums, "target": target, "messages": asked})
    (OUT / "rows").mkdir(parents=True, exist_ok=True)
    write("rows/test.jsonl", rows[:200])
    write("rows/train.jsonl", rows[200:])
    worked = []
    for i in range(30):
        for row in rows[200:]:
            if i % 2:  # half of the answers only guess
                worked.append(answered(row, "guess", combination(rng, row["nums"])[2]))
            else:
                worked.append(answered(row, *search(rng, row["nums"], row["target"])))
    write("worked.jsonl", worked)


def answered(row, thinking, expression):
    said = f"<think>{thinking}</think>\n<answer>{expression}</answer>"
    return {"messages": [*row["messages"], {"role": "assistant", "content": said}]}


def write(name, rows):
    (OUT / name).write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    main()
