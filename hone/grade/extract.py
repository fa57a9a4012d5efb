"""The answer that a text gives: the one reader of mathematical answers, in training and in evaluation.

    >>> extract("3 * 4 = 12, so\\n#### 12"), extract("Thus the area is $\\\\boxed{\\\\frac{1}{2}}$.")
    ('12', '\\\\frac{1}{2}')
    >>> extract("Final Answer: The final answer is $42$. I hope it is correct.")
    '$42$'

Read is what stands in the last `<answer>` block, else what follows the thinking, else everything. In it counts the
first of these that there is:

1. the last box, or the last line `#### ...`, whichever comes later; boxes that only commas, `and` or `or` part from
   each other are one list;
2. the last sentence that says what the answer is: after `Answer:`, or, unless reading is strict, "the answer is";
3. unless reading is strict, or in a block: all of it if it is no more than an answer, else its last expression.

What follows a label is read in the same way: its first sentence if that is no more than an answer, else the last
expression. Every search is linear in the length of the text, and nothing here calls itself.
"""

from __future__ import annotations

import re
from collections import deque

from hone.grade.answers import Unread, Words, read
from hone.grade.expressions import formulas, last_expression
from hone.grade.kinds import read_kind
from hone.grade.notation import normalise
from hone.grade.parse import parse

MAX_ANSWER = 2000  # characters; what is longer is no answer
WINDOW = 10_000  # characters at the end of a text in which an answer without a box or hashes is looked for
MAX_BOXES = 50  # of one list
MAX_TRIES = 8  # labels, lines and sentences that are looked at, from the end


def extract(text: str, strict: bool = False) -> str | None:
    """The answer, or None if there is none. Strictly only a marked one counts. Never raises."""
    block = parse(text).answer
    answer: str | None
    if block is not None:
        end = block[-WINDOW:]
        answer = _marked(block) or _said(end, strict=False) or _unmarked(end) or block
    else:
        thinking = "<think>" in text and "</think>" not in text
        text = text.rpartition("</think>")[2]
        end = text[-WINDOW:]
        answer = _marked(text) or _said(end, strict or thinking)
        if answer is None and not strict and not thinking:
            answer = _unmarked(end)
    answer = (answer or "").strip().strip("*_").strip()  # without Markdown around it
    return answer if answer and len(answer) <= MAX_ANSWER else None


# --- boxes and lines of hashes ---------------------------------------------------------------

_BRACES = re.compile(r"\\(?:boxed|box|fbox)\s*\{|\\boxed +(?P<bare>[-\d.,/]*\d)|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n#]+)")
#: What may stand between the boxes of one list: x = \boxed{2} \text{ or } x = \boxed{3}.
_BETWEEN = re.compile(
    r"\\text ?\{\s*(?:,|;|and|or)?\s*\}|\band\b|\bor\b|(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)? ?="
    r"|\\q?quad\b|\\[()\[\],;: ]|[,;&$\s]"
)
_CONNECTED = re.compile(r"[,;&]|\b(?:and|or)\b")
_PLACEHOLDERS = ("", "\\ldots", "\\dots", "answer", "your answer", "final answer")

Box = tuple[int, int, str]  # where the command begins, where the box ends, what stands in it


def boxed(text: str) -> str | None:
    """The inside of the last `\\boxed{...}` (or `\\box{}`) whose braces are balanced; of nested ones the innermost."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def _boxes(text: str) -> list[Box]:
    """The complete boxes that are in no other, in order. Of boxes in a box, the inside of the last innermost one."""
    if "box" not in text:
        return []
    waiting: list[tuple[int, int]] = []  # where a box and its inside begin; (-1, -1) for another brace
    closed: list[tuple[int, int, int]] = []  # begin, inside, end; a box follows those in it
    for match in _BRACES.finditer(text):
        piece = match.group()
        if match["bare"]:
            closed.append((match.start(), match.start("bare"), match.end()))
        elif piece[-1] == "{" and len(piece) != 2:  # not \{
            waiting.append((match.start(), match.end()) if len(piece) > 1 else (-1, -1))
        elif piece == "}" and waiting:
            begin, inside = waiting.pop()
            if begin >= 0:
                closed.append((begin, inside, match.start()))
    boxes: list[Box] = []
    outer, inner, chained = (-1, 0), (0, 0), False  # (begin, end) of the box at hand; its inside so far
    for begin, inside, end in reversed(closed):
        if outer[0] >= 0 and begin > outer[0]:  # within it: the last child of a last child, and so on
            chained = chained and begin >= inner[0] and end <= inner[1]
            inner = (inside, end) if chained else inner
            continue
        if outer[0] >= 0:
            boxes.append((*outer, text[slice(*inner)]))
        outer, inner, chained = (begin, end), (inside, end), True
    if outer[0] >= 0:
        boxes.append((*outer, text[slice(*inner)]))
    return boxes[::-1]


def _marked(text: str) -> str | None:
    """What the last box or line of hashes marks."""
    boxes = _boxes(text)
    while boxes and _is_placeholder(boxes[-1][2]):
        boxes.pop()
    hashes = _last_hashes(text)
    if hashes is not None and (not boxes or hashes.start(1) > boxes[-1][0]):
        return _content(hashes.group(1))
    if not boxes:
        return None
    answers = [boxes[-1][2].strip()]
    for before, after in zip(boxes[-2 : -MAX_BOXES - 1 : -1], boxes[::-1]):
        between = text[before[1] + 1 : after[0]] if after[0] - before[1] < 80 else "."
        if not _CONNECTED.search(between) or _BETWEEN.sub("", between).strip():
            break
        answers.append(before[2].strip())
    return ", ".join(dict.fromkeys(reversed(answers)))


def _content(line: str) -> str:
    """Of a line of hashes: all of it, or what its sentence says."""
    part = _part(line)
    return part if is_answer(part) else _said(line, strict=False) or last_expression(line) or line


def _is_placeholder(inside: str) -> bool:
    r"""As in an echo of the task: "put the answer in \boxed{...}"."""
    if len(inside) > 40:
        return False
    return re.sub(r"\\text ?\{([^{}]*)\}", r"\1", inside).strip(" $.*").casefold() in _PLACEHOLDERS


def _last_hashes(text: str) -> re.Match[str] | None:
    """The last line of hashes that holds an answer: a heading such as `#### Step 2` has text under it."""
    for match in reversed(deque(_HASHES.finditer(text), maxlen=MAX_TRIES)):
        content = match.group(1).strip(" *_")
        if content and (not text[match.end() :].strip() or (re.search(r"\d", content) and is_answer(content))):
            return match
    return None


# --- sentences that say what the answer is ---------------------------------------------------

_LABEL = re.compile(
    r"\b(?:answers?|ans)(?: ?(?:is|are))?[*_ ]*[:：=]|答案(?:是|为)?[*_ ]*[:：]?"
    r"|^[ \t#>*_-]*(?:the )?(?:final )?answer[*_ \t]*(?=\n|[\\$\d(-])",
    re.IGNORECASE | re.MULTILINE,
)
_PHRASE = re.compile(
    r"\b(?:answers?|solutions?|results?|options?|choices?)\s+(?:is|are|=|equals?|(?:would|will|must|should) be)\b[: ]*"
    r"(?:(?:therefore|thus|hence|simply|just|then|exactly|indeed)\b[,: ]*)?",
    re.IGNORECASE,
)
_CHECKING = re.compile(r"\b(?:check|verif|confirm|substitut|plug|test)\w*[^.\n]*$", re.IGNORECASE)
_SENTENCE = re.compile(
    r"(?:[.?。]|(?<=[A-Za-z])!)(?=\s|$)|。|,? (?:so|because|since|which|where|hence)\b|, (?:not|but|rather|instead)\b"
)
_STOP = re.compile(r"(?<!\\)[.?!。](?=\s|$)|。|\n")
_OPINION = re.compile(
    r"(?:not|in)?(?:correct|right|wrong|true|clear|valid|reasonable|unique|given|as|now|not|in)\b", re.I
)
_OPENING = re.compile(r"[\s*_>#]*")


def _said(text: str, strict: bool) -> str | None:
    """What the last label or sentence says; strictly, a sentence counts only where a label precedes it."""
    labels = list(_LABEL.finditer(text))
    if strict and not labels:
        return None
    phrases = deque(_PHRASE.finditer(text, labels[0].end() if strict else 0), MAX_TRIES)
    places = sorted(
        [(one.end(), one.start(), True) for one in labels[-MAX_TRIES:]]
        + [(one.end(), one.start(), False) for one in phrases],
        reverse=True,
    )
    words = None
    for end, start, label in places:
        if label and _CHECKING.search(text[max(0, start - 60) : start]):
            continue
        answer = _after(text, end, label, "final" in text[max(0, start - 8) : end].lower())
        if answer is None or _OPINION.match(answer):
            continue
        if re.search(r"[\d\\$]", answer):
            return answer
        if label:  # Answer: the right option is C
            return words if words and words in answer else answer
        words = words or answer
    return words


def _after(text: str, place: int, label: bool, final: bool) -> str | None:
    """What the text says from a place on. After `Answer:` a whole solution may follow, after `Final Answer:` none."""
    opening = _OPENING.match(text, place)
    place = opening.end() if opening and (label or "\n" not in opening.group()) else place
    end_of_line = text.find("\n", place)
    line = text[place : min(end_of_line if end_of_line >= 0 else len(text), place + MAX_ANSWER)]
    for piece in (_part(line), line):
        if is_answer(piece):
            return piece
    if not label:
        stop = _STOP.search(line)
        sentence = line[: stop.start()] if stop else line
        return last_expression(_reason_off(sentence)) or _letter(sentence)
    display = next(formulas(text[place : place + MAX_ANSWER]), None)
    if display is not None and display[0] == 0:
        return display[2]
    end = text.find("\n\n", place) if final else -1
    scope = text[place : end if end >= 0 else len(text)]
    return (
        last_expression(_reason_off(scope)) or _letter(line) or (None if line.endswith(":") else line.strip() or None)
    )


def _part(text: str) -> str:
    """Up to the end of a sentence: a period after which nothing or a blank comes, or a clause that explains."""
    text = re.sub(r"(?<=[\d)}$]) \((?![A-J]\))[^()\n\d]{1,80}\)(?=[.*\s]*$)", "", text)  # 5 (five)
    end = _SENTENCE.search(text)
    return text[: end.start()] if end and end.start() else text


def _reason_off(text: str) -> str:
    """Without the clause that explains, if what is before it holds an expression."""
    before, because, _ = text.partition(" because ")
    return before if because and last_expression(before) is not None else text


def _letter(text: str) -> str | None:
    """The option that a sentence names: "the correct option is (C)"."""
    letters = re.findall(r"\(([A-J])\)|\b([B-HJ])\b", text)
    return next((one for one in letters[-1] if one), None) if letters else None


# --- text without a mark ---------------------------------------------------------------------

_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}(?![A-Za-z{])")
#: Words of sentences, which no value with a unit holds.
_PROSE = re.compile(
    r"\b(?:so|thus|hence|then|is|are|was|were|it|we|he|she|they|you|get|gets|has|have|cost|costs|give|gives|make|makes|"
    r"need|needs|there|left|that|this|answer)\b",
    re.IGNORECASE,
)
_OPTION = re.compile(r"\\?(?:text\w*\{)?\(?[A-J](?:\)|[.:] )\}?")


def _unmarked(text: str) -> str | None:
    text = text.strip()
    return text if is_answer(text) else last_expression(text)


def is_answer(text: str) -> bool:
    """A value or a few words: not a sentence with a number somewhere in it."""
    text = text.strip().strip("*_").strip()
    if not text or len(text) > 300 or text.endswith(":") or not re.search(r"[^\W_]", text):
        return False
    if "\\box" in text or ("\\begin" not in text and re.search(r"(?<!\\)[.?!。] +\S|\n", text)):
        return False
    if _is_one_formula(text) or (_OPTION.match(text) and len(text) < 80):
        return True
    normal = normalise(text)
    if read_kind(normal) is not None:
        return True
    words = len(_WORD.findall(text)) + len(re.findall(r"[\u3040-\u9fff]{4}", text))
    if words > (2 if re.search(r"[\d$\\]", text) else 4):
        return False
    if re.search(r"[\d$\\]", text) and _PROSE.search(re.sub(r"\\[A-Za-z]+", "", text)):
        return False
    if not words or re.fullmatch(r"(?=[A-Za-z\d]*\d)[A-Za-z][A-Za-z\d]*", text):  # 2^{2005}; AZYUK2A
        return True
    answer = read(normal)
    if isinstance(answer, Words):
        return not re.search(r"\d", answer.text)
    return not isinstance(answer, Unread) or "\\" in text


def _is_one_formula(text: str) -> bool:
    first = next(formulas(text), None)
    return first is not None and first[0] == 0 and not text[first[1] :].strip(" .*")
