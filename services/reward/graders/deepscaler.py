"""The `deepscaler` rule for mathematical answers: what DeepScaleR published, and slime and many others train with.

The answer is the last `\\boxed{}` after the last `</think>`. It is right if answer and label are equal once normalised
in the manner of the MATH data set, or once normalised further, or if sympy finds their difference to be zero. All but
that last step is cheap. The rule errs in both directions (it forgets units and compares integers as floats), and stays
as it is, so that runs can be compared.
"""

from __future__ import annotations

import math
import re

from services.reward.graders.latex_text import LatexError, latex_to_text
from services.reward.graders.symbolic import is_zero
from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

VERSION = "1"
CHEAP_CHARACTERS = 4096
"""A longer box is left to a worker, since reading it takes milliseconds."""

# ---------------------------------------------------------------------------------------------------------- grading


def grade_cheaply(item: Item) -> Graded | Question:
    """Everything but sympy: the verdict, or the question that only a worker should answer. Takes some microseconds."""
    label = read_label(item.label)
    if label is None:
        return Graded(Verdict.UNGRADABLE)
    box = find_box(item.response, item.require_think)
    if isinstance(box, Reason):
        return item.scored(box)
    answer = open_box(box[:CHEAP_CHARACTERS])
    if answer is None:
        return Question(box, label) if len(box) > CHEAP_CHARACTERS else item.scored(Reason.NO_ANSWER)
    pairs = _open_questions(answer, label) if len(label) <= CHEAP_CHARACTERS else ()
    if isinstance(pairs, bool):
        return item.scored(Reason.CORRECT if pairs else Reason.WRONG)
    return Question(f"{BOX}{{{answer}}}", label)


def decide(question: Question) -> Graded:
    """Answer a question; may take any time and memory, so for workers only."""
    answer = open_box(question.answer)
    if answer is None:
        return Graded(Verdict.SCORED, Reason.NO_ANSWER)
    pairs = _open_questions(answer, question.label)
    right = pairs if isinstance(pairs, bool) else all(_equal_by_sympy(*pair) for pair in pairs)
    return Graded(Verdict.SCORED, Reason.CORRECT if right else Reason.WRONG)


# ------------------------------------------------------------------------------------------------------- extraction

_BRACE = re.compile(r"[{}]")
BOX = "\\boxed"


def find_box(response: str, require_think: bool) -> str | Reason:
    """The response from its last box on, or why there is none."""
    if "</think>" in response:
        segment = response.rpartition("</think>")[2]
    elif "###Response" in response:
        segment = response.split("###Response", 2)[1]
    elif require_think:
        return Reason.NO_THINK_TAG
    else:
        segment = response
    start = segment.rfind(BOX)
    return segment[start:] if start >= 0 else Reason.NO_ANSWER


def open_box(text: str) -> str | None:
    """What stands inside the box that `text` begins with; None unless it is `\\boxed{...}` with its braces closed."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[len(BOX) + 1 : brace.start()] if text.startswith(BOX + "{") else None
    return None


def read_label(label: str) -> str | None:
    """The label, taken out of its box if it has one; None if no response could be graded against it."""
    if BOX in label:
        return open_box(label[label.rfind(BOX) :])
    return label if label and "\\fbox" not in label else None


# --------------------------------------------------------------------------------------------------------- decision


def _open_questions(answer: str, label: str) -> bool | list[tuple[str, str]]:
    """The verdict if strings decide it, else the (label, answer) pairs that must all be equal by sympy."""
    if normalize_mathd(answer) == normalize_mathd(label):
        return True
    answer, label = normalize(answer), normalize(label)
    if answer == label:
        return True
    answers, labels = split_tuple(answer), split_tuple(label)
    if not answer or len(answers) != len(labels):
        return False
    if len(labels) > 1 and (answer[0], answer[-1]) != (label[0], label[-1]):
        return False
    verdicts = [(compare_element(*pair), pair) for pair in zip(labels, answers, strict=True)]
    if any(verdict is False for verdict, _ in verdicts):
        return False
    return [pair for verdict, pair in verdicts if verdict is None] or True


_CANONICAL_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")


def compare_element(label: str, answer: str) -> bool | None:
    """Whether two normalised elements are equal; None where sympy must say."""
    if _FRACTION.search(label) and _FRACTION.search(answer):
        return label == answer  # an unreduced fraction is wrong
    if is_integer(label) != is_integer(answer):
        return False
    if _CANONICAL_INTEGER.fullmatch(label) and _CANONICAL_INTEGER.fullmatch(answer):
        return label == answer
    return None if may_evaluate(f"({label})-({answer})") else False


def _equal_by_sympy(label: str, answer: str) -> bool:
    try:
        return is_zero(f"({label})-({answer})")
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  sympy raises anything; in this rule what it cannot do is not equal
        return False


MAX_LETTERS = 2
_FORBIDDEN = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")


def may_evaluate(expression: str) -> bool:
    """Whether sympy is tried at all: few letters, and no power that is likely to be huge."""
    letters = {one for one in expression.replace("sqrt", "").replace("frac", "") if one.isalpha()}
    return len(letters) <= MAX_LETTERS and not _FORBIDDEN.search(expression)


# -------------------------------------------------------------------------- first normalisation, of the MATH data set

_WHOLE_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_PLAIN_FRACTION = re.compile(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)")
_REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


class _Malformed(ValueError):
    """The text ends where a macro wants an argument."""


def normalize_mathd(text: str) -> str:
    """Spellings of the same answer become the same string, as in the grader of the MATH data set."""
    text = text.strip()
    if whole := _WHOLE_TEXT.search(text):
        text = whole["text"].strip()
    try:
        return _respell(text)
    except _Malformed:
        return text


def _respell(text: str) -> str:
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = _without_unit(text).replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _brace_fractions(_brace_roots(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    if plain := _PLAIN_FRACTION.fullmatch(text):
        return f"\\frac{{{plain[1]}}}{{{plain[2]}}}"
    return text


def _without_unit(text: str) -> str:
    """Drop a unit at the right, written as `\\text{ cm}`."""
    value, unit, rest = text.partition("\\text{ ")
    if unit and unit in rest:
        raise _Malformed
    return value


def _brace_roots(text: str) -> str:
    """`\\sqrt3` becomes `\\sqrt{3}`."""
    head, *tails = text.split("\\sqrt")
    if not all(tails):
        raise _Malformed
    return head + "".join("\\sqrt" + (tail if tail[0] == "{" else f"{{{tail[0]}}}{tail[1:]}") for tail in tails)


def _brace_fractions(text: str) -> str:
    """`\\frac12` becomes `\\frac{1}{2}`; with an argument missing the text stays as it is."""
    head, *tails = text.split("\\frac")
    parts = [head]
    for tail in tails:
        if not tail:
            raise _Malformed
        if tail[0] == "{":
            parts.append(tail)
        elif len(tail) < 2:
            return text
        else:
            denominator = tail[1] if tail[1] == "{" else f"{{{tail[1]}}}"
            parts.append(f"{{{tail[0]}}}{denominator}{tail[2:]}")
    return "\\frac".join(parts)


# ------------------------------------------------------------------------------- second normalisation, before sympy

UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
"""Deleted in this order wherever they stand, inside words too."""
_UNITS = [re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in UNITS.split()]
_MAGNITUDES = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_SYMBOL_SPELLINGS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))  # noqa: RUF001
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
INTEGER_TOLERANCE = 1e-7


def normalize(text: str) -> str:
    """The string that is compared, split and given to sympy."""
    if whole := _WHOLE_TEXT.search(text):
        text = whole["text"]
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in _MAGNITUDES:
        text = text.replace(word, power)
    for unit in _UNITS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if _near_integer(text):
        text = str(round(float(text)))
    text = re.sub("- *", "-", _spell_out(text))
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # a mixed number is a sum
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(text.replace(",", "")))) if is_integer(text) else text


def _spell_out(text: str) -> str:
    """LaTeX as text that sympy can read."""
    if "\\" not in text:
        return text
    latex = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    try:
        plain = latex_to_text(latex)
    except LatexError:
        return text
    for symbol, spelling in _SYMBOL_SPELLINGS:
        plain = plain.replace(symbol, spelling)
    return plain.strip()


def without_thousands(text: str) -> str:
    """1,234,567 becomes 1234567; commas between the elements of a tuple stay."""
    while (shorter := _THOUSANDS.sub(r"\1\3\4", text)) != text:
        text = shorter
    return text


def is_integer(text: str) -> bool:
    """True if the text reads as a number within INTEGER_TOLERANCE of an integer."""
    return _near_integer(without_thousands(text))


def _near_integer(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return math.isfinite(value) and abs(value - round(value)) <= INTEGER_TOLERANCE


_BRACKETS = "()[]"


def split_tuple(text: str) -> list[str]:
    """The elements of a tuple or an interval; a text that is neither is its own only element."""
    text = without_thousands(text)
    if not text:
        return []
    inside = text[1:-1]
    if inside and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(one in inside for one in _BRACKETS):
        return [element.strip() for element in inside.split(",")]
    return [text]
