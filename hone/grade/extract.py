"""Extracts the answer of a text: the only reader of mathematical answers, in training and evaluation.

    >>> extract("3 * 4 = 12, so\\n#### 12"), extract("Thus the area is $\\\\boxed{\\\\frac{1}{2}}$.")
    ('12', '\\\\frac{1}{2}')
    >>> extract("Final Answer: The final answer is $42$. I hope it is correct.")
    '$42$'

The last `<answer>` block is read, else the text after the thinking, else all of it. The first of these that exists is
the answer:

1. the last box, or the last line `#### ...`, whichever comes later; boxes separated only by commas, `and` or `or` are
   one list;
2. the last statement of the answer: after `Answer:`, or, unless reading is strict, after "the answer is";
3. in a block, or unless reading is strict: the whole text if it is just an answer, else its last expression.

The text after a label is read in the same way: its first sentence if that is just an answer, else the last expression.
Every search is linear in the length of the text, and nothing is recursive.
"""

from __future__ import annotations

import re
from collections import deque

from hone.grade.answers import Unread, Words, read
from hone.grade.expressions import formulas, last_expression
from hone.grade.kinds import read_kind
from hone.grade.notation import normalise
from hone.grade.parse import parse

MAX_ANSWER = 2000  # characters; longer texts are not answers
WINDOW = 10_000  # characters at the end of a text that are searched for answers without a box or hashes
MAX_BOXES = 50  # of one list
MAX_TRIES = 8  # labels, lines and sentences tried, from the end


def extract(text: str, strict: bool = False) -> str | None:
    """The answer, or None. If `strict`, only a marked answer counts. Never raises."""
    block = parse(text).answer
    answer: str | None
    if block is not None:
        end = block[-WINDOW:]
        answer = _marked(block) or _stated(end, strict=False) or _unmarked(end) or block
    else:
        thinking = "<think>" in text and "</think>" not in text
        text = text.rpartition("</think>")[2]
        end = text[-WINDOW:]
        answer = _marked(text) or _stated(end, strict or thinking)
        if answer is None and not strict and not thinking:
            answer = _unmarked(end)
    answer = (answer or "").strip().strip("*_").strip()  # without Markdown around it
    return answer if answer and len(answer) <= MAX_ANSWER else None


# --- boxes and lines of hashes ---------------------------------------------------------------

_BRACES = re.compile(r"\\(?:boxed|box|fbox)\s*\{|\\boxed +(?P<bare>[-\d.,/]*\d)|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n#]+)")
#: Text allowed between the boxes of one list: x = \boxed{2} \text{ or } x = \boxed{3}.
_BETWEEN = re.compile(
    r"\\text ?\{\s*(?:,|;|and|or)?\s*\}|\band\b|\bor\b|(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w\}?)? ?="
    r"|\\q?quad\b|\\[()\[\],;: ]|[,;&$\s]"
)
_CONNECTED = re.compile(r"[,;&]|\b(?:and|or)\b")
_PLACEHOLDERS = ("", "\\ldots", "\\dots", "answer", "your answer", "final answer")

Box = tuple[int, int, str]  # start of the command, end of the box, content


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` (or `\\box{}`) with balanced braces; of nested boxes, the innermost."""
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def _boxes(text: str) -> list[Box]:
    """The complete outermost boxes, in order, each with the content of its last innermost box."""
    if "box" not in text:
        return []
    waiting: list[tuple[int, int]] = []  # start of a box and of its content; (-1, -1) for another brace
    closed: list[tuple[int, int, int]] = []  # begin, inside, end; a box comes after those inside it
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
    outer, inner, chained = (-1, 0), (0, 0), False  # (begin, end) of the current box; its content so far
    for begin, inside, end in reversed(closed):
        if outer[0] >= 0 and begin > outer[0]:  # inside it: follow the chain of last children
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
    """The answer marked by the last boxes or line of hashes."""
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
    """The answer in a line of hashes: all of it, or what its sentence states."""
    part = _part(line)
    return part if is_answer(part) else _stated(line, strict=False) or last_expression(line) or line


def _is_placeholder(inside: str) -> bool:
    r"""Whether a box only echoes the task: "put the answer in \boxed{...}"."""
    if len(inside) > 40:
        return False
    return re.sub(r"\\text ?\{([^{}]*)\}", r"\1", inside).strip(" $.*").casefold() in _PLACEHOLDERS


def _last_hashes(text: str) -> re.Match[str] | None:
    """The last line of hashes with an answer; a heading such as `#### Step 2` is skipped, as text follows it."""
    for match in reversed(deque(_HASHES.finditer(text), maxlen=MAX_TRIES)):
        content = match.group(1).strip(" *_")
        if content and (not text[match.end() :].strip() or (re.search(r"\d", content) and is_answer(content))):
            return match
    return None


# --- sentences that state the answer ---------------------------------------------------

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


def _stated(text: str, strict: bool) -> str | None:
    """The answer after the last label or phrase; if `strict`, a phrase counts only after a label."""
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
    """The answer that follows a position. A whole solution may follow `Answer:`, but not `Final Answer:`."""
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
    """The text up to the end of the sentence: a period before a blank or the end, or an explaining clause."""
    text = re.sub(r"(?<=[\d)}$]) \((?![A-J]\))[^()\n\d]{1,80}\)(?=[.*\s]*$)", "", text)  # 5 (five)
    end = _SENTENCE.search(text)
    return text[: end.start()] if end and end.start() else text


def _reason_off(text: str) -> str:
    """The text without a `because` clause, if an expression precedes it."""
    before, because, _ = text.partition(" because ")
    return before if because and last_expression(before) is not None else text


def _letter(text: str) -> str | None:
    """The option named in a sentence: "the correct option is (C)"."""
    letters = re.findall(r"\(([A-J])\)|\b([B-HJ])\b", text)
    return next((one for one in letters[-1] if one), None) if letters else None


# --- text without a marked answer ---------------------------------------------------------------------

_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}(?![A-Za-z{])")
#: Words of sentences, which do not occur in a value with a unit.
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
    """Whether a text is a value or a few words, not a sentence with a number in it."""
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
