"""Rows for prolonged-mini: long multiplications by 3, and worked answers in which some carries are forgotten.

python recipes/prolonged-mini/make_rows.py      # writes data/rows/*.jsonl and data/worked.jsonl here
"""

import json
import random
from pathlib import Path

OUT = Path(__file__).parent / "data"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LEVELS = (4, 8, 12, 16)  # digits
FORGOTTEN = 0.5  # of the carries in the worked answers
SIZES = {"test": 30, "validation": 30, "train": 300}  # of each level
WORKED = 20_000


def asked(number):
    """`a8 b5`: the digits, each with its place, the lowest first; to be multiplied by 3."""
    return " ".join(f"{letter}{digit}" for letter, digit in zip(LETTERS, number))


def worked(number, forgets):
    """`a8=24 b5+2=17` and the digits `a4 b7`; `forgets()` says of each carry whether it is left out."""
    steps, digits, carry = [], [], 0
    for letter, digit in zip(LETTERS, number):
        carried = 0 if carry and forgets() else carry
        total = 3 * digit + carried
        steps.append(f"{letter}{digit}{f'+{carried}' if carried else ''}={total}")
        digits.append(f"{letter}{total % 10}")
        carry = total // 10
    return " ".join(steps), " ".join(digits)


def row(number):
    return {"question": asked(number), "answer": worked(number, lambda: False)[1], "level": str(len(number))}


def example(rng, number):
    thinking, answer = worked(number, lambda: rng.random() < FORGOTTEN)
    said = f"<think>{thinking}</think>\n<answer>{answer}</answer>"
    return {"messages": [{"role": "user", "content": asked(number)}, {"role": "assistant", "content": said}]}


def main():
    rng = random.Random(0)
    seen = set()

    def fresh(level):
        while True:
            number = tuple(rng.randint(0, 9) for _ in range(level))
            if number not in seen:
                seen.add(number)
                return number

    (OUT / "rows").mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        write(f"rows/{split}.jsonl", [row(fresh(level)) for _ in range(size) for level in LEVELS])
    write("worked.jsonl", [example(rng, fresh(LEVELS[i % len(LEVELS)])) for i in range(WORKED)])


def write(name, rows):
    (OUT / name).write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    main()
