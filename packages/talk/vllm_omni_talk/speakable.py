# SPDX-License-Identifier: Apache-2.0
"""What a reader would say of a written reply: without markup, code and emoji.

Numbers are left to the voice, except those too long for a name. A reply may come in parts, which are cut at sentences:
what marks up several of them, such as a link, may begin in one part and end in another.
"""

import html
import re

_FENCE = re.compile(r"^\s*(?:```|~~~)", re.MULTILINE)
_ADDRESS = r"\](?:\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\])"
_IMAGE_OR_LINK = re.compile(rf"!?\[([^\]]{{0,400}}){_ADDRESS}")
_HALF_OF_A_LINK = re.compile(rf"!(?=\[)|{_ADDRESS}")
_URL = re.compile(r"<?\b(?:https?://|www\.)([^\s/<>()?#]*[^\s/<>()?#.,;:!])[^\s<>()]*?(?=[.,;:!?]*(?:[\s<>()]|$))>?")
_MAIL = re.compile(r"\b([\w.+-]+)@([\w-]+(?:\.[\w-]+)+)")
_FLAGS = (
    "allowfullscreen|async|autofocus|autoplay|checked|controls|default|defer|disabled|formnovalidate|hidden|inert|ismap|"
    "itemscope|loop|multiple|muted|nomodule|novalidate|open|playsinline|readonly|required|reversed|selected"
)
"""HTML's attributes without a value. Any other word in angle brackets may be mathematics: `x<y and y>z`."""
_ATTRIBUTE = rf"[\w:-]+\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'|[^\s\"'<>]+)|(?i:{_FLAGS})(?=[\s/>])"
_TAG = re.compile(rf"</?[a-zA-Z][\w-]*(?:\s+(?:{_ATTRIBUTE}))*\s*/?>|<!--.{{0,400}}?-->|<![a-zA-Z][^<>]{{0,400}}>")
_INLINE_CODE = re.compile(r"`+([^`]+)`+")
# A mark behind a number, or a short name, multiplies: `2*3*4`, `x**2 + y**2`.
_MARK = r"(?<![\d*~])(?<!\b\w)(?:\*{2,3}|~~)|(?<![\w*)])\*(?!\*)"
_EMPHASIS = re.compile(rf"({_MARK})(?=\S)(.{{1,400}}?)(?<=\S)\1")
_UNDERLINED = re.compile(r"(?<!\w)(_{1,3})(?=\S)(.{1,400}?)(?<=\S)\1(?!\w)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_RULE = re.compile(r"^\s*(?:[-*_=]\s*){3,}$")
_BULLET = re.compile(r"^(?:[-*+•]|\[[ xX]\])\s+")
_NUMBERED = re.compile(r"^(\d+)[.)]\s+")
_TABLE_RULE = re.compile(r"^\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?)?$")
_LONG_NUMBER = re.compile(r"\d(?:,?\d){36,}")
"""Has no name: names of numbers end with decillions."""
_EMOJI = re.compile("[\U0001f000-\U0001faff\U000e0020-\U000e007f\u2600-\u27bf\u2b00-\u2bff\u200d\u20e3\ufe0e\ufe0f]+")
_WORDS = {
    r"\be\.\s?g\.,?": "for example,",
    r"\bi\.\s?e\.,?": "that is,",
    r"\betc\.(?=\s+[A-Z]|\s*$)": "et cetera.",
    r"\betc\.": "et cetera",
    r"\bvs\.": "versus",
    r"\bw/o\b": "without",
    r"\bw/(?=\s|\w)": "with ",
    r"\s*(?:→|⇒|->|=>)\s*": " to ",
    r"\s*≈\s*": " is about ",
    r"\s*(?:≥|>=)\s*": " is at least ",
    r"\s*(?:≤|<=)\s*": " is at most ",
    r"\s*(?:≠|!=)\s*": " is not ",
    r"(?<=\d)\s*[*\u00d7]\s*(?=\d)|(?<=[\w)])\*(?=[\w(])": " times ",
    r"(?<=[\w)])(?:\^\{?|\*\*(?=\d|\w\b))(?=\w)": " to the power of ",
    r"\\[()\[\]]": "",
    r"[*\\^|~`{}_]+": " ",
}
_ENDS = (".", "!", "?", "…", ":", ";", ",")


def speakable(text: str) -> str:
    """The words of a reply in Markdown, with a sentence's end after each heading, item and row of a table.

    Blocks of code are left out, links are their text, and an address on the web is its host. The result is empty where
    nothing is left to say.
    """
    return split_code(text)[0]


def split_code(text: str, in_code: bool = False) -> tuple[str, bool]:
    """What is said of a part of a reply; a block of code may begin in one part and end in a later one.

    Args:
        in_code: Whether the part begins in a block of code.

    Returns:
        What is said, and whether the part ends in a block of code.
    """
    spoken = []
    for line in text.splitlines():
        if _FENCE.match(line):
            in_code = not in_code
        elif not in_code and (words := _line(line.strip())):
            spoken.append(words)
    return "\n".join(spoken), in_code


def _line(line: str) -> str:
    """One line of a paragraph, or a block of one line, which ends as a sentence does."""
    if _RULE.match(line) or _TABLE_RULE.match(line):
        return ""
    line = line.lstrip("> ")
    heading = _HEADING.match(line)
    is_row = line.startswith("|") and line.endswith("|")
    if heading is not None:
        line = heading[1]
    elif is_row:
        line = ", ".join(cell.strip() for cell in line.strip("|").split("|") if cell.strip())
    without_mark = _NUMBERED.sub(r"\1, ", _BULLET.sub("", _BULLET.sub("", line)))
    is_block = heading is not None or is_row or without_mark != line
    words = _words(without_mark)
    return f"{words}." if is_block and words and not words.endswith(_ENDS) else words


def _words(text: str) -> str:
    text = _HALF_OF_A_LINK.sub("", _IMAGE_OR_LINK.sub(r"\1", text))
    text = _URL.sub(lambda url: url[1].removeprefix("www.").replace(".", " dot "), text)
    text = _MAIL.sub(lambda mail: " at ".join(part.replace(".", " dot ") for part in mail.groups()), text)
    text = html.unescape(_TAG.sub(" ", text))
    text = _INLINE_CODE.sub(r"\1", text)
    for marks in (_EMPHASIS, _EMPHASIS, _UNDERLINED):  # Bold may hold italics.
        text = marks.sub(r"\2", text)
    text = _EMOJI.sub(" ", text)
    text = _LONG_NUMBER.sub(_by_digits, text)
    for pattern, words in _WORDS.items():
        text = re.sub(pattern, words, text)
    text = re.sub(r"\s+(?=[.,;:!?…](?:\s|$))", "", re.sub(r"\s+", " ", text)).strip()
    return text if re.search(r"\w", text) else ""


def _by_digits(number: re.Match[str]) -> str:
    """Digit by digit, with a pause after each third."""
    digits = number[0].replace(",", "")
    return ", ".join(" ".join(digits[start : start + 3]) for start in range(0, len(digits), 3))
